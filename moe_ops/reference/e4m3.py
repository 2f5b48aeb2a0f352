"""e4m3 activations: rows rounded to float8_e4m3fn under one scale each.

The scale of a row is 2^ceil(log2(amax / 448)), the least power of two under which nothing is above 448, e4m3's largest
number: the scale of MXFP8 quantisers (OCP Microscaling Formats specification 1.0), with a row for its block. A power of
two costs no accuracy in a floating-point format, and dividing by it is exact. The exponent is at least -126; a row of
zeros has scale 0, a row that is not finite scale NaN. Elements are rounded to nearest, ties to even.
"""

from __future__ import annotations

import torch

E4M3_MAX = 448.0
LEAST_EXPONENT = -126


def quantize_e4m3(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., n] of any float dtype -> (float8_e4m3fn [..., n], scales [...] float32)."""
    values = rows.to(torch.float64)
    amax = values.abs().amax(dim=-1)
    finite = torch.isfinite(amax)
    # amax / 448 = m * 2^exponent with m in [0.5, 1): its ceil(log2) is exponent, or one less where m is 0.5.
    mantissa, exponent = torch.frexp(torch.where(finite, amax, 1.0) / E4M3_MAX)
    exponent = (exponent - (mantissa == 0.5).to(exponent.dtype)).clamp(min=LEAST_EXPONENT)
    codes = torch.ldexp(values, -exponent.unsqueeze(-1)).to(torch.float32).to(torch.float8_e4m3fn)
    scales = torch.ldexp(torch.ones_like(amax), exponent).to(torch.float32)
    scales = torch.where(amax == 0, 0.0, scales)
    return codes, torch.where(finite, scales, float("nan"))


def round_e4m3(rows: torch.Tensor) -> torch.Tensor:
    """float32 rows with the values that they have as e4m3 activations."""
    codes, scales = quantize_e4m3(rows)
    return codes.to(torch.float32) * scales.unsqueeze(-1)
