"""Packed weights for the portable kernels, which compute what the packed layouts' own kernels do not: float32 rows,
gradients, and large batches of float16 rows or of scale codes outside 1..128.

Experts are unpacked into a buffer, as many at a time as it holds and only those that the batch has rows for. The
portable kernels see the checkpoint's bytes, and their results have the same bits as over the checkpoint's tensors; what
it costs is that the weights in use are written and read once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from moe_ops.cuda._repack import repack
from moe_ops.triton._matrix import Part
from moe_ops.triton._schedule import Schedule

# Of the buffer; an expert's matrix that is larger has one of its own size.
BUFFER_BYTES = 512 << 20


@dataclass(frozen=True)
class PackedMatrix:
    """codes [E, strips, 16, k / 2], scales [E, strips, 16, k / 32]; w13_layout: None for w2. buffer: uint8, for one
    expert at least."""

    codes: torch.Tensor
    scales: torch.Tensor
    w13_layout: str | None
    buffer: torch.Tensor

    @property
    def num_experts(self) -> int:
        return self.codes.shape[0]

    @property
    def rows(self) -> int:
        return self.codes.shape[1] * self.codes.shape[2]

    @property
    def has_words(self) -> bool:
        return True

    def parts(self, schedule: Schedule) -> Iterator[Part]:
        code_bytes, scale_bytes = self.codes[0].numel(), self.scales[0].numel()
        step = min(self.buffer.numel() // (code_bytes + scale_bytes), self.num_experts)
        codes, scales, _ = self.buffer.tensor_split((step * code_bytes, step * (code_bytes + scale_bytes)))
        codes, scales = codes.view(step, self.rows, -1), scales.view(step, self.rows, -1)
        for first in range(0, self.num_experts, step):
            experts = slice(first, min(first + step, self.num_experts))
            count = experts.stop - first
            there = schedule if count == self.num_experts else schedule.of(experts)
            part = Part(experts, codes[:count], scales[:count], there)
            repack(
                part.codes, part.scales, self.codes[experts], self.scales[experts], self.w13_layout, pack=False,
                counts=there.counts,
            )  # fmt: skip
            yield part


def matrices_of(
    w13: torch.Tensor, w13_scale: torch.Tensor, w2: torch.Tensor, w2_scale: torch.Tensor, w13_layout: str
) -> tuple[PackedMatrix, PackedMatrix]:
    """The two matrices of a layer, which share a buffer: one is in use at a time."""
    sizes = [codes[0].numel() + scales[0].numel() for codes, scales in ((w13, w13_scale), (w2, w2_scale))]
    largest = max(sizes)
    buffer = w13.new_empty(max(largest, min(BUFFER_BYTES, largest * w13.shape[0])))
    return PackedMatrix(w13, w13_scale, w13_layout, buffer), PackedMatrix(w2, w2_scale, None, buffer)
