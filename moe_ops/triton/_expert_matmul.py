"""The two products of an expert over MXFP4 weights, contracted along the packed dimension.

A program computes a tile of rows of one expert by a block of weight rows. Where the tensor cores take operands from
registers, codes of the low nibbles meet the even columns of the activations and those of the high nibbles the odd ones,
in two products: nothing is interleaved, and the codes reach the registers in the order of the operand. Where they take
them from shared memory, the decoded weights are written there in their order, for one product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moe_ops.triton._launch import INTERPRETED, kernel, launch, vector_width
from moe_ops.triton._matrix import Part
from moe_ops.triton._mxfp4 import decode, even_odd, operand
from moe_ops.triton._schedule import TileClass


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
    """columns: of the result of a program; depth: elements of the contraction in one step; registers: at most, of a
    thread."""

    columns: int
    depth: int
    warps: int
    stages: int
    registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages, **limit}


# The whole set of configurations, by bytes of an operand, tile height, and whether operands come from registers.
# Measured on an H200, docs/measured.md; tall tiles with operands from registers by what the compiler spills on sm_80.
Table = dict[tuple[int, int, bool], Blocks]
GATE_UP_BLOCKS: Table = {
    (2, 16, True): Blocks(32, 128, 4, 4),
    (2, 64, True): Blocks(64, 64, 4, 3),
    (2, 128, True): Blocks(64, 64, 8, 3),
    (2, 64, False): Blocks(64, 64, 4, 3, registers=128),
    (2, 128, False): Blocks(64, 64, 8, 3, registers=128),
    (4, 16, True): Blocks(32, 64, 4, 3),
    (4, 64, True): Blocks(32, 32, 4, 2),
}
DOWN_BLOCKS: Table = {
    (2, 16, True): Blocks(64, 128, 4, 5),
    (2, 64, True): Blocks(64, 64, 4, 3),
    (2, 128, True): Blocks(128, 64, 8, 3),
    (2, 64, False): Blocks(64, 64, 4, 4),
    (2, 128, False): Blocks(128, 64, 8, 3, registers=128),
    (4, 16, True): Blocks(32, 64, 4, 3),
    (4, 64, True): Blocks(64, 64, 4, 2),
}
# The same sums in the same order, for a grid that would leave half of the device idle.
NARROW_BLOCKS = Blocks(32, 128, 4, 5)
NARROW_PROGRAMS = 256


def choose(table: Table, compute: tl.dtype, split: bool, tiles: TileClass, width: int) -> Blocks:
    """The configuration for tiles of one class by `width` weight rows."""
    size = compute.primitive_bitwidth // 8
    chosen = table[size, tiles.rows, split or size == 4]
    few = tiles.tiles.shape[0] * triton.cdiv(width, chosen.columns) < NARROW_PROGRAMS
    return NARROW_BLOCKS if few and (size, tiles.rows) == (2, 16) else chosen


def split_products(tensor: torch.Tensor, rows: int) -> bool:
    """Whether the tensor cores take operands from registers: not Hopper's and the next, for bfloat16 and tall tiles."""
    if not tensor.is_cuda:
        return rows < 64  # the interpreter runs both forms
    shared = torch.cuda.get_device_capability(tensor.device)[0] in (9, 10) and tensor.dtype == torch.bfloat16
    return rows < 64 or not shared


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
def scale_tile(scales, row, row_inside, step, groups, DEPTH: tl.constexpr):
    """[ROWS, DEPTH / 32] scales of weight rows `row`, elements from step * DEPTH on; a row has `groups` scales."""
    group = step * (DEPTH // 32) + tl.arange(0, DEPTH // 32)
    at = scales + row[:, None] * groups + group[None, :]
    return tl.load(at, mask=row_inside[:, None] & (group < groups)[None, :], other=127)


@triton.jit
def multiply_add(
    value, codes, scale, row, row_inside, step, groups, total, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """total + value @ weights.T, over elements step * DEPTH on of the ROWS weight rows `row`; past the end 0."""
    byte = step * (DEPTH // 2) + tl.arange(0, DEPTH // 2)
    at = codes + row[:, None] * (groups * 16) + byte[None, :]
    packed = tl.load(at, mask=row_inside[:, None] & (byte < groups * 16)[None, :], other=0)
    low, high = decode(packed, scale, ROWS, DEPTH // 2, COMPUTE)
    value = value.to(COMPUTE)
    if SPLIT:
        even, odd = even_odd(value, value.shape[0], DEPTH)
        total = tl.dot(even, tl.trans(low), total, input_precision=PRECISION)
        total = tl.dot(odd, tl.trans(high), total, input_precision=PRECISION)
    else:
        weights = tl.reshape(tl.join(low, high), (ROWS, DEPTH))
        total = tl.dot(value, tl.trans(weights), total, input_precision=PRECISION)
    return total


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
    TF32: tl.constexpr, SPLIT: tl.constexpr,
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
    # Gate and up of a column are neighbours in one product, so that a thread has both.
    place = tl.arange(0, 2 * BLOCK_N)
    weight_column = block * BLOCK_N + place // 2
    weight_inside = weight_column < intermediate
    first = expert * intermediate * 2
    weight_row = first + tl.where(place % 2 == 0, gate_first, up_first) + weight_column * row_step
    both = tl.zeros((BLOCK_M, 2 * BLOCK_N), dtype=tl.float32)
    # Triton makes no load this narrow asynchronous: where the operand's layout does not depend on it, it runs ahead.
    scale = scale_tile(w13_scale, weight_row, weight_inside, 0, groups, DEPTH)
    for step in range(0, tl.cdiv(groups * 32, DEPTH)):
        next_scale = scale_tile(w13_scale, weight_row, weight_inside, step + 1, groups, DEPTH)
        if SPLIT:
            scale = scale_tile(w13_scale, weight_row, weight_inside, step, groups, DEPTH)
        k = step * DEPTH + tl.arange(0, DEPTH)
        value = tl.load(x_row + k[None, :], mask=row_inside[:, None] & (k < groups * 32)[None, :], other=0.0)
        both = multiply_add(
            value, w13, scale, weight_row, weight_inside, step, groups, both, 2 * BLOCK_N, DEPTH, COMPUTE, PRECISION,
            SPLIT,
        )  # fmt: skip
        scale = next_scale
    gate, up = tl.split(tl.reshape(both, (BLOCK_M, BLOCK_N, 2)))
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    column_inside = column < intermediate
    gate_row = first + gate_first + column * row_step
    up_row = first + up_first + column * row_step
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
    BLOCK_N: tl.constexpr, DEPTH: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
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
    scale = scale_tile(w2_scale, weight_row, column_inside, 0, groups, DEPTH)
    for step in range(0, tl.cdiv(groups * 32, DEPTH)):
        next_scale = scale_tile(w2_scale, weight_row, column_inside, step + 1, groups, DEPTH)
        if SPLIT:
            scale = scale_tile(w2_scale, weight_row, column_inside, step, groups, DEPTH)
        k = step * DEPTH + tl.arange(0, DEPTH)
        value = tl.load(in_row + k[None, :], mask=row_inside[:, None] & (k < groups * 32)[None, :], other=0.0)
        total = multiply_add(
            value, w2, scale, weight_row, column_inside, step, groups, total, BLOCK_N, DEPTH, COMPUTE, PRECISION, SPLIT
        )  # fmt: skip
        scale = next_scale
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
    part: Part,
    w13_bias: torch.Tensor | None,
    order: RowOrder,
    activation: Activation,
    numbers: Arithmetic,
    outputs: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    skipped: tuple[int, ...] = (),
) -> None:
    """part: of w13. w13_bias: of all experts. outputs: (hidden, None, None), or (None, gate, up) before the activation;
    [slots, I]. skipped: heights of tiles that are computed elsewhere."""
    schedule = part.schedule
    intermediate, groups = part.codes.shape[1] // 2, part.scales.shape[2]
    unit = vector_width(x)
    for tiles in schedule.classes:
        if tiles.rows in skipped:
            continue
        split = split_products(x, tiles.rows)
        blocks = choose(GATE_UP_BLOCKS, numbers.compute, split, tiles, intermediate)
        grid = (tiles.tiles.shape[0] * triton.cdiv(intermediate, blocks.columns),)
        launch(
            _gate_up, grid, x, schedule.row_slot, tiles.tiles, tiles.count, schedule.starts, schedule.counts,
            part.codes, part.scales, part.of(w13_bias), *outputs, schedule.top_k, groups, x.stride(0) // unit,
            intermediate, order.step, order.gate, order.up, activation.limit, activation.alpha, activation.shift,
            WIDTH=unit, BLOCK_M=tiles.rows, BLOCK_N=blocks.columns, DEPTH=blocks.depth, COMPUTE=numbers.compute,
            PRECISION=numbers.precision, TF32=numbers.tf32, SPLIT=split, **blocks.options,
        )  # fmt: skip


def down(
    hidden: torch.Tensor,
    part: Part,
    w2_bias: torch.Tensor | None,
    numbers: Arithmetic,
    out: torch.Tensor,
    skipped: tuple[int, ...] = (),
) -> None:
    """part: of w2. w2_bias: of all experts. out: [slots, H] float32; rows without a tile are not written.
    skipped: heights of tiles that are computed elsewhere."""
    schedule = part.schedule
    hidden_size, groups = part.codes.shape[1], part.scales.shape[2]
    for tiles in schedule.classes:
        if tiles.rows in skipped:
            continue
        split = split_products(hidden, tiles.rows)
        blocks = choose(DOWN_BLOCKS, numbers.compute, split, tiles, hidden_size)
        grid = (tiles.tiles.shape[0] * triton.cdiv(hidden_size, blocks.columns),)
        launch(
            _down, grid, hidden, tiles.tiles, tiles.count, schedule.starts, schedule.counts, part.codes, part.scales,
            part.of(w2_bias), out, groups, hidden_size, BLOCK_M=tiles.rows, BLOCK_N=blocks.columns, DEPTH=blocks.depth,
            COMPUTE=numbers.compute, PRECISION=numbers.precision, SPLIT=split, **blocks.options,
        )  # fmt: skip
