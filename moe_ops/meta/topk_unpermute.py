"""Checks and outputs of topk_unpermute."""

from __future__ import annotations

import torch

from moe_ops._errors import rank, require
from moe_ops.meta._checks import check_device, check_rows, check_weights


def check_unpermute(
    op: str, permuted_hidden_states: torch.Tensor, row_map: torch.Tensor, topk_weights: torch.Tensor | None
) -> None:
    check_rows(op, "permuted_hidden_states", permuted_hidden_states, "[rows, hidden_size]")
    require(rank(row_map) == 2 and row_map.dtype == torch.int32, op, "row_map", "[num_tokens, top_k] int32", row_map)
    if topk_weights is not None:
        check_weights(op, topk_weights, row_map.shape[0], row_map.shape[1])
    check_device(op, permuted_hidden_states, row_map=row_map, topk_weights=topk_weights)


def topk_unpermute(
    permuted_hidden_states: torch.Tensor, row_map: torch.Tensor, topk_weights: torch.Tensor | None = None
) -> torch.Tensor:
    check_unpermute("topk_unpermute", permuted_hidden_states, row_map, topk_weights)
    return permuted_hidden_states.new_empty((row_map.shape[0], permuted_hidden_states.shape[1]))
