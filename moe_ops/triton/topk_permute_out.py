"""topk_permute_out on CUDA."""

from __future__ import annotations

import torch

from moe_ops.meta.topk_permute_out import check_no_overlap
from moe_ops.meta.topk_permute_out import topk_permute_out as check_and_allocate
from moe_ops.triton._permute_rows import permute_rows


def topk_permute_out(
    hidden_states: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, *, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    row_map, tokens_per_expert = check_and_allocate(hidden_states, topk_ids, num_experts, out=out)
    check_no_overlap("topk_permute_out", out, hidden_states=hidden_states, topk_ids=topk_ids)
    permute_rows(hidden_states, topk_ids, out, row_map, tokens_per_expert)
    return row_map, tokens_per_expert
