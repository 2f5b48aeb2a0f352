"""Weighted sum of the rows of each token, in float32 and slot order, rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_ops.triton._launch import (
    INTERPRETED,
    as_float32,
    dense_rows,
    kernel,
    launch,
    refuse_hip,
    rounded,
    vector_width,
)

BLOCK_COLUMNS = 1024
# Rows of a token whose loads are in flight together; a larger top_k loops.
MAX_UNROLLED = 16


@triton.jit
def _add_row(total, rows, row_map, weights, slot, num_rows, row_stride, column, width):
    row = tl.load(row_map + slot)
    present = (row >= 0) & (row < num_rows)
    if weights is not None:
        weight = tl.load(weights + slot)
        present = present & (weight != 0.0)
        weight = tl.where(present, weight, 0.0)
    bound = tl.where(present, width, 0)
    value = tl.load(rows + row.to(tl.int64) * row_stride + column, mask=column < bound, other=0.0).to(tl.float32)
    if weights is not None:
        value = value * weight
    return total + value


@kernel(sizes=["num_rows", "units", "stride_units", "top_k"], indices=["row_map", "weights"])
def _combine_rows(
    rows, row_map, weights, out, num_rows, units, stride_units, top_k, UNROLLED: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """Sizes are in units of WIDTH elements; UNROLLED is top_k, or 0 for a loop."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    width = units * WIDTH
    row_stride = tl.cast(stride_units, tl.int64) * WIDTH
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    if UNROLLED > 0:
        for k in tl.static_range(UNROLLED):
            slot = token * UNROLLED + k
            total = _add_row(total, rows, row_map, weights, slot, num_rows, row_stride, column, width)
    else:
        for k in range(top_k):
            slot = token * top_k + k
            total = _add_row(total, rows, row_map, weights, slot, num_rows, row_stride, column, width)
    target = out + token * tl.cast(units, tl.int64) * WIDTH + column
    tl.store(target, rounded(total, out.dtype.element_ty, EMULATED), mask=column < width)


def combine_rows(
    rows: torch.Tensor, row_map: torch.Tensor, topk_weights: torch.Tensor | None, out: torch.Tensor
) -> None:
    """out[t] = sum over k of weight[t, k] * rows[row_map[t, k]]; out is contiguous, its dtype may differ."""
    refuse_hip()
    num_tokens, top_k = row_map.shape
    if out.numel() == 0:
        return
    rows = dense_rows(rows)
    unit = vector_width(rows, out)
    weights = None if topk_weights is None else as_float32(topk_weights)
    grid = (num_tokens, triton.cdiv(out.shape[1], BLOCK_COLUMNS))
    # A fused multiply-add would round a product less often than every other backend does.
    launch(
        _combine_rows, grid, rows, row_map.contiguous(), weights, out, rows.shape[0], out.shape[1] // unit,
        rows.stride(0) // unit, top_k, UNROLLED=top_k if top_k <= MAX_UNROLLED else 0, WIDTH=unit, BLOCK=BLOCK_COLUMNS,
        EMULATED=INTERPRETED, enable_fp_fusion=False,
    )  # fmt: skip
