"""ep_remap on CUDA: native, or two Triton launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_ops.meta.ep_remap import ep_remap as check_and_allocate
from moe_ops.triton._launch import kernel, launch, native, refuse_hip

BLOCK_SLOTS = 1024
NONE = tl.constexpr(2**31 - 1)


@kernel(
    sizes=[
        "id_stride_t",
        "id_stride_k",
        "weight_stride_t",
        "weight_stride_k",
        "map_size",
        "offset",
        "num_local",
        "num_tokens",
        "top_k",
    ],
    indices=["topk_ids", "topk_weights", "expert_map", "local_ids", "local_weights", "minima"],
)
def _remap_rows(
    topk_ids, topk_weights, expert_map, local_ids, local_weights, minima, id_stride_t, id_stride_k, weight_stride_t,
    weight_stride_k, map_size, offset, num_local, num_tokens, top_k, REUSE: tl.constexpr, ROWS: tl.constexpr,
    WIDE_K: tl.constexpr,
):  # fmt: skip
    """ROWS rows a program; foreign slots get their row's minimum, or -1 where there is none."""
    token = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    k = tl.arange(0, WIDE_K)[None, :]
    inside = (token < num_tokens) & (k < top_k)
    at = token * tl.cast(id_stride_t, tl.int64) + k * tl.cast(id_stride_k, tl.int64)
    expert = tl.load(topk_ids + at, mask=inside, other=-1).to(tl.int64)
    if expert_map is not None:
        known = inside & (expert >= 0) & (expert < map_size)
        local = tl.load(expert_map + tl.where(known, expert, 0), mask=known, other=-1)
        owned = known & (local >= 0)
    else:
        owned = inside & (expert >= offset) & (expert < tl.cast(offset, tl.int64) + num_local)
        local = tl.where(owned, expert - offset, -1).to(tl.int32)
    at = token * tl.cast(weight_stride_t, tl.int64) + k * tl.cast(weight_stride_k, tl.int64)
    weight = tl.load(topk_weights + at, mask=owned, other=0.0).to(tl.float32)
    out = token * top_k + k
    tl.store(local_weights + out, weight, mask=inside)
    filler = -1
    if REUSE:
        minimum = tl.min(tl.where(owned, local, NONE), axis=1)
        tl.store(minima + tl.program_id(0), tl.min(minimum, axis=0))
        filler = tl.where(minimum == NONE, -1, minimum)[:, None]
    tl.store(local_ids + out, tl.where(owned, local, filler), mask=inside)


@kernel(sizes=["num_slots", "num_blocks"], indices=["local_ids", "minima"])
def _fill_rows(local_ids, minima, num_slots, num_blocks, BLOCK: tl.constexpr):
    """Slots that are still -1 belong to rows without a local expert."""
    lowest = tl.zeros((BLOCK,), dtype=tl.int32) + NONE
    for first in range(0, num_blocks, BLOCK):
        block = first + tl.arange(0, BLOCK)
        lowest = tl.minimum(lowest, tl.load(minima + block, mask=block < num_blocks, other=NONE))
    minimum = tl.min(lowest, axis=0)
    filler = tl.where(minimum == NONE, 0, minimum)
    slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    local = tl.load(local_ids + slot, mask=slot < num_slots, other=0)
    tl.store(local_ids + slot, tl.zeros((BLOCK,), dtype=tl.int32) + filler, mask=(slot < num_slots) & (local < 0))


def ep_remap(
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    expert_offset: int | None = None,
    num_local_experts: int | None = None,
    expert_map: torch.Tensor | None = None,
    fill: str = "reuse",
) -> tuple[torch.Tensor, torch.Tensor]:
    refuse_hip()
    outputs = check_and_allocate(
        topk_ids, topk_weights, expert_offset=expert_offset, num_local_experts=num_local_experts, expert_map=expert_map,
        fill=fill,
    )  # fmt: skip
    num_tokens, top_k = topk_ids.shape
    if topk_ids.numel() == 0:
        return outputs
    offset, num_local = expert_offset or 0, num_local_experts or 0
    if expert_map is not None and expert_map.numel() == 0:
        expert_map, num_local = None, 0
    expert_map = None if expert_map is None else expert_map.contiguous()
    kernel = native("_ep_remap", topk_ids)
    if kernel is not None:
        weights = topk_weights.to(torch.float32)
        kernel(topk_ids, weights, offset, num_local, expert_map, fill == "reuse", *outputs)
        return outputs

    wide_k = triton.next_power_of_2(top_k)
    rows = max(1, BLOCK_SLOTS // wide_k)
    num_blocks = triton.cdiv(num_tokens, rows)
    minima = topk_ids.new_empty((num_blocks,), dtype=torch.int32)
    launch(
        _remap_rows, (num_blocks,), topk_ids, topk_weights, expert_map, *outputs, minima, *topk_ids.stride(),
        *topk_weights.stride(), 0 if expert_map is None else expert_map.numel(), offset, num_local, num_tokens, top_k,
        REUSE=fill == "reuse", ROWS=rows, WIDE_K=wide_k,
    )  # fmt: skip
    if fill == "reuse":
        grid = (triton.cdiv(num_tokens * top_k, BLOCK_SLOTS),)
        launch(_fill_rows, grid, outputs[0], minima, num_tokens * top_k, num_blocks, BLOCK=BLOCK_SLOTS)
    return outputs
