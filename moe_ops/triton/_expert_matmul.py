"""The two products of an expert over MXFP4 weights, contracted along the packed dimension.

A program computes a tile of rows of one expert by a block of weight rows. Codes of the low nibbles meet the even
columns of the activations and those of the high nibbles the odd ones, in two products, so that nothing is interleaved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moe_ops.triton._launch import INTERPRETED, kernel, launch, vector_width
from moe_ops.triton._mxfp4 import decode, even_odd, operand
from moe_ops.triton._schedule import Schedule


@dataclass(frozen=True)
class Arithmetic:
    """Of the tensor cores: bfloat16 for bfloat16 activations; tf32, which holds every float16 and every weight
    exactly, for float16; float32 for float32."""

    compute: tl.dtype
    stored: torch.dtype  # of hidden activations between the products
    precision: str
    tile_rows: tuple[int, ...]

    @property
    def tf32(self) -> bool:
        return self.precision == "tf32"


def arithmetic(dtype: torch.dtype) -> Arithmetic:
    if dtype == torch.bfloat16 and not INTERPRETED:
        return Arithmetic(tl.bfloat16, torch.bfloat16, "ieee", (16, 64, 128))
    if dtype == torch.float16 and not INTERPRETED:
        return Arithmetic(tl.float32, torch.float32, "tf32", (16, 64))
    return Arithmetic(tl.float32, torch.float32, "ieee", (16, 64))


@dataclass(frozen=True)
class Blocks:
    """columns: weight rows of a program; depth: elements of the contraction in one step."""

    columns: int
    depth: int
    warps: int
    stages: int


# The whole set of configurations, by bytes of an operand and tile height. Heights of one operand have one depth where
# bits matter: the order of a sum depends on nothing else here. Measured on an H200, docs/measured.md.
GATE_UP_BLOCKS = {
    (2, 16): Blocks(64, 128, 4, 4),
    (2, 64): Blocks(64, 128, 4, 3),
    (2, 128): Blocks(64, 128, 8, 3),
    (4, 16): Blocks(32, 64, 4, 3),
    (4, 64): Blocks(32, 32, 4, 2),
}
DOWN_BLOCKS = {
    (2, 16): Blocks(64, 128, 4, 5),
    (2, 64): Blocks(128, 128, 4, 3),
    (2, 128): Blocks(128, 128, 8, 3),
    (4, 16): Blocks(32, 64, 4, 3),
    (4, 64): Blocks(64, 64, 4, 2),
}
# The same sums in the same order, for a grid that would leave half of the device idle.
NARROW_BLOCKS = Blocks(32, 128, 4, 5)
NARROW_PROGRAMS = 256


def choose(blocks: dict[tuple[int, int], Blocks], compute: tl.dtype, rows: int, tiles: int, width: int) -> Blocks:
    """The configuration for at most `tiles` tiles of `rows` rows by `width` weight rows."""
    size = compute.primitive_bitwidth // 8
    chosen = blocks[size, rows]
    few = tiles * triton.cdiv(width, chosen.columns) < NARROW_PROGRAMS
    return NARROW_BLOCKS if few and (size, rows) == (2, 16) else chosen


@triton.jit
def tile_rows_of(tiles, tile, starts, counts, BLOCK_M: tl.constexpr):
    """(expert int64, rows [BLOCK_M] int32, which of them exist)."""
    expert = tl.load(tiles + tile * 2)
    row = tl.load(tiles + tile * 2 + 1) + tl.arange(0, BLOCK_M)
    return expert.to(tl.int64), row, row < tl.load(starts + expert) + tl.load(counts + expert)


@triton.jit
def swiglu(gate, up, limit, alpha, shift):
    """gate * sigmoid(alpha * gate) * (up + shift); the gate is clamped from above, up on both sides. NaN stays NaN."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate / (1.0 + tl.exp(-alpha * gate)) * (up + shift)


