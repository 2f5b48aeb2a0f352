"""Global expert ids to this rank's local ids.

A slot of a foreign expert, or of none, gets weight 0 and, with fill "reuse", an id whose weights the batch reads
anyway: the smallest local id of its row, else of the batch, else 0; with fill "skip" it gets -1.
"""

from __future__ import annotations

import torch

_NONE = 2**62  # above every id


def local_ids(
    topk_ids: torch.Tensor,
    expert_offset: int | None,
    num_local_experts: int | None,
    expert_map: torch.Tensor | None,
) -> torch.Tensor:
    """[T, K] int64, -1 where the expert is not local."""
    ids = topk_ids.to(torch.int64)
    if expert_map is None:
        assert expert_offset is not None and num_local_experts is not None
        # Compared before subtracting, so that ids near the ends of int64 cannot wrap around.
        owned = (ids >= expert_offset) & (ids < expert_offset + num_local_experts)
        return torch.where(owned, torch.where(owned, ids, expert_offset) - expert_offset, -1)
    known = (ids >= 0) & (ids < expert_map.numel())
    if expert_map.numel() == 0:
        return torch.full_like(ids, -1)
    mapped = expert_map.to(torch.int64)[torch.where(known, ids, 0)]
    return torch.where(known & (mapped >= 0), mapped, -1)


def ep_remap(
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    expert_offset: int | None = None,
    num_local_experts: int | None = None,
    expert_map: torch.Tensor | None = None,
    fill: str = "reuse",
) -> tuple[torch.Tensor, torch.Tensor]:
    local = local_ids(topk_ids, expert_offset, num_local_experts, expert_map)
    owned = local >= 0
    weights = torch.where(owned, topk_weights.to(torch.float32), 0.0)
    if fill == "skip":
        return local.to(torch.int32), weights
    if local.numel() == 0:
        return local.to(torch.int32), weights
    row_minimum = torch.where(owned, local, _NONE).amin(dim=1, keepdim=True)  # [T, 1]
    batch_minimum = row_minimum.amin()
    batch_minimum = torch.where(batch_minimum == _NONE, 0, batch_minimum)
    filler = torch.where(row_minimum == _NONE, batch_minimum, row_minimum)
    return torch.where(owned, local, filler).to(torch.int32), weights
