"""ep_remap on NPU: integer selections, exactly those of the reference."""

from __future__ import annotations

import torch

from moe_ops.meta.ep_remap import ep_remap as check_and_allocate
from moe_ops.npu._device import require_npu

_INT64_MAX = 2**63 - 1
_NONE = 2**31 - 1  # above every local id


def ep_remap(
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    expert_offset: int | None = None,
    num_local_experts: int | None = None,
    expert_map: torch.Tensor | None = None,
    fill: str = "reuse",
) -> tuple[torch.Tensor, torch.Tensor]:
    require_npu("ep_remap")
    empty_ids, empty_weights = check_and_allocate(
        topk_ids,
        topk_weights,
        expert_offset=expert_offset,
        num_local_experts=num_local_experts,
        expert_map=expert_map,
        fill=fill,
    )
    if topk_ids.numel() == 0:
        return empty_ids, empty_weights
    ids = topk_ids.to(torch.int64)
    if expert_map is not None:
        owned, local = _from_table(ids, expert_map)
    else:
        assert expert_offset is not None and num_local_experts is not None
        # Compared before subtracting, so that ids near the ends of int64 cannot wrap around.
        owned = (ids >= expert_offset) & (ids <= min(expert_offset + num_local_experts - 1, _INT64_MAX))
        local = torch.where(owned, ids, torch.full_like(ids, expert_offset)) - expert_offset
    local = local.to(torch.int32)
    weights = topk_weights.to(torch.float32)
    weights = torch.where(owned, weights, torch.zeros_like(weights))
    if fill == "skip":
        return torch.where(owned, local, torch.full_like(local, -1)), weights
    row_minimum = torch.where(owned, local, torch.full_like(local, _NONE)).amin(dim=1, keepdim=True)  # [T, 1]
    batch_minimum = row_minimum.amin(dim=0, keepdim=True)
    batch_minimum = torch.where(batch_minimum == _NONE, torch.zeros_like(batch_minimum), batch_minimum)
    filler = torch.where(row_minimum == _NONE, batch_minimum, row_minimum)
    return torch.where(owned, local, filler), weights


def _from_table(ids: torch.Tensor, expert_map: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if expert_map.numel() == 0:
        return torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids)
    known = (ids >= 0) & (ids < expert_map.numel())
    index = torch.where(known, ids, torch.zeros_like(ids))
    local = expert_map.to(torch.int64).index_select(0, index.flatten()).view_as(ids)
    return known & (local >= 0), local
