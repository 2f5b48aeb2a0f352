"""Which rows of the expert-major order a matmul program computes: tiles of rows of one expert.

An expert has as many of the tallest tiles as its routed rows fill; what is left goes into one tile of the lowest class
that holds it. The device decides: what a row goes through depends on the rows that its expert has, not on the batch
around it, and nothing is read on the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton.language as tl

from moe_ops.triton._launch import kernel, launch
from moe_ops.triton._permutation_map import permutation_map

INT32_MAX = 2**31 - 1
# Tile heights, and the most rows that are left of an expert for each of them.
TILE_ROWS = (16, 64, 128)
MOST_ROWS = (16, 64, INT32_MAX)
# One height for all: a row's bits then depend on nothing but the row.
INVARIANT_TILE_ROWS = 64
BLOCK_EXPERTS = 1024


@dataclass(frozen=True)
class TileClass:
    """rows: height of a tile; tiles: [capacity, 2] int32 (expert, first row); count: [1] int32."""

    rows: int
    tiles: torch.Tensor
    count: torch.Tensor


@dataclass(frozen=True)
class Schedule:
    """Rows are the places of slots in expert-major order; those of slots without an expert come last and have no tile.

    row_map: [T, K] int32, row of a slot or -1.     row_slot: [T * K] int32, slot of a row or -1.
    starts, counts: [E] int32, first row and rows of an expert.
    heights, bounds: of the classes, and the most rows that are left of an expert for each.
    """

    top_k: int
    row_map: torch.Tensor
    row_slot: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    heights: tuple[int, ...]
    bounds: tuple[int, ...]
    classes: tuple[TileClass, ...]

    def of(self, experts: slice) -> Schedule:
        """The tiles of consecutive experts, counted from the first of them; rows are those of the whole."""
        starts, counts = self.starts[experts], self.counts[experts]
        classes = _tile_classes(self.row_slot.numel(), self.counts, self.starts, experts, self.heights, self.bounds)
        return replace(self, starts=starts, counts=counts, classes=classes)


@kernel(
    sizes=["num_experts", "first_expert", "last_expert", "capacity", "tallest", "tall", "most_0", "most_1"],
    indices=["counts", "starts", "tiles", "num_tiles"],
)
def _list_tiles(
    counts, starts, tiles, num_tiles, num_experts, first_expert, last_expert, capacity, tallest, tall, most_0, most_1,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The tiles of experts first_expert to last_expert - 1, and the starts of all. A program per class. Class `tallest`
    has tiles of `tall` rows."""
    which = tl.program_id(0)
    least = tl.where(which == 0, 1, tl.where(which == 1, most_0 + 1, most_1 + 1))
    most = tl.where(which == 0, most_0, tl.where(which == 1, most_1, 2147483647))
    row_carry = tl.zeros((1,), dtype=tl.int32)
    tile_carry = tl.zeros((1,), dtype=tl.int32)
    for first in range(0, num_experts, BLOCK):
        expert = first + tl.arange(0, BLOCK)
        count = tl.load(counts + expert, mask=expert < num_experts, other=0)
        start = row_carry + tl.cumsum(count, axis=0) - count
        row_carry += tl.sum(count, axis=0)
        tl.store(starts + expert, start, mask=expert < num_experts * (which == 0).to(tl.int32))
        full = count // tall
        left = count - full * tall
        skipped = tl.where(which == tallest, 0, full)
        number = full - skipped + ((left >= least) & (left <= most)).to(tl.int32)
        number = tl.where((expert >= first_expert) & (expert < last_expert), number, 0)
        at = which * capacity + tile_carry + tl.cumsum(number, axis=0) - number
        tile_carry += tl.sum(number, axis=0)
        for i in range(tl.max(number, axis=0)):
            tl.store(tiles + (at + i) * 2, expert - first_expert, mask=i < number)
            tl.store(tiles + (at + i) * 2 + 1, start + (skipped + i) * tall, mask=i < number)
    tl.store(num_tiles + which + tl.arange(0, 1), tile_carry)


def _capacity(num_slots: int, num_experts: int, least: int, height: int, tallest: bool) -> int:
    """The most tiles that a class can have, of at least `least` rows each."""
    tiles = min(num_experts, num_slots // least)
    return min(num_experts + num_slots // height, num_slots // least) if tallest else tiles


def make_schedule(
    topk_ids: torch.Tensor,
    num_experts: int,
    *,
    expert_map: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    batch_invariant: bool,
    tile_rows: tuple[int, ...] = TILE_ROWS,
) -> Schedule:
    """topk_weights: where given, slots of weight exactly 0 have no expert. tile_rows: heights in use, a prefix of
    TILE_ROWS."""
    num_slots = topk_ids.numel()
    row_map = topk_ids.new_empty(topk_ids.shape, dtype=torch.int32)
    counts, starts = (row_map.new_empty((num_experts,)) for _ in range(2))
    row_slot = row_map.new_empty((num_slots,))
    permutation_map(
        topk_ids,
        row_map,
        counts,
        num_rows=num_slots,
        row_slot=row_slot,
        expert_map=expert_map,
        topk_weights=topk_weights,
    )
    heights: tuple[int, ...] = (INVARIANT_TILE_ROWS,)
    bounds: tuple[int, ...] = (INT32_MAX,)
    if not batch_invariant:
        heights, bounds = tile_rows, (*MOST_ROWS[: len(tile_rows) - 1], INT32_MAX)
    classes = _tile_classes(num_slots, counts, starts, slice(0, num_experts), heights, bounds)
    return Schedule(topk_ids.shape[1], row_map, row_slot, starts, counts, heights, bounds, classes)


def _tile_classes(
    num_slots: int,
    counts: torch.Tensor,
    starts: torch.Tensor,
    experts: slice,
    heights: tuple[int, ...],
    bounds: tuple[int, ...],
) -> tuple[TileClass, ...]:
    """Lists the tiles of these experts, and fills `starts`."""
    least = [1, *(bound + 1 for bound in bounds[:-1])]
    last = len(heights) - 1
    number = experts.stop - experts.start
    capacities = [_capacity(num_slots, number, least[i], heights[i], i == last) for i in range(last + 1)]
    # An expert has at most as many rows as there are slots: the classes above need no launch.
    used = sum(capacity > 0 for capacity in capacities)
    capacity = max(capacities)
    tiles, num_tiles = counts.new_empty((used, capacity, 2)), counts.new_empty((used,))
    launch(
        _list_tiles, (used,), counts, starts, tiles, num_tiles, counts.numel(), experts.start, experts.stop, capacity,
        last, heights[last], *[*bounds, INT32_MAX][:2], BLOCK=BLOCK_EXPERTS,
    )  # fmt: skip
    return tuple(TileClass(heights[i], tiles[i, : capacities[i]], num_tiles[i : i + 1]) for i in range(used))
