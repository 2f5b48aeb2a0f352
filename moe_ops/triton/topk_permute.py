"""topk_permute on CUDA: the permutation map, then one pass that reads each row once and writes it top_k times."""

from __future__ import annotations

import torch

from moe_ops.meta.topk_permute import topk_permute as check_and_allocate
from moe_ops.triton._permute_rows import permute_rows


def topk_permute(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    num_experts: int,
    *,
    num_out_tokens: int | None = None,
    after: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    outputs = check_and_allocate(hidden_states, topk_ids, num_experts, num_out_tokens=num_out_tokens, after=after)
    permute_rows(hidden_states, topk_ids, *outputs)
    return outputs
