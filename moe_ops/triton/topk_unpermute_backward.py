"""topk_unpermute_backward on CUDA: a program per slot, then zeros for the rows that no slot reads.

Each row is read by at most one slot, as in every row_map of topk_permute.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_ops.meta.topk_unpermute_backward import topk_unpermute_backward as check_and_allocate
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

BLOCK_COLUMNS = 2048
ROWS_PER_PROGRAM = 32


@kernel(
    sizes=["num_rows", "top_k", "units", "grad_stride_units", "row_stride_units"],
    indices=["row_map", "weights", "grad_weights", "read"],
)
def _slot_gradients(
    grad_output, rows, row_map, weights, grad_rows, grad_weights, read, num_rows, top_k, units, grad_stride_units,
    row_stride_units, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    token = slot // top_k
    row = tl.load(row_map + slot)
    present = (row >= 0) & (row < num_rows)
    if present:
        width = units * WIDTH
        tl.store(read + row, 1)
        grad_row = grad_output + token * tl.cast(grad_stride_units, tl.int64) * WIDTH
        row_in = rows + row.to(tl.int64) * tl.cast(row_stride_units, tl.int64) * WIDTH
        row_out = grad_rows + row.to(tl.int64) * tl.cast(units, tl.int64) * WIDTH
        product = tl.zeros((BLOCK,), dtype=tl.float32)
        if weights is not None:
            weight = tl.load(weights + slot)
        for first in range(0, width, BLOCK):
            column = first + tl.arange(0, BLOCK)
            inside = column < width
            gradient = tl.load(grad_row + column, mask=inside, other=0.0).to(tl.float32)
            scaled = gradient
            if weights is not None:
                value = tl.load(row_in + column, mask=inside, other=0.0).to(tl.float32)
                product += value * gradient
                scaled = tl.where(weight != 0.0, gradient * weight, 0.0)
            tl.store(row_out + column, rounded(scaled, grad_rows.dtype.element_ty, EMULATED), mask=inside)
        if weights is not None:
            tl.store(grad_weights + slot, tl.sum(product, axis=0))
    elif weights is not None:
        tl.store(grad_weights + slot, 0.0)


@kernel(sizes=["num_rows", "units"], indices=["read"])
def _zero_unread(read, grad_rows, num_rows, units, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    row = first_row + tl.arange(0, ROWS)
    unread = tl.load(read + row, mask=row < num_rows, other=1) == 0
    if tl.sum(unread.to(tl.int32), axis=0) > 0:
        width = units * WIDTH
        nothing = tl.zeros((BLOCK,), dtype=grad_rows.dtype.element_ty)
        for i in range(ROWS):
            at = first_row + i
            if tl.load(read + at, mask=at < num_rows, other=1) == 0:
                for first in range(0, width, BLOCK):
                    column = first + tl.arange(0, BLOCK)
                    target = grad_rows + at * tl.cast(units, tl.int64) * WIDTH + column
                    tl.store(target, nothing, mask=column < width)


def topk_unpermute_backward(
    grad_output: torch.Tensor,
    permuted_hidden_states: torch.Tensor,
    row_map: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    refuse_hip()
    outputs = check_and_allocate(grad_output, permuted_hidden_states, row_map, topk_weights)
    grad_rows, grad_weights = outputs
    num_rows, width = grad_rows.shape
    if row_map.numel() == 0 or grad_rows.numel() == 0:
        grad_rows.zero_()
        grad_weights.zero_()
        return outputs
    grad_output, rows = dense_rows(grad_output), dense_rows(permuted_hidden_states)
    unit = vector_width(grad_output, rows, grad_rows)
    weights = None if topk_weights is None else as_float32(topk_weights)
    read = torch.zeros(num_rows, dtype=torch.int8, device=grad_rows.device)
    launch(
        _slot_gradients, (row_map.numel(),), grad_output, rows, row_map.contiguous(), weights, grad_rows,
        grad_weights, read, num_rows, row_map.shape[1], width // unit, grad_output.stride(0) // unit,
        rows.stride(0) // unit, WIDTH=unit, BLOCK=BLOCK_COLUMNS, EMULATED=INTERPRETED,
    )  # fmt: skip
    launch(
        _zero_unread,
        (triton.cdiv(num_rows, ROWS_PER_PROGRAM),),
        read,
        grad_rows,
        num_rows,
        width // unit,
        ROWS=ROWS_PER_PROGRAM,
        WIDTH=unit,
        BLOCK=BLOCK_COLUMNS,
    )
    return outputs
