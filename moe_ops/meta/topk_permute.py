"""Checks and outputs of topk_permute."""

from __future__ import annotations

import torch

from moe_ops._errors import require
from moe_ops.meta._checks import INT32_MAX, check_device, check_ids, check_rows, check_ticket


def check_permute(
    op: str,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    num_experts: int,
) -> None:
    check_rows(op, "hidden_states", hidden_states)
    check_ids(op, topk_ids, hidden_states.shape[0])
    check_device(op, hidden_states, topk_ids=topk_ids)
    for fits in (num_experts > 0, num_experts <= INT32_MAX):  # apart, since a chain would decide symbolic ones
        require(fits, op, "num_experts", "a positive number of experts", str(num_experts))


def topk_permute(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    num_experts: int,
    *,
    num_out_tokens: int | None = None,
    after: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_permute("topk_permute", hidden_states, topk_ids, num_experts)
    check_ticket("topk_permute", "after", after)
    check_device("topk_permute", hidden_states, after=after)
    num_tokens, hidden_size = hidden_states.shape
    top_k = topk_ids.shape[1]
    rows = num_tokens * top_k
    if num_out_tokens is not None:
        require(num_out_tokens >= 0, "topk_permute", "num_out_tokens", "at least 0", str(num_out_tokens))
        rows = num_out_tokens
    return (
        hidden_states.new_empty((rows, hidden_size)),
        topk_ids.new_empty((num_tokens, top_k), dtype=torch.int32),
        topk_ids.new_empty((num_experts,), dtype=torch.int32),
    )
