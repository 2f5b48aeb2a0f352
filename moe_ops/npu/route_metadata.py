"""route_metadata on NPU: prefix sums over the counts, with the formulas and names of the reference."""

from __future__ import annotations

import torch

from moe_ops.meta.route_metadata import route_metadata as check_and_allocate
from moe_ops.npu._device import require_npu


def route_metadata(tokens_per_source: torch.Tensor, ep_rank: int, *, mode: str = "push") -> tuple[torch.Tensor, ...]:
    require_npu("route_metadata")
    outputs = check_and_allocate(tokens_per_source, ep_rank, mode=mode)
    counts = _padded_counts(tokens_per_source.to(torch.int64))  # [R source, R owner, L]
    ep_size, _, local_experts = counts.shape
    source = _exclusive(counts.reshape(ep_size, -1)).view_as(counts)  # S
    by_owner = counts.permute(1, 2, 0).contiguous()  # [owner, L, source]
    target = _exclusive(by_owner.reshape(ep_size, -1)).view(ep_size, local_experts, ep_size)  # T

    combine = (target[ep_rank].t(), source[:, ep_rank], counts[:, ep_rank])
    push = (source[ep_rank], target[:, :, ep_rank], counts[ep_rank])
    dispatch = push if mode == "push" else (combine[1], combine[0], combine[2])
    group_ends = target[ep_rank, :, -1] + by_owner[ep_rank, :, -1]
    loads = by_owner.sum(dim=(1, 2))
    for output, value in zip(outputs, (*dispatch, *combine, group_ends, loads), strict=True):
        output.copy_(value.reshape(-1))
    return outputs


def _padded_counts(counts: torch.Tensor) -> torch.Tensor:
    """[R, E] to [R, R, L]; ranks past the first E mod R get an empty virtual expert at their end."""
    ep_size, num_experts = counts.shape
    local_experts = -(-num_experts // ep_size)
    larger = num_experts - ep_size * (local_experts - 1)  # ranks that own L experts; the others own L - 1
    split = larger * local_experts
    full = counts[:, :split].reshape(ep_size, larger, local_experts)
    if larger == ep_size:
        return full
    rest = counts[:, split:].reshape(ep_size, ep_size - larger, local_experts - 1)
    empty = torch.zeros(ep_size, ep_size - larger, 1, dtype=counts.dtype, device=counts.device)
    return torch.cat([full, torch.cat([rest, empty], dim=2)], dim=1)


def _exclusive(counts: torch.Tensor) -> torch.Tensor:
    return counts.cumsum(-1) - counts