@triton.jit
def weight_tile(
    codes, scales, row, row_inside, step, groups, ROWS: tl.constexpr, DEPTH: tl.constexpr, COMPUTE: tl.constexpr
):
    """(low, high) [ROWS, DEPTH / 2] of weight rows `row`, elements from step * DEPTH on; past the end 0. `groups` is
    the number of scales in a row."""
    byte = step * (DEPTH // 2) + tl.arange(0, DEPTH // 2)
    group = step * (DEPTH // 32) + tl.arange(0, DEPTH // 32)
    at = codes + row[:, None] * (groups * 16) + byte[None, :]
    packed = tl.load(at, mask=row_inside[:, None] & (byte < groups * 16)[None, :], other=0)
    at = scales + row[:, None] * groups + group[None, :]
    scale = tl.load(at, mask=row_inside[:, None] & (group < groups)[None, :], other=127)
    return decode(packed, scale, ROWS, DEPTH // 2, COMPUTE)


@kernel(
    sizes=[
        "top_k",
        "groups",
        "x_stride_units",
        "intermediate",
        "row_step",
        "gate_first",
        "up_first",
        "limit",
        "alpha",
        "shift",
    ],
    indices=["row_slot", "tiles", "num_tiles", "starts", "counts", "w13_bias"],
)
def _gate_up(
    x, row_slot, tiles, num_tiles, starts, counts, w13, w13_scale, w13_bias, hidden, gate_out, up_out, top_k, groups,
    x_stride_units, intermediate, row_step, gate_first, up_first, limit, alpha, shift, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DEPTH: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    TF32: tl.constexpr,
):  # fmt: skip
    """hidden[row] = swiglu(x[token] @ gate.T + bias, x[token] @ up.T + bias); with `gate_out`, the two terms
    themselves.

    Row n of the gate is row gate_first + n * row_step of w13, and likewise up. `groups` is hidden_size / 32."""
    blocks = tl.cdiv(intermediate, BLOCK_N)
    tile, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if tile >= tl.load(num_tiles):
        return
    expert, row, row_inside = tile_rows_of(tiles, tile, starts, counts, BLOCK_M)
    slot = tl.load(row_slot + row, mask=row_inside, other=0)
    x_row = x + (slot // top_k).to(tl.int64)[:, None] * (tl.cast(x_stride_units, tl.int64) * WIDTH)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    column_inside = column < intermediate
    first = expert * intermediate * 2
    gate_row = first + gate_first + column * row_step
    up_row = first + up_first + column * row_step
    gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(0, tl.cdiv(groups * 32, DEPTH)):
        k = step * DEPTH + tl.arange(0, DEPTH)
        value = tl.load(x_row + k[None, :], mask=row_inside[:, None] & (k < groups * 32)[None, :], other=0.0)
        even, odd = even_odd(value.to(COMPUTE), BLOCK_M, DEPTH)
        low, high = weight_tile(w13, w13_scale, gate_row, column_inside, step, groups, BLOCK_N, DEPTH, COMPUTE)
        gate = tl.dot(even, tl.trans(low), gate, input_precision=PRECISION)
        gate = tl.dot(odd, tl.trans(high), gate, input_precision=PRECISION)
        low, high = weight_tile(w13, w13_scale, up_row, column_inside, step, groups, BLOCK_N, DEPTH, COMPUTE)
        up = tl.dot(even, tl.trans(low), up, input_precision=PRECISION)
        up = tl.dot(odd, tl.trans(high), up, input_precision=PRECISION)
    if w13_bias is not None:
        gate += tl.load(w13_bias + gate_row, mask=column_inside, other=0.0).to(tl.float32)[None, :]
        up += tl.load(w13_bias + up_row, mask=column_inside, other=0.0).to(tl.float32)[None, :]
    at = row.to(tl.int64)[:, None] * intermediate + column[None, :]
    inside = row_inside[:, None] & column_inside[None, :]
    if gate_out is not None:
        tl.store(gate_out + at, gate, mask=inside)
        tl.store(up_out + at, up, mask=inside)
    else:
        value = swiglu(gate, up, limit, alpha, shift)
        tl.store(hidden + at, operand(value, hidden.dtype.element_ty, TF32), mask=inside)


@kernel(sizes=["groups", "hidden_size"], indices=["tiles", "num_tiles", "starts", "counts", "w2_bias"])
def _down(
    hidden, tiles, num_tiles, starts, counts, w2, w2_scale, w2_bias, out, groups, hidden_size, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, DEPTH: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[row] = hidden[row] @ w2.T + bias, float32. `groups` is intermediate_size / 32."""
    blocks = tl.cdiv(hidden_size, BLOCK_N)
    tile, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if tile >= tl.load(num_tiles):
        return
    expert, row, row_inside = tile_rows_of(tiles, tile, starts, counts, BLOCK_M)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    column_inside = column < hidden_size
    weight_row = expert * hidden_size + column
    in_row = hidden + row.to(tl.int64)[:, None] * (groups * 32)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(0, tl.cdiv(groups * 32, DEPTH)):
        k = step * DEPTH + tl.arange(0, DEPTH)
        value = tl.load(in_row + k[None, :], mask=row_inside[:, None] & (k < groups * 32)[None, :], other=0.0)
        even, odd = even_odd(value.to(COMPUTE), BLOCK_M, DEPTH)
        low, high = weight_tile(w2, w2_scale, weight_row, column_inside, step, groups, BLOCK_N, DEPTH, COMPUTE)
        total = tl.dot(even, tl.trans(low), total, input_precision=PRECISION)
        total = tl.dot(odd, tl.trans(high), total, input_precision=PRECISION)
    if w2_bias is not None:
        total += tl.load(w2_bias + weight_row, mask=column_inside, other=0.0).to(tl.float32)[None, :]
    at = row.to(tl.int64)[:, None] * hidden_size + column[None, :]
    tl.store(out + at, total, mask=row_inside[:, None] & column_inside[None, :])


@dataclass(frozen=True)
class RowOrder:
    """Row n of the gate is row gate + n * step of w13, and likewise up."""

    step: int
    gate: int
    up: int


def row_order(w13_layout: str, intermediate: int) -> RowOrder:
    if w13_layout == "interleaved":
        return RowOrder(2, 0, 1)
    first = w13_layout == "gate_up"
    return RowOrder(1, 0 if first else intermediate, intermediate if first else 0)


@dataclass(frozen=True)
class Activation:
    """swiglu of this file: limit is infinite where there is none."""

    limit: float
    alpha: float
    shift: float


def gate_up(
    x: torch.Tensor,
    schedule: Schedule,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w13_bias: torch.Tensor | None,
    order: RowOrder,
    activation: Activation,
    numbers: Arithmetic,
    outputs: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
) -> None:
    """outputs: (hidden, None, None), or (None, gate, up) before the activation; [slots, I]."""
    intermediate, groups = w13.shape[1] // 2, w13_scale.shape[2]
    unit = vector_width(x)
    for tiles in schedule.classes:
        blocks = choose(GATE_UP_BLOCKS, numbers.compute, tiles.rows, tiles.tiles.shape[0], intermediate)
        grid = (tiles.tiles.shape[0] * triton.cdiv(intermediate, blocks.columns),)
        launch(
            _gate_up, grid, x, schedule.row_slot, tiles.tiles, tiles.count, schedule.starts, schedule.counts, w13,
            w13_scale, w13_bias, *outputs, schedule.top_k, groups, x.stride(0) // unit, intermediate, order.step,
            order.gate, order.up, activation.limit, activation.alpha, activation.shift, WIDTH=unit, BLOCK_M=tiles.rows,
            BLOCK_N=blocks.columns, DEPTH=blocks.depth, COMPUTE=numbers.compute, PRECISION=numbers.precision,
            TF32=numbers.tf32, num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip


def down(
    hidden: torch.Tensor,
    schedule: Schedule,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w2_bias: torch.Tensor | None,
    numbers: Arithmetic,
    out: torch.Tensor,
) -> None:
    """out: [slots, H] float32; rows without a tile are not written."""
    hidden_size, groups = w2.shape[1], w2_scale.shape[2]
    for tiles in schedule.classes:
        blocks = choose(DOWN_BLOCKS, numbers.compute, tiles.rows, tiles.tiles.shape[0], hidden_size)
        grid = (tiles.tiles.shape[0] * triton.cdiv(hidden_size, blocks.columns),)
        launch(
            _down, grid, hidden, tiles.tiles, tiles.count, schedule.starts, schedule.counts, w2, w2_scale, w2_bias,
            out, groups, hidden_size, BLOCK_M=tiles.rows, BLOCK_N=blocks.columns, DEPTH=blocks.depth,
            COMPUTE=numbers.compute, PRECISION=numbers.precision, num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip
