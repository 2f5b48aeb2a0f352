"""topk_permute_out on NPU. CANN's routing operators allocate their result: it is copied to its place."""

from __future__ import annotations

import torch

from moe_ops.meta.topk_permute_out import check_no_overlap
from moe_ops.meta.topk_permute_out import topk_permute_out as check_and_allocate
from moe_ops.npu._device import require_npu
from moe_ops.npu._routing import expert_keys, permute, zero_tail


def topk_permute_out(
    hidden_states: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, *, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    op = "topk_permute_out"
    require_npu(op)
    row_map, tokens_per_expert = check_and_allocate(hidden_states, topk_ids, num_experts, out=out)
    check_no_overlap(op, out, hidden_states=hidden_states, topk_ids=topk_ids)
    keys = expert_keys(topk_ids, num_experts)
    if keys.numel() == 0:
        out.zero_()
        return row_map, tokens_per_expert.zero_()
    rows, row_map, counts = permute(hidden_states, keys, num_experts)
    out[: rows.shape[0]].copy_(rows)
    zero_tail(out, counts)
    return row_map, counts.to(torch.int32)
