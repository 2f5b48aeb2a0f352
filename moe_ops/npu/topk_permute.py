"""topk_permute on NPU: one fused routing operator; rows past the routed ones are then set to 0."""

from __future__ import annotations

import torch

from moe_ops.meta.topk_permute import topk_permute as check_and_allocate
from moe_ops.npu._device import require_npu
from moe_ops.npu._routing import count_keys, expert_keys, permute, slot_order, zero_tail


def topk_permute(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    num_experts: int,
    *,
    num_out_tokens: int | None = None,
    after: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    require_npu("topk_permute")
    # `after` needs nothing: the submit was queued on the stream of this op, or on one that waits for it.
    outputs = check_and_allocate(hidden_states, topk_ids, num_experts, num_out_tokens=num_out_tokens, after=after)
    keys = expert_keys(topk_ids, num_experts)
    if num_out_tokens is not None and num_out_tokens != keys.numel():
        return _truncated(hidden_states, keys, num_experts, outputs)
    if keys.numel() == 0:
        return outputs[0], outputs[1], outputs[2].zero_()
    rows, row_map, counts = permute(hidden_states, keys, num_experts)
    return zero_tail(rows, counts), row_map, counts.to(torch.int32)


def _truncated(
    hidden_states: torch.Tensor, keys: torch.Tensor, num_experts: int, outputs: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A given number of rows, fewer or more than the slots: only the rows that are kept are moved."""
    permuted = outputs[0]
    kept = min(permuted.shape[0], keys.numel())
    counts = count_keys(keys, num_experts)
    order, row_map = slot_order(keys, num_experts)
    if kept:
        permuted[:kept].copy_(hidden_states.index_select(0, order[:kept] // keys.shape[1]))
    row_map = torch.where(row_map < permuted.shape[0], row_map, torch.full_like(row_map, -1))
    return zero_tail(permuted, counts) if permuted.numel() else permuted, row_map, counts
