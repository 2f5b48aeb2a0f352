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


# Four bytes of codes and four times their block's scale to four low and four high numbers, two to a register: 3.5
# instructions a number, where element-wise code takes 13. A number is sign and magnitude moved to their places in
# bfloat16, times 2^126 and the scale; the sum with -0 is what sm_80 has for a product.
_DECODE_BFLOAT16 = tl.constexpr("""
{
    .reg .b32 bytes, sign, unbias, zero;
    mov.b32 unbias, 0x7E807E80;
    mov.b32 zero, 0x80008000;
    prmt.b32 bytes, $4, 0, 0x4140;
    shl.b32 $0, bytes, 6;
    and.b32 $0, $0, 0x01C001C0;
    shl.b32 sign, bytes, 12;
    lop3.b32 $0, sign, 0x80008000, $0, 0xEA;
    fma.rn.bf16x2 $0, $0, unbias, zero;
    fma.rn.bf16x2 $0, $0, $5, zero;
    shl.b32 $2, bytes, 2;
    and.b32 $2, $2, 0x01C001C0;
    shl.b32 sign, bytes, 8;
    lop3.b32 $2, sign, 0x80008000, $2, 0xEA;
    fma.rn.bf16x2 $2, $2, unbias, zero;
    fma.rn.bf16x2 $2, $2, $5, zero;
    prmt.b32 bytes, $4, 0, 0x4342;
    shl.b32 $1, bytes, 6;
    and.b32 $1, $1, 0x01C001C0;
    shl.b32 sign, bytes, 12;
    lop3.b32 $1, sign, 0x80008000, $1, 0xEA;
    fma.rn.bf16x2 $1, $1, unbias, zero;
    fma.rn.bf16x2 $1, $1, $6, zero;
    shl.b32 $3, bytes, 2;
    and.b32 $3, $3, 0x01C001C0;
    shl.b32 sign, bytes, 8;
    lop3.b32 $3, sign, 0x80008000, $3, 0xEA;
    fma.rn.bf16x2 $3, $3, unbias, zero;
    fma.rn.bf16x2 $3, $3, $6, zero;
}
""")


@triton.jit
def decode(codes, scales, ROWS: tl.constexpr, BYTES: tl.constexpr, COMPUTE: tl.constexpr):
    """codes [ROWS, BYTES] and scales [ROWS, BYTES / 16], both uint8, to (low, high) [ROWS, BYTES] of COMPUTE (bfloat16
    or float32): the numbers of the low nibbles, which are the even elements of a row, and those of the high
    nibbles."""
    BLOCKS: tl.constexpr = BYTES // BYTES_PER_SCALE
    scale = tl.expand_dims(_scale_values(scales, COMPUTE), 2)
    codes = tl.reshape(codes, (ROWS, BLOCKS, BYTES_PER_SCALE))
    if COMPUTE == tl.bfloat16:  # noqa: SIM300
        low, high = tl.inline_asm_elementwise(
            _DECODE_BFLOAT16,
            "=&r,=&r,=&r,=&r,r,r,r",
            [codes, scale],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        c = codes.to(tl.int32)
        low = (((c & 0x8) << 28) | ((c & 0x7) << 22)).to(tl.float32, bitcast=True) * UNBIAS * scale
        high = (((c & 0x80) << 24) | ((c & 0x70) << 18)).to(tl.float32, bitcast=True) * UNBIAS * scale
    return tl.reshape(low, (ROWS, BYTES)), tl.reshape(high, (ROWS, BYTES))


def _words_to_bfloat16(steps: int) -> str:
    """Two words of four codes, one in each half, to two of each of the four numbers. $5: their block's scale in both
    halves, times 2^126 where that is not a step of its own."""
    lines = [".reg .b32 sign, unbias, zero;", "mov.b32 unbias, 0x7E807E80;", "mov.b32 zero, 0x80008000;"]
    for number in range(4):
        shift = 6 - 4 * number  # of the magnitude
        lines.append(f"{'shl' if shift > 0 else 'shr'}.b32 ${number}, $4, {abs(shift)};")
        lines.append(f"and.b32 ${number}, ${number}, 0x01C001C0;")
        lines.append(f"shl.b32 sign, $4, {12 - 4 * number};")
        lines.append(f"lop3.b32 ${number}, sign, 0x80008000, ${number}, 0xEA;")
        for factor in ["$5"] if steps == 1 else ["unbias", "$5"]:
            lines.append(f"fma.rn.bf16x2 ${number}, ${number}, {factor}, zero;")
    return "{" + " ".join(lines) + "}"


_WORDS_IN_ONE_STEP = tl.constexpr(_words_to_bfloat16(1))
_WORDS_IN_TWO_STEPS = tl.constexpr(_words_to_bfloat16(2))


@triton.jit
def _number_of_words(words, scale, NUMBER: tl.constexpr):
    code = words >> (4 * NUMBER)
    return (((code & 0x8) << 28) | ((code & 0x7) << 22)).to(tl.float32, bitcast=True) * UNBIAS * scale


@triton.jit
def decode_words(words, scales, ROWS: tl.constexpr, WORDS: tl.constexpr, COMPUTE: tl.constexpr, EXACT: tl.constexpr):
    """words [ROWS, WORDS] of four codes, 16 bits, and scales [ROWS, WORDS / 8], uint8, to four times [ROWS, WORDS] of
    COMPUTE: the first numbers of all words, the second ones, and so on. Not EXACT: for scale codes up to 128."""
    shape: tl.constexpr = (ROWS, WORDS)
    words = tl.reshape(words, (ROWS, WORDS // 8, 8))
    if COMPUTE == tl.bfloat16:  # noqa: SIM300
        if EXACT:
            bits = _scale_values(scales, tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32)
            scale = bits * 0x10001
        else:
            scale = (scales.to(tl.int32) + 126) * 0x800080
        first, second, third, fourth = tl.inline_asm_elementwise(
            _WORDS_IN_TWO_STEPS if EXACT else _WORDS_IN_ONE_STEP,
            "=&r,=&r,=&r,=&r,r,r,r",
            [words, tl.expand_dims(scale, 2)],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        value = _scale_values(scales, tl.float32)
        if not EXACT:
            value = tl.where(scales > 128, float("nan"), value)
        scale = tl.expand_dims(value, 2)
        words = words.to(tl.int32)
        first = _number_of_words(words, scale, 0)
        second = _number_of_words(words, scale, 1)
        third = _number_of_words(words, scale, 2)
        fourth = _number_of_words(words, scale, 3)
    return tl.reshape(first, shape), tl.reshape(second, shape), tl.reshape(third, shape), tl.reshape(fourth, shape)


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
