"""MXFP4: blocks of 32 E2M1 codes with one E8M0 scale (OCP Microscaling Formats specification 1.0).

Two codes share a byte, the element of even index in the low nibble. A scale byte s stands for 2^(s - 127); 255 is NaN
and 0 is 2^-127, a subnormal float32. The value of a weight is float32(code * 2^(s - 127)).
"""

from __future__ import annotations

import torch

BLOCK = 32
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E8M0_BIAS = 127
E8M0_NAN = 255
E2M1_MAX_EXPONENT = 2  # 6 = 1.5 * 2^2


def decode_e8m0(scales: torch.Tensor) -> torch.Tensor:
    """uint8 scale bytes to their float32 values."""
    exponents = scales.to(torch.int32)
    bits = torch.where(exponents == 0, 1 << 22, exponents << 23)  # 2^-127 is the subnormal with the top mantissa bit
    bits = torch.where(exponents == E8M0_NAN, 0x7FC00000, bits)
    return bits.to(torch.int32).view(torch.float32)


def unpack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n] to the float32 values [..., 2 * n] of its codes, low nibble first."""
    table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=codes.device)
    nibbles = torch.stack((codes & 0xF, codes >> 4), dim=-1)  # [..., n, 2]
    return table[nibbles.to(torch.int64)].flatten(-2)


def dequantize_mxfp4(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of MXFP4 weights.

    codes:  [..., n / 2] uint8.
    scales: [..., n / 32] uint8.
    Returns [..., n] `dtype`; exact in float32.
    """
    values = unpack_e2m1(codes).unflatten(-1, (-1, BLOCK))
    # 6 * 2^-127 is exact in float32 only if the product is formed in a type that keeps subnormals.
    exact = values.to(torch.float64) * decode_e8m0(scales).to(torch.float64).unsqueeze(-1)
    return exact.to(torch.float32).flatten(-2).to(dtype)


def _encode(blocks: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes of float64 [..., 32] under scale bytes [...]: nearest value, ties to the even code, saturating at 6."""
    scaled = torch.ldexp(blocks.abs(), (E8M0_BIAS - scale).unsqueeze(-1))
    # Midpoints between neighbouring magnitudes; at a tie the even code is the lower one for codes 0, 2, 4 and 6.
    code = torch.zeros(scaled.shape, dtype=torch.uint8, device=blocks.device)
    for lower, midpoint in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        above = scaled > midpoint if lower % 2 == 0 else scaled >= midpoint
        code = code + above.to(torch.uint8)
    return code | (torch.signbit(blocks).to(torch.uint8) << 3)


def _squared_error(blocks: torch.Tensor, code: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    table = torch.tensor(E2M1_VALUES, dtype=torch.float64, device=blocks.device)
    decoded = torch.ldexp(table[code.to(torch.int64)], (scale - E8M0_BIAS).unsqueeze(-1))
    return (decoded - blocks).square().sum(dim=-1)


QUANTIZED_AT_ONCE = 1 << 17  # elements


def quantize_mxfp4(values: torch.Tensor, *, search: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise along the last dimension, whose length is a multiple of 32.

    The scale of a block is 2^(floor(log2(amax)) - 2), as in section 6.3 of the OCP specification, clamped to the E8M0
    range; elements are rounded to the nearest E2M1 value, ties to the even code, and saturate at 6. A block that holds
    a NaN or an infinity gets scale byte 255.

    values: [..., n] float.
    search: take twice that scale for the blocks where it gives the smaller squared error (those whose largest element
            would saturate far above 6); about a tenth less squared error on Gaussian weights.
    Returns (codes [..., n / 2] uint8, scales [..., n / 32] uint8).
    """
    if values.shape[-1] % BLOCK:
        raise ValueError(f"quantize_mxfp4: values must be a multiple of {BLOCK} wide, got {values.shape[-1]}")
    width = values.shape[-1]
    rows = values.reshape(values.shape[:-1].numel(), width)
    codes = torch.empty(len(rows), width // 2, dtype=torch.uint8, device=values.device)
    scales = torch.empty(len(rows), width // BLOCK, dtype=torch.uint8, device=values.device)
    # Float64 copies of a few rows, not of an expert.
    at_once = max(1, QUANTIZED_AT_ONCE // max(1, width))
    for first in range(0, len(rows), at_once):
        part = slice(first, first + at_once)
        codes[part], scales[part] = _quantize_rows(rows[part], search)
    return codes.view(*values.shape[:-1], width // 2), scales.view(*values.shape[:-1], width // BLOCK)


def _quantize_rows(values: torch.Tensor, search: bool) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = values.to(torch.float64).unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(dim=-1)
    finite = torch.isfinite(amax)
    _, exponent = torch.frexp(torch.where(finite, amax, torch.ones_like(amax)))  # amax = m * 2^exponent, m in [0.5, 1)
    scale = (exponent.to(torch.int32) - 1 - E2M1_MAX_EXPONENT + E8M0_BIAS).clamp(0, E8M0_NAN - 1)
    scale = torch.where(amax == 0, torch.zeros_like(scale), scale)
    code = _encode(blocks, scale)
    if search:
        doubled = (scale + 1).clamp(max=E8M0_NAN - 1)
        coarser = _encode(blocks, doubled)
        better = _squared_error(blocks, coarser, doubled) < _squared_error(blocks, code, scale)
        code = torch.where(better.unsqueeze(-1), coarser, code)
        scale = torch.where(better, doubled, scale)
    code = torch.where(finite.unsqueeze(-1), code, torch.zeros_like(code)).flatten(-2)
    packed = code[..., 0::2] | (code[..., 1::2] << 4)
    scales = torch.where(finite, scale, torch.full_like(scale, E8M0_NAN)).to(torch.uint8)
    return packed, scales
