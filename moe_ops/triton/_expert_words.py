"""The two products of an expert on Hopper, bfloat16.

Weights are the rows of the tensor cores' tile and come from registers; tokens are its columns. Codes are read as 16-bit
words of four, and number n of all words meets elements n, n + 4, n + 8, ... of the activations: what a thread loads is
an operand after shifts and masks, with nothing to move between threads or bytes. Activations are therefore put in that
order first: elements 0, 4, 8, ..., then 1, 5, 9, ..., and so on; hidden activations are written in it.

A number is decoded by one multiplication where its scale code is at most 128. A tile that meets another one is computed
again in two exact steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_ops.triton._expert_matmul import Activation, Arithmetic, Blocks, RowOrder, swiglu, tile_rows_of
from moe_ops.triton._launch import dense_rows, kernel, launch, vector_width
from moe_ops.triton._matrix import Matrix, Part
from moe_ops.triton._mxfp4 import decode_words
from moe_ops.triton._schedule import Schedule, TileClass

ROWS = 16  # of a tile; tall ones are faster with weights in shared memory, for products of 128 tokens
QUARTER = tl.constexpr(4)
LARGEST_IN_ONE_STEP = tl.constexpr(128)
LEAST_COLUMNS = tl.constexpr(64)  # rows of the tensor cores' tile
# By whether a row of weights is a multiple of the depth. Measured on an H200, docs/measured.md.
GATE_UP_BLOCKS = {True: Blocks(64, 128, 4, 3), False: Blocks(64, 128, 4, 3)}
DOWN_BLOCKS = {True: Blocks(64, 128, 4, 4), False: Blocks(128, 128, 4, 3)}
# The same sums in the same order, for a grid that would leave half of the device idle. Gate and up share an operand.
NARROW_GATE_UP_BLOCKS = Blocks(32, 128, 4, 4)
NARROW_DOWN_BLOCKS = Blocks(64, 128, 4, 4)
NARROW_PROGRAMS = 256
BLOCK_WORDS = 1024


def serves(x: torch.Tensor, schedule: Schedule, *matrices: Matrix) -> bool:
    """Whether the tiles of ROWS rows are computed here."""
    if x.dtype != torch.bfloat16 or (x.is_cuda and torch.cuda.get_device_capability(x.device)[0] != 9):
        return False
    return all(matrix.has_words for matrix in matrices) and schedule.classes[0].rows == ROWS


@kernel(sizes=["stride_units", "units"])
def _order(x, out, stride_units, units, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A row of x has four times units * 8 elements."""
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    quarter = tl.cast(units, tl.int64) * 8
    at = first * QUARTER + tl.arange(0, QUARTER * BLOCK)
    row = x + token * (tl.cast(stride_units, tl.int64) * WIDTH)
    value = tl.load(row + at, mask=at < quarter * QUARTER, other=0.0)
    value = tl.permute(tl.reshape(value, (BLOCK, QUARTER)), (1, 0))
    place = first + tl.arange(0, BLOCK)[None, :]
    to = out + token * (quarter * QUARTER) + tl.arange(0, QUARTER)[:, None] * quarter + place
    tl.store(to, value, mask=place < quarter)


