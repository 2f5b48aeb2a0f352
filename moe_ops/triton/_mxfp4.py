"""MXFP4 codes to numbers inside a kernel, exactly.

A magnitude code of E2M1 shifted to the top of a float's mantissa, with zeros above, is that float's subnormal or small
number times a power of two; two multiplications by powers of two, first by the constant and then by the block's scale,
give the value with no rounding: bfloat16 and float32 have the same exponents, and a code has two significant bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

CODES_PER_SCALE = tl.constexpr(32)
BYTES_PER_SCALE = tl.constexpr(16)
# E2M1 has exponent bias 1, the wider formats 127.
UNBIAS = tl.constexpr(2.0**126)


@triton.jit
def _scale_values(scales, COMPUTE: tl.constexpr):
    """E8M0 bytes to 2^(byte - 127): byte 0 is a subnormal, byte 255 NaN."""
    if COMPUTE == tl.bfloat16:  # noqa: SIM300
        s = scales.to(tl.uint16)
        bits = tl.where(s == 0, 0x40, s << 7).to(tl.uint16)
        value = tl.where(s == 255, 0x7FC0, bits).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        s = scales.to(tl.int32)
        bits = tl.where(s == 0, 0x400000, s << 23)
        value = tl.where(s == 255, 0x7FC00000, bits).to(tl.int32).to(tl.float32, bitcast=True)
    return value


@triton.jit
def decode(codes, scales, ROWS: tl.constexpr, BYTES: tl.constexpr, COMPUTE: tl.constexpr):
    """codes [ROWS, BYTES] and scales [ROWS, BYTES / 16], both uint8, to (low, high) [ROWS, BYTES] of COMPUTE (bfloat16
    or float32): the numbers of the low nibbles, which are the even elements of a row, and those of the high
    nibbles."""
    if COMPUTE == tl.bfloat16:  # noqa: SIM300
        c = codes.to(tl.uint16)
        low = (((c & 0x8) << 12) | ((c & 0x7) << 6)).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        high = (((c & 0x80) << 8) | ((c & 0x70) << 2)).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        c = codes.to(tl.int32)
        low = (((c & 0x8) << 28) | ((c & 0x7) << 22)).to(tl.float32, bitcast=True)
        high = (((c & 0x80) << 24) | ((c & 0x70) << 18)).to(tl.float32, bitcast=True)
    scale = tl.expand_dims(_scale_values(scales, COMPUTE), 2)
    BLOCKS: tl.constexpr = BYTES // BYTES_PER_SCALE
    low = tl.reshape(low * UNBIAS, (ROWS, BLOCKS, BYTES_PER_SCALE)) * scale
    high = tl.reshape(high * UNBIAS, (ROWS, BLOCKS, BYTES_PER_SCALE)) * scale
    return tl.reshape(low, (ROWS, BYTES)), tl.reshape(high, (ROWS, BYTES))


@triton.jit
def even_odd(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS] to its even and its odd columns, which meet the low and the high nibbles."""
    return tl.split(tl.reshape(tile, (ROWS, COLUMNS // 2, 2)))


@triton.jit
def operand(value, dtype: tl.constexpr, TF32: tl.constexpr):
    """float32 to an operand of the next product: `dtype`, or float32 rounded to the 11 bits that tf32 keeps."""
    if TF32:
        bits = value.to(tl.int32, bitcast=True)
        even = (bits + 0xFFF + ((bits >> 13) & 1)) & -0x2000
        result = tl.where(value == value, even.to(tl.float32, bitcast=True), value)
    else:
        result = value.to(dtype)
    return result
