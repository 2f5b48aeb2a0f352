"""MXFP4 weights to values, exactly, by one gather from a table.

The table is indexed by (scale byte, code byte) and holds the two values that the byte stands for. No float is
computed: the table is built from bit patterns, so that every scale is exact, subnormals (scale byte 0), the largest
exponents (254) and NaN (255) included, whether or not the vector unit flushes subnormals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moe_ops.meta.fused_mxfp4_moe import BLOCK
from moe_ops.npu._device import is_capturing, on_device, runtime

_BYTES = 256
_CODES = 16
_NAN, _INF = 0x7FC00000, 0x7F800000
_EXPONENT, _HALF = 1 << 23, 1 << 22  # one step of the exponent, and half the mantissa, of a float32
_MAX_EXPONENT = 255
_NAN_SCALE = 255


@dataclass
class _Table:
    values: torch.Tensor
    built: Any  # the event behind its construction, None once it has passed


# Kept for ever, except that a table built inside a capture has no values before the replay.
_tables: dict[tuple[torch.device, torch.dtype], _Table] = {}


def value_bits(device: torch.device | str) -> torch.Tensor:
    """[256, 16] int32: float32 bit patterns of code * 2^(scale - 127)."""
    scale = torch.arange(_BYTES, dtype=torch.int32, device=device).view(_BYTES, 1)
    code = torch.arange(_CODES, dtype=torch.int32, device=device).view(1, _CODES)
    magnitude = code % 8  # 0, 0.5, 1, 1.5, 2, 3, 4, 6
    exponent = scale + magnitude // 2 - 1
    half = (magnitude % 2) * (magnitude > 1).to(torch.int32)  # the mantissa is 1 or 1.5
    normal = exponent * _EXPONENT + half * _HALF
    # Below 2^-126 the leading 1 stands in the mantissa, a step lower for each exponent missing.
    subnormal = torch.where(exponent == 0, _HALF + half * (_HALF // 2), torch.full_like(normal, _HALF // 2))
    bits = torch.where(exponent > 0, normal, subnormal)
    bits = torch.where(exponent >= _MAX_EXPONENT, torch.full_like(bits, _INF), bits)
    bits = torch.where(magnitude == 0, torch.zeros_like(bits), bits)
    bits = bits + torch.where(code < _CODES // 2, torch.zeros_like(bits), torch.full_like(bits, -(2**31)))
    return torch.where(scale == _NAN_SCALE, torch.full_like(bits, _NAN), bits)


def _build_table(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """[65536, 2] dtype, row = scale byte * 256 + code byte; low nibble first."""
    bits = value_bits(device)
    shape = (_BYTES, _CODES, _CODES)  # scale, high nibble, low nibble
    low, high = bits.view(_BYTES, 1, _CODES).expand(shape), bits.view(_BYTES, _CODES, 1).expand(shape)
    pairs = torch.stack([low, high], dim=-1).view(-1, 2)
    if dtype == torch.float32:
        return pairs.view(torch.float32)
    # One mantissa bit: the upper half of the float32 is the bfloat16, without rounding.
    return torch.div(pairs, 1 << 16, rounding_mode="floor").to(torch.int16).view(torch.bfloat16)


def table(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The table, ready on the current stream; it may have been built on another."""
    with on_device(device):
        found = _tables.get((device, dtype))
        if found is None:
            values = _build_table(device, dtype)
            if not is_capturing():
                event = runtime().Event()
                event.record()
                _tables[device, dtype] = _Table(values, event)
            return values
        built = found.built
        if built is not None:
            if built.query():
                found.built = None
            elif is_capturing():  # a capture cannot wait for an event from outside
                return _build_table(device, dtype)
            else:
                built.wait()
        return found.values


def dequantize(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., n / 2] and [..., n / 32] uint8 to [..., n] float32 or bfloat16, exact in both."""
    blocks = codes.to(torch.int32).unflatten(-1, (-1, BLOCK // 2))  # [..., n / 32, 16]
    index = blocks + (scales.to(torch.int32) * _BYTES).unsqueeze(-1)
    pairs = table(codes.device, dtype).index_select(0, index.flatten())
    return pairs.view(*codes.shape[:-1], codes.shape[-1] * 2)


@dataclass(frozen=True)
class Matrix:
    """One of the two weight matrices of all experts, [E, rows, columns], kept as MXFP4 or as bfloat16."""

    codes: torch.Tensor
    scales: torch.Tensor | None  # None: `codes` are bfloat16 values

    def block(
        self, experts: torch.Tensor | None, rows: tuple[slice, ...], columns: slice, dtype: torch.dtype
    ) -> torch.Tensor:
        """[experts, rows, columns] `dtype`: what one product needs, and no more. `columns`: whole MXFP4 blocks."""
        if self.scales is None:
            return take(self.codes, experts, rows, columns).to(dtype)
        start, stop = columns.start, columns.stop
        codes = take(self.codes, experts, rows, slice(start // 2, stop // 2))
        scales = take(self.scales, experts, rows, slice(start // BLOCK, stop // BLOCK))
        return dequantize(codes, scales, dtype)


def take(
    tensor: torch.Tensor, experts: torch.Tensor | None, rows: tuple[slice, ...], columns: slice | None = None
) -> torch.Tensor:
    """tensor[experts, rows, columns]; several slices of rows are concatenated. A view where nothing is to be moved."""
    parts = [tensor[:, part] if columns is None else tensor[:, part, columns] for part in rows]
    if experts is not None:
        parts = [part.index_select(0, experts) for part in parts]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def gate_up_rows(w13_layout: str, size: int, start: int, stop: int) -> tuple[slice, ...]:
    """Rows of w13 that give [gate; up] of the intermediate columns start to stop."""
    if w13_layout == "interleaved":
        return slice(2 * start, 2 * stop, 2), slice(2 * start + 1, 2 * stop, 2)
    gate, up = (0, size) if w13_layout == "gate_up" else (size, 0)
    if w13_layout == "gate_up" and (start, stop) == (0, size):
        return (slice(0, 2 * size),)
    return slice(gate + start, gate + stop), slice(up + start, up + stop)
