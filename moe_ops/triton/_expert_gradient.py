"""What the backward of an expert needs beyond its forward: the derivative of the activation, and products contracted
along the rows of an MXFP4 weight."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_ops.triton._expert_matmul import Activation, Arithmetic, Blocks, RowOrder, tile_rows_of
from moe_ops.triton._launch import kernel, launch, vector_width
from moe_ops.triton._matrix import Part
from moe_ops.triton._mxfp4 import decode, operand
from moe_ops.triton._schedule import Schedule

# As in _expert_matmul: columns of the result of a program, weight rows in one step.
BY_ROWS_BLOCKS = {
    (2, 16): Blocks(128, 64, 4, 3),
    (2, 64): Blocks(128, 64, 4, 3),
    (2, 128): Blocks(128, 64, 8, 3),
    (4, 16): Blocks(64, 32, 4, 2),
    (4, 64): Blocks(64, 32, 4, 2),
}
BLOCK_COLUMNS = 1024


@kernel(
    sizes=["top_k", "num_weight_rows", "groups", "stride_units"],
    indices=["row_slot", "tiles", "num_tiles", "starts", "counts"],
)
def _by_rows(
    value, row_slot, tiles, num_tiles, starts, counts, codes, scales, out, top_k, num_weight_rows, groups, stride_units,
    GATHER: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DEPTH: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[row] = value[row, or its token with GATHER] @ weight, float32; weight is [num_weight_rows, groups * 32]."""
    width = groups * 32
    blocks = tl.cdiv(width, BLOCK_N)
    tile, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if tile >= tl.load(num_tiles):
        return
    expert, row, row_inside = tile_rows_of(tiles, tile, starts, counts, BLOCK_M)
    source = row
    if GATHER:
        source = tl.load(row_slot + row, mask=row_inside, other=0) // top_k
    value_row = value + source.to(tl.int64)[:, None] * (tl.cast(stride_units, tl.int64) * WIDTH)
    byte = block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    group = block * (BLOCK_N // 32) + tl.arange(0, BLOCK_N // 32)
    even = tl.zeros((BLOCK_M, BLOCK_N // 2), dtype=tl.float32)
    odd = tl.zeros((BLOCK_M, BLOCK_N // 2), dtype=tl.float32)
    for step in range(0, tl.cdiv(num_weight_rows, DEPTH)):
        k = step * DEPTH + tl.arange(0, DEPTH)
        k_inside = k < num_weight_rows
        left = tl.load(value_row + k[None, :], mask=row_inside[:, None] & k_inside[None, :], other=0.0).to(COMPUTE)
        weight_row = expert * num_weight_rows + k
        at = codes + weight_row[:, None] * (groups * 16) + byte[None, :]
        packed = tl.load(at, mask=k_inside[:, None] & (byte < groups * 16)[None, :], other=0)
        at = scales + weight_row[:, None] * groups + group[None, :]
        scale = tl.load(at, mask=k_inside[:, None] & (group < groups)[None, :], other=127)
        low, high = decode(packed, scale, DEPTH, BLOCK_N // 2, COMPUTE)
        even = tl.dot(left, low, even, input_precision=PRECISION)
        odd = tl.dot(left, high, odd, input_precision=PRECISION)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    at = out + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(at, tl.interleave(even, odd), mask=row_inside[:, None] & (column < width)[None, :])


def by_rows(
    value: torch.Tensor,
    part: Part,
    numbers: Arithmetic,
    out: torch.Tensor,
    *,
    gather: bool,
) -> None:
    """out [slots, columns of the weight] float32. gather: `value` has a row per token, else a row per slot in expert
    order."""
    schedule, codes, scales = part.schedule, part.codes, part.scales
    groups = scales.shape[2]
    unit = vector_width(value)
    for tiles in schedule.classes:
        blocks = BY_ROWS_BLOCKS[numbers.compute.primitive_bitwidth // 8, tiles.rows]
        grid = (tiles.tiles.shape[0] * triton.cdiv(groups * 32, blocks.columns),)
        launch(
            _by_rows, grid, value, schedule.row_slot, tiles.tiles, tiles.count, schedule.starts, schedule.counts,
            codes, scales, out, schedule.top_k, codes.shape[1], groups, value.stride(0) // unit, GATHER=gather,
            WIDTH=unit, BLOCK_M=tiles.rows, BLOCK_N=blocks.columns, DEPTH=blocks.depth, COMPUTE=numbers.compute,
            PRECISION=numbers.precision, num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip


@kernel(
    sizes=[
        "top_k",
        "intermediate",
        "hidden_size",
        "grad_stride",
        "row_step",
        "gate_first",
        "up_first",
        "limit",
        "alpha",
        "shift",
    ],
    indices=["grad_output", "row_slot", "topk_weights", "topk_ids", "expert_map", "w2_bias", "grad_weights"],
)
def _activation_gradient(
    gate_in, up_in, grad_hidden, grad_output, row_slot, topk_weights, topk_ids, expert_map, w2_bias, grad_rows,
    grad_weights, top_k, intermediate, hidden_size, grad_stride, row_step, gate_first, up_first, limit, alpha, shift,
    TF32: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program per row: grad_rows[row] in the row order of w13, and the slot's grad_weights."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slot + row)
    if slot < 0:
        return
    weight = tl.load(topk_weights + slot)
    product = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, intermediate, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < intermediate
        at = row * intermediate + column
        gate = tl.load(gate_in + at, mask=inside, other=0.0)
        up = tl.load(up_in + at, mask=inside, other=0.0)
        grad = tl.load(grad_hidden + at, mask=inside, other=0.0)
        gate_free = gate <= limit
        up_free = (up <= limit) & (up >= -limit)
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        sigmoid = 1.0 / (1.0 + tl.exp(-alpha * gate))
        product += gate * sigmoid * (up + shift) * grad
        slope = sigmoid * (1.0 + alpha * gate * (1.0 - sigmoid))
        grad *= weight
        gate_grad = tl.where(gate_free, grad * slope * (up + shift), 0.0)
        up_grad = tl.where(up_free, grad * gate * sigmoid, 0.0)
        out = grad_rows + row * intermediate * 2 + column * row_step
        tl.store(out + gate_first, operand(gate_grad, grad_rows.dtype.element_ty, TF32), mask=inside)
        tl.store(out + up_first, operand(up_grad, grad_rows.dtype.element_ty, TF32), mask=inside)
    total = tl.sum(product, axis=0)
    if w2_bias is not None:
        expert = tl.load(topk_ids + slot).to(tl.int64)
        if expert_map is not None:
            expert = tl.load(expert_map + expert).to(tl.int64)
        product = tl.zeros((BLOCK,), dtype=tl.float32)
        for first in range(0, hidden_size, BLOCK):
            column = first + tl.arange(0, BLOCK)
            inside = column < hidden_size
            bias = tl.load(w2_bias + expert * hidden_size + column, mask=inside, other=0.0).to(tl.float32)
            at = (slot // top_k).to(tl.int64) * grad_stride + column
            product += bias * tl.load(grad_output + at, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(product, axis=0)
    tl.store(grad_weights + slot, total)


def activation_gradient(
    gate: torch.Tensor,
    up: torch.Tensor,
    grad_hidden: torch.Tensor,
    grad_output: torch.Tensor,
    schedule: Schedule,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    order: RowOrder,
    activation: Activation,
    numbers: Arithmetic,
    grad_rows: torch.Tensor,
    grad_weights: torch.Tensor,
) -> None:
    """grad_rows [slots, 2I], times the slot's weight; grad_weights [T, K] float32, where the slot has an expert."""
    slots, intermediate = gate.shape
    launch(
        _activation_gradient, (slots,), gate, up, grad_hidden, grad_output, schedule.row_slot, topk_weights, topk_ids,
        expert_map, w2_bias, grad_rows, grad_weights, schedule.top_k, intermediate, grad_output.shape[1],
        grad_output.stride(0), order.step, order.gate, order.up, activation.limit, activation.alpha, activation.shift,
        TF32=numbers.tf32, BLOCK=BLOCK_COLUMNS,
    )  # fmt: skip
