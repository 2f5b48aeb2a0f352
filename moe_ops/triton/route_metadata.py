"""route_metadata on CUDA: one launch of 2 * R programs that do not depend on each other.

The first R programs take a prefix over the experts of one source (S of reference/route_metadata.py), the others one
over (local expert, source) of one owner (T). Each writes the outputs that its prefix feeds. Nothing is read on the
host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_ops.meta.route_metadata import route_metadata as check_and_allocate
from moe_ops.triton._launch import kernel, launch, refuse_hip

BLOCK = 1024


@triton.jit
def _expert_of(owner, place, ep_size, num_experts, local_experts):
    """(expert, whether it exists) at `place` of `owner`: the first ranks own local_experts, the others one fewer."""
    larger = num_experts - ep_size * (local_experts - 1)
    owned = tl.where(owner < larger, local_experts, local_experts - 1)
    return owner * (local_experts - 1) + tl.minimum(owner, larger) + place, place < owned


@kernel(
    sizes=["ep_size", "num_experts", "local_experts", "ep_rank", "source_stride", "expert_stride"],
    indices=[
        "counts",
        "dispatch_src",
        "dispatch_dst",
        "dispatch_size",
        "combine_src",
        "combine_dst",
        "combine_size",
        "group_ends",
        "loads",
    ],
)
def _route_metadata(
    counts, dispatch_src, dispatch_dst, dispatch_size, combine_src, combine_dst, combine_size, group_ends, loads,
    ep_size, num_experts, local_experts, ep_rank, source_stride, expert_stride, PULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    length = ep_size * local_experts
    carry = tl.zeros((1,), dtype=tl.int64)
    if program < ep_size:
        source = program
        for first in range(0, length, BLOCK):
            index = first + tl.arange(0, BLOCK)  # owner * L + place
            inside = index < length
            owner, place = index // local_experts, index % local_experts
            expert, exists = _expert_of(owner, place, ep_size, num_experts, local_experts)
            at = counts + source * tl.cast(source_stride, tl.int64) + expert * tl.cast(expert_stride, tl.int64)
            count = tl.load(at, mask=inside & exists, other=0)
            prefix = carry + tl.cumsum(count.to(tl.int64), axis=0) - count
            carry += tl.sum(count.to(tl.int64), axis=0)
            mine = inside & (owner == ep_rank)
            here = source * local_experts + place
            tl.store(combine_dst + here, prefix, mask=mine)
            tl.store(combine_size + here, count, mask=mine)
            if PULL:
                tl.store(dispatch_src + here, prefix, mask=mine)
                tl.store(dispatch_size + here, count, mask=mine)
            else:
                sent = index < tl.where(source == ep_rank, length, 0)
                tl.store(dispatch_src + index, prefix, mask=sent)
                tl.store(dispatch_size + index, count, mask=sent)
    else:
        owner = program - ep_size
        for first in range(0, length, BLOCK):
            index = first + tl.arange(0, BLOCK)  # place * R + source
            inside = index < length
            place, source = index // ep_size, index % ep_size
            expert, exists = _expert_of(owner, place, ep_size, num_experts, local_experts)
            at = counts + source * tl.cast(source_stride, tl.int64) + expert * tl.cast(expert_stride, tl.int64)
            count = tl.load(at, mask=inside & exists, other=0).to(tl.int64)
            prefix = carry + tl.cumsum(count, axis=0) - count
            carry += tl.sum(count, axis=0)
            mine = index < tl.where(owner == ep_rank, length, 0)
            tl.store(combine_src + source * local_experts + place, prefix, mask=mine)
            tl.store(group_ends + place, prefix + count, mask=mine & (source == ep_size - 1))
            if PULL:
                tl.store(dispatch_dst + source * local_experts + place, prefix, mask=mine)
            else:
                tl.store(dispatch_dst + owner * local_experts + place, prefix, mask=inside & (source == ep_rank))
        tl.store(loads + owner + tl.arange(0, 1), carry)


def route_metadata(tokens_per_source: torch.Tensor, ep_rank: int, *, mode: str = "push") -> tuple[torch.Tensor, ...]:
    refuse_hip()
    outputs = check_and_allocate(tokens_per_source, ep_rank, mode=mode)
    ep_size, num_experts = tokens_per_source.shape
    launch(
        _route_metadata, (2 * ep_size,), tokens_per_source, *outputs, ep_size, num_experts,
        triton.cdiv(num_experts, ep_size), ep_rank, tokens_per_source.stride(0), tokens_per_source.stride(1),
        PULL=mode == "pull", BLOCK=BLOCK,
    )  # fmt: skip
    return outputs
