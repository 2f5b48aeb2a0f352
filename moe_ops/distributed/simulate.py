"""Routes and traffic of groups that are not at hand: `python -m moe_ops.distributed.simulate --ranks 64 1024`.

Draws the counts of every rank, builds every rank's metadata, checks that together they describe one consistent
exchange, and prints the bytes that cross each kind of link. Runs on the CPU, in one process.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_ops import ops
from moe_ops.distributed.placement import ExpertShards, first_experts
from moe_ops.distributed.summary import HEADER_WORDS


@dataclass(frozen=True)
class Setting:
    """One exchange: `skew` is the exponent of a power law over experts (0: uniform), dealt anew to each run's
    experts."""

    ep_size: int
    num_experts: int
    tokens: int = 128  # per rank
    top_k: int = 8
    hidden_size: int = 7168
    ranks_per_node: int = 8
    skew: float = 0.0
    dispatch_bytes: int = 2  # per element, bfloat16
    combine_bytes: int = 4  # per element, float32


@dataclass(frozen=True)
class Traffic:
    """Bytes of one forward. A rank's own rows do not travel; a node is `ranks_per_node` neighbours."""

    loads: torch.Tensor  # [R] rows each rank receives
    out_of_rank: torch.Tensor  # [R] bytes that a rank sends to other ranks (dispatch) and back (combine)
    link_mean: float  # bytes between two ranks, both directions of the exchange
    link_max: float
    node_out: torch.Tensor  # [nodes] bytes that leave a node
    once_per_rank: float  # share of dispatched rows that would travel if a token went once to each rank
    gather_bytes: int  # of the count gather that each rank receives


def draw_ids(setting: Setting, generator: torch.Generator) -> torch.Tensor:
    """[R, T, K] distinct experts per token, by the power law."""
    rank_of_expert = torch.randperm(setting.num_experts, generator=generator)
    popularity = (1.0 + rank_of_expert) ** -setting.skew
    draws = setting.ep_size * setting.tokens
    chosen = torch.multinomial(popularity.expand(draws, -1), setting.top_k, generator=generator)
    return chosen.view(setting.ep_size, setting.tokens, setting.top_k)


