"""Loops written from the formulas, independent of the library: what a route must be."""

from __future__ import annotations

import torch


def owners(num_experts: int, ep_size: int) -> list[list[int]]:
    """Experts of each rank: the first `num_experts % ep_size` ranks own one more."""
    owned, first = [], 0
    for rank in range(ep_size):
        count = num_experts // ep_size + (rank < num_experts % ep_size)
        owned.append(list(range(first, first + count)))
        first += count
    return owned


def metadata(counts: list[list[int]], ep_rank: int, mode: str) -> dict[str, list[int]]:
    """The descriptors of `ep_rank` for `counts[source][expert]`."""
    ep_size, num_experts = len(counts), len(counts[0])
    owned = owners(num_experts, ep_size)
    width = -(-num_experts // ep_size)
    ranks = range(ep_size)

    def count(source: int, owner: int, j: int) -> int:
        return counts[source][owned[owner][j]] if j < len(owned[owner]) else 0

    def in_source(source: int, owner: int, j: int) -> int:
        """Rows of the source's permuted buffer before its block for (owner, j)."""
        before = owned[owner][j] if j < len(owned[owner]) else (owned[owner][-1] + 1 if owned[owner] else num_experts)
        return sum(counts[source][:before])

    def in_receive(owner: int, j: int, source: int) -> int:
        """Rows of the owner's receive buffer before (j, source): expert-major, source-minor."""
        blocks = [(jj, ss) for jj in range(width) for ss in ranks]
        return sum(count(ss, owner, jj) for jj, ss in blocks if (jj, ss) < (j, source))

    pairs = [(rank, j) for rank in ranks for j in range(width)]
    pulled = {
        "src": [in_source(s, ep_rank, j) for s, j in pairs],
        "dst": [in_receive(ep_rank, j, s) for s, j in pairs],
        "size": [count(s, ep_rank, j) for s, j in pairs],
    }
    pushed = {
        "src": [in_source(ep_rank, t, j) for t, j in pairs],
        "dst": [in_receive(t, j, ep_rank) for t, j in pairs],
        "size": [count(ep_rank, t, j) for t, j in pairs],
    }
    dispatched = pushed if mode == "push" else pulled
    group_ends = [in_receive(ep_rank, j, ep_size - 1) + count(ep_size - 1, ep_rank, j) for j in range(width)]
    return {
        "dispatch_src": dispatched["src"],
        "dispatch_dst": dispatched["dst"],
        "dispatch_size": dispatched["size"],
        "combine_src": pulled["dst"],
        "combine_dst": pulled["src"],
        "combine_size": pulled["size"],
        "group_ends": group_ends,
    }


def loads(counts: list[list[int]]) -> list[int]:
    return [sum(row[e] for row in counts for e in owned) for owned in owners(len(counts[0]), len(counts))]


def histogram(topk_ids: torch.Tensor, num_experts: int) -> list[int]:
    flat = topk_ids.reshape(-1).tolist()
    return [flat.count(expert) for expert in range(num_experts)]
