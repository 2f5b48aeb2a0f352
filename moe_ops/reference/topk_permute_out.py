"""topk_permute into a caller's buffer, all of whose rows are written."""

from __future__ import annotations

import torch

from moe_ops.reference.topk_permute import topk_permute


def topk_permute_out(
    hidden_states: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, *, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    permuted, row_map, tokens_per_expert = topk_permute(
        hidden_states, topk_ids, num_experts, num_out_tokens=out.shape[0]
    )
    out.copy_(permuted)
    return row_map, tokens_per_expert
