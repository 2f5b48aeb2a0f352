"""Weights of one product as the matmul kernels read them: in the checkpoint's layout, all experts at once or some after
the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from moe_ops.triton._schedule import Schedule


@dataclass(frozen=True)
class Part:
    """Consecutive experts: codes [n, rows, k / 2], scales [n, rows, k / 32], and the tiles of their rows."""

    experts: slice
    codes: torch.Tensor
    scales: torch.Tensor
    schedule: Schedule

    def of(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        return None if bias is None else bias[self.experts]


class Matrix(Protocol):
    """A row of the schedule has the same result however the experts are divided into parts."""

    @property
    def num_experts(self) -> int: ...

    @property
    def rows(self) -> int: ...

    @property
    def has_words(self) -> bool:
        """Whether codes can be read four at a time."""
        ...

    def parts(self, schedule: Schedule) -> Iterator[Part]:
        """All experts; a part is good until the next one is asked for."""
        ...


@dataclass(frozen=True)
class CheckpointMatrix:
    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def num_experts(self) -> int:
        return self.codes.shape[0]

    @property
    def rows(self) -> int:
        return self.codes.shape[1]

    @property
    def has_words(self) -> bool:
        return self.codes.data_ptr() % 2 == 0 and self.codes.storage_offset() % 2 == 0

    def parts(self, schedule: Schedule) -> Iterator[Part]:
        yield Part(slice(0, self.num_experts), self.codes, self.scales, schedule)
