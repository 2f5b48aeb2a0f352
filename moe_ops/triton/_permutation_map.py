"""The permutation map of a batch: native, or in four Triton launches.

Slots without an expert are a last bucket behind the E experts, so that every slot has a place: theirs are the rows
that must be zero. Rows are those of a stable sort; nothing depends on the order in which programs run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_ops.triton._launch import kernel, launch, native

BLOCK_SLOTS = 128
BLOCK_BUCKETS = 128
BLOCK_SCAN = 1024
# The native kernel counts in shared memory, eight warps a block, on every device in use.
MAX_NATIVE_EXPERTS = 1_400


@kernel(
    sizes=["num_slots", "num_experts", "expert_map_size"],
    indices=["topk_ids", "expert_map", "topk_weights", "bucket_out", "rank_out", "counts"],
)
def _rank_in_block(
    topk_ids, expert_map, topk_weights, bucket_out, rank_out, counts, num_slots, num_experts, expert_map_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Bucket and rank of each slot among the earlier slots of its block; counts[block, bucket], zeroed before."""
    block = tl.program_id(0)
    offset = tl.arange(0, BLOCK)
    slot = block.to(tl.int64) * BLOCK + offset
    inside = slot < num_slots
    expert = tl.load(topk_ids + slot, mask=inside, other=-1).to(tl.int64)
    if expert_map is not None:
        known = (expert >= 0) & (expert < expert_map_size)
        expert = tl.load(expert_map + tl.where(known, expert, 0), mask=known, other=-1).to(tl.int64)
    if topk_weights is not None:
        expert = tl.where(tl.load(topk_weights + slot, mask=inside, other=1.0) == 0.0, -1, expert)
    routed = (expert >= 0) & (expert < num_experts)
    bucket = tl.where(inside, tl.where(routed, expert, num_experts), -1).to(tl.int32)
    same = bucket[:, None] == bucket[None, :]
    rank = tl.sum((same & (offset[None, :] < offset[:, None])).to(tl.int32), axis=1)
    total = tl.sum(same.to(tl.int32), axis=1)
    tl.store(bucket_out + slot, bucket, mask=inside)
    tl.store(rank_out + slot, rank, mask=inside)
    tl.store(counts + block.to(tl.int64) * (num_experts + 1) + bucket, total, mask=inside & (rank + 1 == total))


@kernel(sizes=["num_blocks", "num_experts"], indices=["counts", "totals"])
def _scan_blocks(counts, totals, num_blocks, num_experts, BLOCK: tl.constexpr):
    """counts becomes the slots of a bucket in the blocks before."""
    bucket = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = bucket <= num_experts
    running = tl.zeros((BLOCK,), dtype=tl.int32)
    place = counts + bucket
    for _ in range(num_blocks):
        count = tl.load(place, mask=inside, other=0)
        tl.store(place, running, mask=inside)
        running += count
        place += num_experts + 1
    tl.store(totals + bucket, running, mask=inside)


@kernel(sizes=["num_experts"], indices=["totals", "starts", "tokens_per_expert"])
def _scan_buckets(totals, starts, tokens_per_expert, num_experts, BLOCK: tl.constexpr):
    carry = tl.zeros((1,), dtype=tl.int32)
    for first in range(0, num_experts + 1, BLOCK):
        bucket = first + tl.arange(0, BLOCK)
        total = tl.load(totals + bucket, mask=bucket <= num_experts, other=0)
        tl.store(starts + bucket, carry + tl.cumsum(total, axis=0) - total, mask=bucket <= num_experts)
        tl.store(tokens_per_expert + bucket, total, mask=bucket < num_experts)
        carry += tl.sum(total, axis=0)


@kernel(
    sizes=["num_slots", "num_experts", "num_rows", "num_row_slots"],
    indices=["bucket_in", "rank_in", "counts", "starts", "row_map", "placement", "row_slot"],
)
def _place_slots(
    bucket_in, rank_in, counts, starts, row_map, placement, row_slot, num_slots, num_experts, num_rows, num_row_slots,
    BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    inside = slot < num_slots
    bucket = tl.load(bucket_in + slot, mask=inside, other=0)
    row = tl.load(rank_in + slot, mask=inside, other=0)
    row += tl.load(counts + block * (num_experts + 1) + bucket, mask=inside, other=0)
    row += tl.load(starts + bucket, mask=inside, other=0)
    routed = bucket < num_experts
    tl.store(row_map + slot, tl.where(routed & (row < num_rows), row, -1), mask=inside)
    if placement is not None:
        tl.store(placement + slot, tl.where(routed, row, -1 - row), mask=inside)
    if row_slot is not None:
        tl.store(row_slot + row, tl.where(routed, slot.to(tl.int32), -1), mask=inside & (row < num_row_slots))


def permutation_map(
    topk_ids: torch.Tensor,
    row_map: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    *,
    num_rows: int,
    placement: torch.Tensor | None = None,
    row_slot: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
) -> None:
    """Fill the map of `topk_ids`.

    row_map: [T, K] int32 out: row of a slot, -1 without an expert or from row `num_rows` on.
    tokens_per_expert: [E] int32 out.
    placement: [T, K] int32 out: row of a slot, ~row for a slot without an expert.
    row_slot: [n] int32 out, n at most T * K: slot of a row, -1 for the rows of slots without an expert.
    expert_map: [n] int32, applied to the ids first.
    topk_weights: [T, K] float32: a slot of weight exactly 0 counts as one without an expert.
    """
    num_slots, num_experts = topk_ids.numel(), tokens_per_expert.numel()
    if num_slots == 0:
        tokens_per_expert.zero_()
        return
    if expert_map is not None and expert_map.numel() == 0:
        expert_map, topk_ids = None, torch.full_like(topk_ids, -1)
    topk_ids = topk_ids.contiguous()
    kernel = native("_permutation_map", topk_ids)
    if kernel is not None and num_experts <= MAX_NATIVE_EXPERTS:
        kernel(topk_ids, expert_map, topk_weights, num_rows, row_map, tokens_per_expert, placement, row_slot)
        return

    num_blocks = triton.cdiv(num_slots, BLOCK_SLOTS)
    bucket, rank = (torch.empty_like(row_map) for _ in range(2))
    counts = row_map.new_zeros((num_blocks, num_experts + 1))
    totals, starts = (row_map.new_empty((num_experts + 1,)) for _ in range(2))
    map_size = 0 if expert_map is None else expert_map.numel()
    launch(
        _rank_in_block, (num_blocks,), topk_ids, expert_map, topk_weights, bucket, rank, counts, num_slots,
        num_experts, map_size, BLOCK=BLOCK_SLOTS,
    )  # fmt: skip
    grid = (triton.cdiv(num_experts + 1, BLOCK_BUCKETS),)
    launch(_scan_blocks, grid, counts, totals, num_blocks, num_experts, BLOCK=BLOCK_BUCKETS)
    launch(_scan_buckets, (1,), totals, starts, tokens_per_expert, num_experts, BLOCK=BLOCK_SCAN)
    num_row_slots = 0 if row_slot is None else row_slot.numel()
    launch(
        _place_slots, (num_blocks,), bucket, rank, counts, starts, row_map, placement, row_slot, num_slots,
        num_experts, num_rows, num_row_slots, BLOCK=BLOCK_SLOTS,
    )  # fmt: skip