def in_word_order(x: torch.Tensor) -> torch.Tensor:
    """Rows whose length is a multiple of 32, with elements 0, 4, 8, ... first, then 1, 5, 9, ... and so on."""
    x = dense_rows(x)
    out = x.new_empty(x.shape)
    unit, units = vector_width(x), x.shape[1] // 32
    grid = (x.shape[0], triton.cdiv(units * 8, BLOCK_WORDS))
    launch(_order, grid, x, out, x.stride(0) // unit, units, WIDTH=unit, BLOCK=BLOCK_WORDS)
    return out


@triton.jit
def _load_quarters(at, offset, quarter, word, EVEN: tl.constexpr):
    """[WORDS, ROWS] elements `offset` on of the four quarters of rows; past the end 0."""
    inside = (word + offset < quarter)[:, None] | EVEN
    first = tl.load(at + offset, mask=inside, other=0.0)
    second = tl.load(at + (quarter + offset), mask=inside, other=0.0)
    third = tl.load(at + (quarter * 2 + offset), mask=inside, other=0.0)
    fourth = tl.load(at + (quarter * 3 + offset), mask=inside, other=0.0)
    return first, second, third, fourth


@triton.jit
def _multiply_add(
    codes, scales, step, quarter, groups, quarters, total, largest, COLUMNS: tl.constexpr, WORDS: tl.constexpr,
    EVEN: tl.constexpr, COMPUTE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """(total + weights @ values, largest scale code so far). codes, scales: of the first step."""
    word = step * WORDS + tl.arange(0, WORDS)
    group = step * (WORDS // 8) + tl.arange(0, WORDS // 8)
    packed = tl.load(codes + step * WORDS, mask=(word < quarter)[None, :] | EVEN, other=0)
    scale = tl.load(scales + step * (WORDS // 8), mask=(group < groups)[None, :] | EVEN, other=0)
    if not EXACT:
        largest = tl.maximum(largest, scale.to(tl.int32))
    first, second, third, fourth = decode_words(packed, scale, COLUMNS, WORDS, COMPUTE, EXACT)
    total = tl.dot(first, quarters[0].to(COMPUTE), total)
    total = tl.dot(second, quarters[1].to(COMPUTE), total)
    total = tl.dot(third, quarters[2].to(COMPUTE), total)
    total = tl.dot(fourth, quarters[3].to(COMPUTE), total)
    return total, largest


@triton.jit
def _products(
    x, quarter, groups, codes, scales, other_codes, other_scales, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr,
    WORDS: tl.constexpr, EVEN: tl.constexpr, COMPUTE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Both products of one tile with the same rows (the second is 0 where there is no other), the largest scale."""
    total = tl.zeros((COLUMNS, BLOCK_M), dtype=tl.float32)
    other = tl.zeros((COLUMNS, BLOCK_M), dtype=tl.float32)
    largest = tl.zeros((COLUMNS, WORDS // 8), dtype=tl.int32)
    word = tl.arange(0, WORDS)
    for step in range(0, tl.cdiv(groups * 8, WORDS)):
        quarters = _load_quarters(x, step * WORDS, quarter, word, EVEN)
        total, largest = _multiply_add(
            codes, scales, step, quarter, groups, quarters, total, largest, COLUMNS, WORDS, EVEN, COMPUTE, EXACT
        )
        if other_codes is not None:
            other, largest = _multiply_add(
                other_codes, other_scales, step, quarter, groups, quarters, other, largest, COLUMNS, WORDS, EVEN,
                COMPUTE, EXACT,
            )  # fmt: skip
    return total, other, tl.max(tl.max(largest, axis=1), axis=0)


@triton.jit
def _columns(block, place, intermediate, BLOCK_N: tl.constexpr):
    """Columns of the result of a block, in the order of words within it; the last one for those past the end."""
    PART: tl.constexpr = BLOCK_N // QUARTER
    return tl.minimum(block * BLOCK_N + place % PART * QUARTER + place // PART, intermediate - 1)


@triton.jit
def _gate_up_sums(
    x, row_slot, tiles, tile, starts, counts, w13, w13_scale, top_k, groups, quarter, intermediate, row_step,
    gate_first, up_first, block, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr, EVEN: tl.constexpr,
    COMPUTE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    expert, row, row_inside = tile_rows_of(tiles, tile, starts, counts, BLOCK_M)
    word = tl.arange(0, WORDS)
    group = tl.arange(0, WORDS // 8)
    slot = tl.load(row_slot + row, mask=row_inside, other=0)
    x_row = x + (slot // top_k).to(tl.int64)[None, :] * (quarter * QUARTER) + word[:, None]
    first = expert * intermediate * 2
    if BLOCK_N < LEAST_COLUMNS:
        # Rows of both in one operand, which has at least LEAST_COLUMNS.
        place = tl.arange(0, 2 * BLOCK_N)
        start = tl.where(place < BLOCK_N, gate_first, up_first)
        both_row = first + start + _columns(block, place % BLOCK_N, intermediate, BLOCK_N) * row_step
        both_codes = w13 + both_row[:, None] * quarter + word[None, :]
        both_scales = w13_scale + both_row[:, None] * groups + group[None, :]
        both, _, largest = _products(
            x_row, quarter, groups, both_codes, both_scales, None, None, 2 * BLOCK_N, BLOCK_M, WORDS, EVEN, COMPUTE,
            EXACT,
        )  # fmt: skip
        gate, up = tl.split(tl.permute(tl.reshape(both, (2, BLOCK_N, BLOCK_M)), (1, 2, 0)))
    else:
        column = _columns(block, tl.arange(0, BLOCK_N), intermediate, BLOCK_N)
        gate_row = first + gate_first + column * row_step
        up_row = first + up_first + column * row_step
        gate_codes = w13 + gate_row[:, None] * quarter + word[None, :]
        up_codes = w13 + up_row[:, None] * quarter + word[None, :]
        gate_scales = w13_scale + gate_row[:, None] * groups + group[None, :]
        up_scales = w13_scale + up_row[:, None] * groups + group[None, :]
        gate, up, largest = _products(
            x_row, quarter, groups, gate_codes, gate_scales, up_codes, up_scales, BLOCK_N, BLOCK_M, WORDS, EVEN,
            COMPUTE, EXACT,
        )  # fmt: skip
    return gate, up, largest


@kernel(
    sizes=["top_k", "groups", "units", "intermediate", "row_step", "gate_first", "up_first", "limit", "alpha", "shift"],
    indices=["row_slot", "tiles", "num_tiles", "starts", "counts", "w13_bias"],
)
def _gate_up(
    x, row_slot, tiles, num_tiles, starts, counts, w13, w13_scale, w13_bias, hidden, top_k, groups, units, intermediate,
    row_step, gate_first, up_first, limit, alpha, shift, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, WORDS: tl.constexpr, EVEN: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """As in _expert_matmul. x and hidden are in the order of words; units * WIDTH words are a row of codes."""
    blocks = tl.cdiv(intermediate, BLOCK_N)
    tile, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if tile >= tl.load(num_tiles):
        return
    quarter = tl.cast(units, tl.int64) * WIDTH
    gate, up, largest = _gate_up_sums(
        x, row_slot, tiles, tile, starts, counts, w13, w13_scale, top_k, groups, quarter, intermediate, row_step,
        gate_first, up_first, block, BLOCK_M, BLOCK_N, WORDS, EVEN, COMPUTE, False,
    )  # fmt: skip
    if largest > LARGEST_IN_ONE_STEP:
        # `largest >> 8` is 0, which the compiler does not know: it keeps no addresses for this in registers.
        gate, up, largest = _gate_up_sums(
            x, row_slot, tiles, tile + (largest >> 8), starts, counts, w13, w13_scale, top_k, groups, quarter,
            intermediate, row_step, gate_first, up_first, block, BLOCK_M, BLOCK_N, WORDS, EVEN, COMPUTE, True,
        )  # fmt: skip
    expert, row, row_inside = tile_rows_of(tiles, tile, starts, counts, BLOCK_M)
    if w13_bias is not None:
        column = _columns(block, tl.arange(0, BLOCK_N), intermediate, BLOCK_N)
        weight_row = expert * intermediate * 2 + column * row_step
        gate += tl.load(w13_bias + weight_row + gate_first).to(tl.float32)[:, None]
        up += tl.load(w13_bias + weight_row + up_first).to(tl.float32)[:, None]
    value = swiglu(gate, up, limit, alpha, shift).to(hidden.dtype.element_ty)
    PART: tl.constexpr = BLOCK_N // QUARTER
    in_part = block * PART + tl.arange(0, PART)[None, :, None]
    to = tl.arange(0, QUARTER)[:, None, None] * (intermediate // QUARTER) + in_part
    to = hidden + row.to(tl.int64)[None, None, :] * intermediate + to
    inside = (in_part < intermediate // QUARTER) & row_inside[None, None, :]
    tl.store(to, tl.reshape(value, (QUARTER, PART, BLOCK_M)), mask=inside)


@triton.jit
def _down_sums(
    hidden, tiles, tile, starts, counts, w2, w2_scale, groups, quarter, hidden_size, block, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, WORDS: tl.constexpr, EVEN: tl.constexpr, COMPUTE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    expert, row, row_inside = tile_rows_of(tiles, tile, starts, counts, BLOCK_M)
    word = tl.arange(0, WORDS)
    weight_row = expert * hidden_size + tl.minimum(block * BLOCK_N + tl.arange(0, BLOCK_N), hidden_size - 1)
    codes = w2 + weight_row[:, None] * quarter + word[None, :]
    scales = w2_scale + weight_row[:, None] * groups + tl.arange(0, WORDS // 8)[None, :]
    in_row = hidden + tl.where(row_inside, row, 0).to(tl.int64)[None, :] * (quarter * QUARTER) + word[:, None]
    return _products(in_row, quarter, groups, codes, scales, None, None, BLOCK_N, BLOCK_M, WORDS, EVEN, COMPUTE, EXACT)


@kernel(sizes=["groups", "units", "hidden_size"], indices=["tiles", "num_tiles", "starts", "counts", "w2_bias"])
def _down(
    hidden, tiles, num_tiles, starts, counts, w2, w2_scale, w2_bias, out, groups, units, hidden_size,
    WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr, EVEN: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """As in _expert_matmul; hidden is in the order of words, out is not."""
    blocks = tl.cdiv(hidden_size, BLOCK_N)
    tile, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if tile >= tl.load(num_tiles):
        return
    quarter = tl.cast(units, tl.int64) * WIDTH
    total, _, largest = _down_sums(
        hidden, tiles, tile, starts, counts, w2, w2_scale, groups, quarter, hidden_size, block, BLOCK_M, BLOCK_N, WORDS,
        EVEN, COMPUTE, False,
    )  # fmt: skip
    if largest > LARGEST_IN_ONE_STEP:
        total, _, largest = _down_sums(
            hidden, tiles, tile + (largest >> 8), starts, counts, w2, w2_scale, groups, quarter, hidden_size, block,
            BLOCK_M, BLOCK_N, WORDS, EVEN, COMPUTE, True,
        )  # fmt: skip
    expert, row, row_inside = tile_rows_of(tiles, tile, starts, counts, BLOCK_M)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < hidden_size
    if w2_bias is not None:
        total += tl.load(w2_bias + expert * hidden_size + column, mask=inside, other=0.0).to(tl.float32)[:, None]
    to = out + row.to(tl.int64)[None, :] * hidden_size + column[:, None]
    tl.store(to, total, mask=row_inside[None, :] & inside[:, None])


def _choose(
    table: dict[bool, Blocks], narrow: Blocks, tiles: TileClass, width: int, groups: int
) -> tuple[Blocks, bool]:
    """The configuration for `width` columns; whether a row of weights, `groups` scales, is a multiple of its depth."""
    even = groups * 32 % table[True].depth == 0
    few = tiles.tiles.shape[0] * triton.cdiv(width, table[even].columns) < NARROW_PROGRAMS
    return narrow if few else table[even], even


def gate_up(
    x: torch.Tensor,
    part: Part,
    w13_bias: torch.Tensor | None,
    order: RowOrder,
    activation: Activation,
    numbers: Arithmetic,
    hidden: torch.Tensor,
) -> None:
    """x: in the order of words. hidden: [slots, I]; only rows of tiles of ROWS rows are written, in that order."""
    schedule, tiles = part.schedule, part.schedule.classes[0]
    intermediate, groups = part.codes.shape[1] // 2, part.scales.shape[2]
    blocks, even = _choose(GATE_UP_BLOCKS, NARROW_GATE_UP_BLOCKS, tiles, intermediate, groups)
    grid = (tiles.tiles.shape[0] * triton.cdiv(intermediate, blocks.columns),)
    launch(
        _gate_up, grid, x, schedule.row_slot, tiles.tiles, tiles.count, schedule.starts, schedule.counts,
        part.codes.view(torch.int16), part.scales, part.of(w13_bias), hidden, schedule.top_k, groups, groups,
        intermediate, order.step, order.gate, order.up, activation.limit, activation.alpha, activation.shift, WIDTH=8,
        BLOCK_M=ROWS, BLOCK_N=blocks.columns, WORDS=blocks.depth // 4, EVEN=even, COMPUTE=numbers.compute,
        **blocks.options,
    )  # fmt: skip


def down(
    hidden: torch.Tensor, part: Part, w2_bias: torch.Tensor | None, numbers: Arithmetic, out: torch.Tensor
) -> None:
    """hidden: in the order of words. out: [slots, H] float32; only rows of tiles of ROWS rows are written."""
    schedule, tiles = part.schedule, part.schedule.classes[0]
    hidden_size, groups = part.codes.shape[1], part.scales.shape[2]
    blocks, even = _choose(DOWN_BLOCKS, NARROW_DOWN_BLOCKS, tiles, hidden_size, groups)
    grid = (tiles.tiles.shape[0] * triton.cdiv(hidden_size, blocks.columns),)
    launch(
        _down, grid, hidden, tiles.tiles, tiles.count, schedule.starts, schedule.counts, part.codes.view(torch.int16),
        part.scales, part.of(w2_bias), out, groups, groups, hidden_size, WIDTH=8, BLOCK_M=ROWS,
        BLOCK_N=blocks.columns, WORDS=blocks.depth // 4, EVEN=even, COMPUTE=numbers.compute, **blocks.options,
    )  # fmt: skip
