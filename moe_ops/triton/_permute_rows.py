"""Copies token rows to their places in the permuted buffer: native, or one Triton launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_ops.triton._launch import as_bits, dense_rows, kernel, launch, native, refuse_hip, vector_width
from moe_ops.triton._permutation_map import permutation_map

BLOCK_COLUMNS = 1024


@kernel(sizes=["num_tokens", "top_k", "num_rows", "units", "stride_units"], indices=["placement"])
def _copy_rows(
    source, placement, out, num_tokens, top_k, num_rows, units, stride_units, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """A program copies one piece of one token's row to its top_k places; programs past the tokens zero the rows past
    the last slot. Sizes are in units of WIDTH elements."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    width = units * WIDTH
    inside = column < width
    row_length = tl.cast(units, tl.int64) * WIDTH
    if token < num_tokens:
        value = tl.load(source + token * tl.cast(stride_units, tl.int64) * WIDTH + column, mask=inside, other=0)
        nothing = tl.zeros_like(value)
        for k in range(top_k):
            place = tl.load(placement + token * top_k + k)
            routed = place >= 0
            row = tl.where(routed, place, -1 - place)
            target = out + row.to(tl.int64) * row_length + column
            bound = tl.where(row < num_rows, width, 0)
            tl.store(target, tl.where(routed, value, nothing), mask=column < bound)
    else:
        row = tl.cast(num_tokens, tl.int64) * top_k + token - num_tokens
        tl.store(out + row * row_length + column, tl.zeros((BLOCK,), dtype=out.dtype.element_ty), mask=inside)


def permute_rows(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    permuted: torch.Tensor,
    row_map: torch.Tensor,
    tokens_per_expert: torch.Tensor,
) -> None:
    """Fill all of `permuted` [rows, H], `row_map` and `tokens_per_expert`, for any number of rows."""
    refuse_hip()
    num_rows, width = permuted.shape
    placement = torch.empty_like(row_map)
    hidden_states = dense_rows(hidden_states)  # before the map, which the copy of rows overlaps
    permutation_map(topk_ids, row_map, tokens_per_expert, num_rows=num_rows, placement=placement)
    if topk_ids.numel() == 0:
        permuted.zero_()
        return
    if num_rows == 0 or width == 0:
        return
    kernel = native("_permute_rows", hidden_states)
    if kernel is not None:
        kernel(hidden_states, placement, permuted)
        return
    num_tokens, top_k = topk_ids.shape
    source, out = as_bits(hidden_states), as_bits(permuted)
    unit = vector_width(source, out)
    grid = (num_tokens + max(0, num_rows - num_tokens * top_k), triton.cdiv(width, BLOCK_COLUMNS))
    launch(
        _copy_rows, grid, source, placement, out, num_tokens, top_k, num_rows, width // unit, source.stride(0) // unit,
        WIDTH=unit, BLOCK=BLOCK_COLUMNS,
    )  # fmt: skip
