"""Checkpoint bytes to layout "sm90_v1" and back, by one Triton kernel: what layout.py says in PyTorch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_ops.cuda.layout import STRIP
from moe_ops.triton._launch import kernel, launch

GROUPS = 64  # of a program: groups of 32 elements


@triton.jit
def _checkpoint_word(packed, first, step, inside, i: tl.constexpr, GROUPS: tl.constexpr):
    """Word i of each row and group, from code i of the four words of the strip."""
    word = tl.zeros((16, GROUPS), dtype=tl.uint32)
    for t in tl.static_range(4):
        bits = tl.load(packed + first + t * step, mask=inside, other=0).to(tl.uint32, bitcast=True)
        pair = ((bits >> (9 - 3 * i)) & 0x00070007) | (
            ((bits >> (15 if i == 0 else 12 if i == 1 else 14 if i == 2 else 13)) & 0x00010001) << 3
        )
        word |= ((pair & 15) | ((pair >> 12) & 0xF0)) << (8 * t)
    return word


@kernel(
    sizes=["groups", "rows", "half_first", "half_second", "row_step", "strip_step"],
    indices=["raw_scale", "packed_scale", "counts"],
)
def _repack(
    raw, raw_scale, packed, packed_scale, counts, groups, rows, half_first, half_second, row_step, strip_step,
    PACK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """A strip of an expert's matrix [rows, groups * 32] by GROUPS groups. Row half h of strip s are the checkpoint's
    rows half_h + s * strip_step + g * row_step, g = 0 to 7. A lane has one row and one group: four words on either
    side. With `counts`, experts that have none are left alone."""
    strip = tl.program_id(0).to(tl.int64)
    expert = tl.program_id(2).to(tl.int64)
    if counts is not None:  # noqa: SIM102 (Triton evaluates both sides of an `and`)
        if tl.load(counts + expert) == 0:
            return
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[None, :]
    row = tl.arange(0, 16)[:, None]
    half, g = row // 8, row % 8
    inside = (group < groups) & (row < 16)
    full = groups // 4
    words = groups - 4 * full
    block, j = group // 4, group % 4
    in_full = block < full
    # In words of 4 bytes: lane 4g + t of the strip's block.
    first = tl.where(in_full, block * 256 + half * 128 + 16 * g + j, full * 256 + (half * words + j) * 32 + 4 * g)
    step = tl.where(in_full, 4, 1)
    expert_row = expert * rows
    first += (expert_row + strip * 16) * groups * 4
    scale_at = tl.where(in_full, block * 64 + g * 8 + j * 2 + half, full * 64 + g * 2 * words + j * 2 + half)
    scale_at += (expert_row + strip * 16) * groups
    line = expert_row + tl.where(half == 0, half_first, half_second) + strip * strip_step + g * row_step
    raw_first = (line * groups + group) * 4
    raw_scale_at = line * groups + group
    # Code i of word t: magnitude bits from 9 - 3i on, the sign at 15, 12, 14, 13; the odd elements 16 bits higher. Word
    # i of the checkpoint has the bytes of t = 0 to 3.
    if PACK:
        tl.store(packed_scale + scale_at, tl.load(raw_scale + raw_scale_at, mask=inside), mask=inside)
        for t in tl.static_range(4):
            word = tl.zeros((16, GROUPS), dtype=tl.uint32)
            for i in tl.static_range(4):
                bits = tl.load(raw + raw_first + i, mask=inside, other=0).to(tl.uint32, bitcast=True) >> (8 * t)
                pair = (bits & 15) | ((bits & 0xF0) << 12)
                word |= ((pair & 0x00070007) << (9 - 3 * i)) | (
                    ((pair >> 3) & 0x00010001) << (15 if i == 0 else 12 if i == 1 else 14 if i == 2 else 13)
                )
            tl.store(packed + first + t * step, word.to(tl.int32, bitcast=True), mask=inside)
    else:
        tl.store(raw_scale + raw_scale_at, tl.load(packed_scale + scale_at, mask=inside), mask=inside)
        even = tl.join(
            _checkpoint_word(packed, first, step, inside, 0, GROUPS),
            _checkpoint_word(packed, first, step, inside, 2, GROUPS),
        )
        odd = tl.join(
            _checkpoint_word(packed, first, step, inside, 1, GROUPS),
            _checkpoint_word(packed, first, step, inside, 3, GROUPS),
        )
        # Four adjacent words of a lane: stores of 16 bytes.
        four = tl.reshape(tl.join(even, odd), (16, GROUPS * 4))
        column = tl.program_id(1) * (GROUPS * 4) + tl.arange(0, GROUPS * 4)[None, :]
        tl.store(raw + line * groups * 4 + column, four.to(tl.int32, bitcast=True), mask=column < groups * 4)


def repack(
    raw: torch.Tensor,
    raw_scale: torch.Tensor,
    packed: torch.Tensor,
    packed_scale: torch.Tensor,
    w13_layout: str | None,
    *,
    pack: bool,
    counts: torch.Tensor | None = None,
) -> None:
    """Experts of one matrix, contiguous: raw [n, rows, k / 2] and [n, rows, k / 32], packed [n, rows / 16, 16, ...], in
    other memory; `pack` says from which to which. w13_layout: None for w2. counts: [n] int32, where experts with 0 may
    be left out."""
    num_experts, rows, groups = raw_scale.shape
    places = {
        None: (0, 8, 1, 16),
        "gate_up": (0, rows // 2, 1, 8),
        "up_gate": (rows // 2, 0, 1, 8),
        "interleaved": (0, 1, 2, 16),
    }[w13_layout]
    launch(
        _repack, (rows // STRIP, triton.cdiv(groups, GROUPS), num_experts), raw.view(torch.int32), raw_scale,
        packed.flatten().view(torch.int32), packed_scale, counts, groups, rows, *places, PACK=pack, GROUPS=GROUPS,
    )  # fmt: skip
