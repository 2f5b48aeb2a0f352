"""Checks and outputs of route_metadata."""

from __future__ import annotations

import torch

from moe_ops._errors import rank, require

MODES = ("push", "pull")


def route_metadata(tokens_per_source: torch.Tensor, ep_rank: int, *, mode: str = "push") -> tuple[torch.Tensor, ...]:
    op = "route_metadata"
    ok = rank(tokens_per_source) == 2 and tokens_per_source.dtype == torch.int32
    require(ok, op, "tokens_per_source", "[ep_size, num_experts] int32", tokens_per_source)
    ep_size, num_experts = tokens_per_source.shape
    require(ep_size > 0 and num_experts > 0, op, "tokens_per_source", "not empty", tokens_per_source)
    require(0 <= ep_rank < ep_size, op, "ep_rank", f"in [0, {ep_size})", str(ep_rank))
    require(mode in MODES, op, "mode", "'push' or 'pull'", mode.join("''"))
    local_experts = (num_experts + ep_size - 1) // ep_size

    def empty(length: int, dtype: torch.dtype) -> torch.Tensor:
        return tokens_per_source.new_empty((length,), dtype=dtype)

    slots = ep_size * local_experts
    offsets = [torch.int64, torch.int64, torch.int32]
    dispatch = [empty(slots, dtype) for dtype in offsets]
    combine = [empty(slots, dtype) for dtype in offsets]
    return (*dispatch, *combine, empty(local_experts, torch.int64), empty(ep_size, torch.int64))
