"""Which rows of the expert-major order a matmul program computes: tiles of rows of one expert.

Experts are sorted into classes by their number of routed rows, each with a tile height of its own, on the device: what
a row goes through depends on the rows that its expert has, not on the batch around it, and nothing is read on the
host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moe_ops.triton._launch import kernel, launch
from moe_ops.triton._permutation_map import permutation_map

INT32_MAX = 2**31 - 1
# Tile heights, and the most routed rows of an expert that uses each of them.
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
    """

    top_k: int
    row_map: torch.Tensor
    row_slot: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    classes: tuple[TileClass, ...]


@kernel(
    sizes=["num_experts", "capacity", "most_0", "most_1", "rows_0", "rows_1", "rows_2"],
    indices=["counts", "starts", "tiles", "num_tiles"],
)
def _list_tiles(
    counts, starts, tiles, num_tiles, num_experts, capacity, most_0, most_1, rows_0, rows_1, rows_2, BLOCK: tl.constexpr
):
    """A program per class."""
    which = tl.program_id(0)
    least = tl.where(which == 0, 1, tl.where(which == 1, most_0 + 1, most_1 + 1))
    most = tl.where(which == 0, most_0, tl.where(which == 1, most_1, 2147483647))
    height = tl.where(which == 0, rows_0, tl.where(which == 1, rows_1, rows_2))
    row_carry = tl.zeros((1,), dtype=tl.int32)
    tile_carry = tl.zeros((1,), dtype=tl.int32)
    for first in range(0, num_experts, BLOCK):
        expert = first + tl.arange(0, BLOCK)
        count = tl.load(counts + expert, mask=expert < num_experts, other=0)
        start = row_carry + tl.cumsum(count, axis=0) - count
        row_carry += tl.sum(count, axis=0)
        tl.store(starts + expert, start, mask=expert < num_experts * (which == 0).to(tl.int32))
        mine = (count >= least) & (count <= most)
        number = tl.where(mine, (count + height - 1) // height, 0)
        at = which * capacity + tile_carry + tl.cumsum(number, axis=0) - number
        tile_carry += tl.sum(number, axis=0)
        for i in range(tl.max(number, axis=0)):
            tl.store(tiles + (at + i) * 2, expert, mask=i < number)
            tl.store(tiles + (at + i) * 2 + 1, start + i * height, mask=i < number)
    tl.store(num_tiles + which + tl.arange(0, 1), tile_carry)


def _capacity(num_slots: int, num_experts: int, least: int, most: int, height: int) -> int:
    """The most tiles that a class can have."""
    experts = min(num_experts, num_slots // least)
    return min(experts + num_slots // height, experts * triton.cdiv(min(most, num_slots), height))


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
    least = [1, *(bound + 1 for bound in bounds[:-1])]
    capacities = [_capacity(num_slots, num_experts, *limits) for limits in zip(least, bounds, heights, strict=True)]
    # An expert has at most as many rows as there are slots: the classes above need no launch.
    used = sum(capacity > 0 for capacity in capacities)
    capacity = max(capacities)
    tiles, num_tiles = row_map.new_empty((used, capacity, 2)), row_map.new_empty((used,))
    padded_heights = [*heights, *(heights[-1:] * 3)][:3]
    launch(
        _list_tiles, (used,), counts, starts, tiles, num_tiles, num_experts, capacity, *[*bounds, INT32_MAX][:2],
        *padded_heights, BLOCK=BLOCK_EXPERTS,
    )  # fmt: skip
    classes = tuple(TileClass(heights[i], tiles[i, : capacities[i]], num_tiles[i : i + 1]) for i in range(used))
    return Schedule(topk_ids.shape[1], row_map, row_slot, starts, counts, classes)
