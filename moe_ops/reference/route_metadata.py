"""Offsets and sizes, in rows, of an expert-parallel exchange: who sends which rows where, and the way back.

With C[s, e] rows of source s for expert e, L = ceil(E / R) experts a rank (the first E mod R ranks own one more where
R does not divide E; the others have one empty virtual expert at their end), t the owner of an expert and j its place
there:

    S[s, e]    = rows of source s before expert e                 (the source's permuted rows)
    T[t, j, s] = rows of rank t's receive buffer before (j, s)    (expert-major, source-minor)
"""

from __future__ import annotations

import torch


def padded_counts(tokens_per_source: torch.Tensor) -> torch.Tensor:
    """[R, E] counts to [R, R, L]: source, owner, local expert, with empty virtual experts."""
    ep_size, num_experts = tokens_per_source.shape
    local_experts = -(-num_experts // ep_size)
    larger = num_experts - ep_size * (local_experts - 1)  # ranks that own L experts; the others own L - 1
    counts = torch.zeros(ep_size, ep_size, local_experts, dtype=torch.int64, device=tokens_per_source.device)
    first = 0
    for rank in range(ep_size):
        owned = local_experts if rank < larger else local_experts - 1
        counts[:, rank, :owned] = tokens_per_source[:, first : first + owned]
        first += owned
    return counts


def _exclusive(counts: torch.Tensor) -> torch.Tensor:
    return counts.cumsum(-1) - counts


def route_metadata(tokens_per_source: torch.Tensor, ep_rank: int, *, mode: str = "push") -> tuple[torch.Tensor, ...]:
    counts = padded_counts(tokens_per_source)  # [R source, R owner, L]
    ep_size, _, local_experts = counts.shape
    source = _exclusive(counts.reshape(ep_size, -1)).view_as(counts)  # S
    by_owner = counts.permute(1, 2, 0)  # [owner, L, source]
    target = _exclusive(by_owner.reshape(ep_size, -1)).view(ep_size, local_experts, ep_size)  # T
    mine = by_owner[ep_rank]  # [L, source]

    combine_src = target[ep_rank].t()  # [source, L]
    combine_dst = source[:, ep_rank]
    combine_size = counts[:, ep_rank]
    if mode == "push":
        dispatch = (source[ep_rank], target[:, :, ep_rank], counts[ep_rank])
    else:
        dispatch = (combine_dst, combine_src, combine_size)
    group_ends = target[ep_rank, :, -1] + mine[:, -1]
    loads = by_owner.sum(dim=(1, 2))

    def flat(tensor: torch.Tensor, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return tensor.reshape(-1).to(dtype).clone()

    return (
        flat(dispatch[0]),
        flat(dispatch[1]),
        flat(dispatch[2], torch.int32),
        flat(combine_src),
        flat(combine_dst),
        flat(combine_size, torch.int32),
        flat(group_ends),
        flat(loads),
    )
