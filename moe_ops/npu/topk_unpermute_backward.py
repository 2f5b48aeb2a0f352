"""topk_unpermute_backward on NPU: rows gather the gradient of the slot that reads them, nothing is scattered."""

from __future__ import annotations

import torch

from moe_ops.meta.topk_unpermute_backward import topk_unpermute_backward as check_and_allocate
from moe_ops.npu._device import require_npu


def topk_unpermute_backward(
    grad_output: torch.Tensor,
    permuted_hidden_states: torch.Tensor,
    row_map: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    require_npu("topk_unpermute_backward")
    grad_permuted, grad_weights = check_and_allocate(grad_output, permuted_hidden_states, row_map, topk_weights)
    rows, (num_tokens, top_k) = permuted_hidden_states.shape[0], row_map.shape
    if rows == 0 or num_tokens == 0 or top_k == 0:
        return grad_permuted.zero_(), grad_weights.zero_()
    present = (row_map >= 0) & (row_map < rows)
    slot = slots_of_rows(row_map, present, rows)
    read = slot >= 0
    slot = torch.where(read, slot, torch.zeros_like(slot))
    grad = grad_output.to(torch.float32)
    value = grad.index_select(0, slot // top_k)  # [rows, H]
    if topk_weights is not None:
        weights = topk_weights.to(torch.float32).flatten().index_select(0, slot)
        read = read & (weights != 0)
        value = value * weights.unsqueeze(1)
        index = torch.where(present, row_map, torch.zeros_like(row_map))
        products = [
            (permuted_hidden_states.index_select(0, index[:, k].contiguous()).to(torch.float32) * grad).sum(1)
            for k in range(top_k)
        ]
        grad_weights = torch.stack(products, dim=1)
        grad_weights = torch.where(present, grad_weights, torch.zeros_like(grad_weights))
    value = torch.where(read.unsqueeze(1), value, torch.zeros_like(value))
    return value.to(permuted_hidden_states.dtype), grad_weights


def slots_of_rows(row_map: torch.Tensor, present: torch.Tensor, rows: int) -> torch.Tensor:
    """[rows] int64: the slot that reads each row, -1 for none. Slots without a row share one that is cut off."""
    target = torch.where(present, row_map, torch.full_like(row_map, rows)).flatten().to(torch.int64)
    slots = torch.arange(row_map.numel(), device=row_map.device)
    return torch.full((rows + 1,), -1, device=row_map.device).scatter(0, target, slots)[:rows]