def count(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[R, E] int32 rows of each source for each expert."""
    counts = torch.zeros(ids.shape[0], num_experts, dtype=torch.int32)
    flat = ids.reshape(ids.shape[0], -1)
    return counts.scatter_add_(1, flat, torch.ones_like(flat, dtype=torch.int32))


def check_exchange(counts: torch.Tensor, ranks: Sequence[int]) -> int:
    """Raise AssertionError unless the metadata of `ranks` is consistent with all others; returns the ranks checked.

    For each rank: the blocks of its receive buffer tile it without gap or overlap, in push and in pull; what peers push
    lands where this rank pulls it to; the way back is the dispatch with source and destination swapped; sizes add up.
    """
    ep_size = counts.shape[0]
    width = ExpertShards(counts.shape[1], ep_size).max_local
    pushed = {rank: ops.route_metadata(counts, rank, mode="push") for rank in ranks}
    for rank in ranks:
        src, dst, size, back_src, back_dst, back_size, group_ends, loads = ops.route_metadata(counts, rank, mode="pull")
        _must(torch.equal(src, back_dst) and torch.equal(dst, back_src) and torch.equal(size, back_size), "way back")
        rows = int(loads[rank])
        _must(torch.equal(loads, pushed[rank][7]) and int(size.sum()) == rows == int(group_ends[-1]), "loads")
        filled = size > 0
        begin, order = dst[filled].sort()
        ends = begin + size[filled][order]
        tiled = begin.numel() == 0 or (
            int(begin[0]) == 0 and torch.equal(begin[1:], ends[:-1]) and int(ends[-1]) == rows
        )
        _must(tiled, "receive buffer")
        _must(int(pushed[rank][2].sum()) == int(counts[rank].sum()), "sent rows")
        for source in ranks:
            theirs = slice(rank * width, (rank + 1) * width)  # what `source` pushes to `rank`
            mine = slice(source * width, (source + 1) * width)  # what `rank` pulls from `source`
            for push_field, pull_field in zip(pushed[source][:3], (src, dst, size), strict=True):
                kept = size[mine] > 0  # an empty block has no place
                _must(torch.equal(push_field[theirs][kept], pull_field[mine][kept]), "push and pull")
    return len(ranks)


def _must(holds: bool, what: str) -> None:
    if not holds:  # no assert statement: `python -O` leaves these out
        raise AssertionError(f"check_exchange: {what} of the ranks disagree")


def traffic(setting: Setting, ids: torch.Tensor, counts: torch.Tensor) -> Traffic:
    shards = ExpertShards(setting.num_experts, setting.ep_size)
    edges = torch.nn.functional.pad(counts.cumsum(1, dtype=torch.int64), (1, 0))
    pairs = edges.index_select(1, first_experts(shards, counts.device)).diff(dim=1)  # [source, destination] rows
    row_bytes = setting.hidden_size * (setting.dispatch_bytes + setting.combine_bytes)
    between = (pairs * (1 - torch.eye(setting.ep_size, dtype=torch.int64)) * row_bytes).double()
    nodes = -(-setting.ep_size // setting.ranks_per_node)
    node = torch.arange(setting.ep_size) // setting.ranks_per_node
    per_node = torch.zeros(setting.ep_size, nodes, dtype=torch.float64).index_add_(1, node, between)
    per_node = torch.zeros(nodes, nodes, dtype=torch.float64).index_add_(0, node, per_node)
    owner = torch.tensor([shards.owner(expert) for expert in range(setting.num_experts)])
    owners = owner[ids].sort(-1).values
    distinct = 1 + (owners.diff(dim=-1) != 0).sum(-1)
    links = setting.ep_size * (setting.ep_size - 1)
    return Traffic(
        loads=pairs.sum(0),
        out_of_rank=between.sum(1),
        link_mean=float(between.sum()) / max(1, links),
        link_max=float(between.max()),
        node_out=per_node.sum(1) - per_node.diagonal(),
        once_per_rank=float(distinct.sum()) / ids.numel(),
        gather_bytes=setting.ep_size * (HEADER_WORDS + setting.num_experts) * 4,
    )


def simulate(setting: Setting, seed: int = 0, checked_ranks: int = 8) -> tuple[Traffic, int]:
    generator = torch.Generator().manual_seed(seed)
    ids = draw_ids(setting, generator)
    counts = count(ids, setting.num_experts)
    step = max(1, setting.ep_size // checked_ranks)
    checked = check_exchange(counts, sorted({*range(0, setting.ep_size, step), setting.ep_size - 1}))
    return traffic(setting, ids, counts), checked


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError


def report(setting: Setting, found: Traffic, checked: int) -> str:
    loads = found.loads.double()
    return (
        f"| {setting.ep_size} | {setting.num_experts} | {setting.skew:g} | {loads.mean():.0f} | {int(loads.max())} |"
        f" {_size(float(found.out_of_rank.mean()))} | {_size(found.link_mean)} | {_size(found.link_max)} |"
        f" {_size(float(found.node_out.max()))} | {found.once_per_rank:.2f} | {_size(found.gather_bytes)} | {checked} |"
    )


HEADER = (
    "| ranks | experts | skew | mean load | max load | sent per rank | mean link | max link | max out of a node |"
    " once per rank | count gather | ranks checked |\n" + "|---" * 12 + "|"
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m moe_ops.distributed.simulate", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--experts", type=int, default=256, help="at least; raised to one per rank")
    parser.add_argument("--tokens", type=int, default=128, help="per rank")
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=7168)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--skew", type=float, nargs="+", default=[0.0, 0.6])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    print(HEADER)
    for ep_size in options.ranks:
        for skew in options.skew:
            setting = Setting(
                ep_size,
                max(options.experts, ep_size),
                options.tokens,
                options.top_k,
                options.hidden_size,
                options.ranks_per_node,
                skew,
            )
            print(report(setting, *simulate(setting, options.seed)), flush=True)


if __name__ == "__main__":
    main()
