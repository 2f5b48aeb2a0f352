"""The packed weight layout of the Hopper kernels, "sm90_v1": the checkpoint's bytes in another order, none added.

A strip is 16 rows of a matrix over all of k, contiguous in memory. Strip s of w13 holds the gate rows 8s to 8s + 7 and
then the up rows 8s to 8s + 7, whatever the checkpoint's row order; strip s of w2 holds rows 16s to 16s + 15.

Codes of a strip: one 1024-byte block per 128 k, then, where k is not a multiple of 128, a partial block of `words` = 1
to 3 groups of 32 k. A block is [row half 2][lane 32][group 4] words of 4 bytes, a partial one [row half][group][lane]:
lane 4g + t holds row g (+ 8 in the second half), and of each group of 32 k the elements 8i + 2t and 8i + 2t + 1,
i = 0 to 3, which are its part of two m16n8k16 fragments. Of a word, the lower 16 bits hold the even elements, the upper
16 bits the odd ones, each as four codes in the order of `_BIT`: the magnitudes lie so that left shifts
by 0, 3, 6 and 9 bring them to the exponent and mantissa of an fp16, whose value is then the code's times 2^-14.

Scales of a strip: per block [row 8][group 4][row half 2] bytes, with `words` groups in the partial block.
"""

from __future__ import annotations

import torch

STRIP = 16  # rows
BLOCK = 128  # elements of k
GROUP = 32  # elements of k that share a scale

# Where bits 0 to 3 of code i of a 16-bit half go (bit 3 is the sign).
_BIT = ((9, 10, 11, 15), (6, 7, 8, 12), (3, 4, 5, 14), (0, 1, 2, 13))


def _pack16(codes: torch.Tensor) -> torch.Tensor:
    """[..., 4] codes -> [...] 16-bit values in int32."""
    codes = codes.to(torch.int32)
    out = torch.zeros(codes.shape[:-1], dtype=torch.int32, device=codes.device)
    for i, bits in enumerate(_BIT):
        for b, to in enumerate(bits):
            out |= ((codes[..., i] >> b) & 1) << to
    return out


def _unpack16(packed: torch.Tensor) -> torch.Tensor:
    out = torch.zeros((*packed.shape, 4), dtype=torch.uint8, device=packed.device)
    for i, bits in enumerate(_BIT):
        for b, to in enumerate(bits):
            out[..., i] |= (((packed >> to) & 1) << b).to(torch.uint8)
    return out


def w13_row_order(intermediate_size: int, w13_layout: str, device: torch.device | str = "cpu") -> torch.Tensor:
    """order[r] = the checkpoint's row that packed row r holds."""
    column = torch.arange(intermediate_size, device=device).view(-1, 8)
    if w13_layout == "interleaved":
        gate, up = 2 * column, 2 * column + 1
    elif w13_layout == "gate_up":
        gate, up = column, column + intermediate_size
    else:
        gate, up = column + intermediate_size, column
    return torch.cat([gate, up], dim=1).reshape(-1)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """[rows, k / 2] checkpoint bytes, rows already in packed order -> [rows / 16, 8 * k] bytes."""
    rows, half = codes.shape
    k = 2 * half
    strips, full, words = rows // STRIP, k // BLOCK, k % BLOCK // GROUP
    elements = torch.stack([codes & 15, codes >> 4], dim=-1).view(strips, 2, 8, k // GROUP, 4, 4, 2)
    # [strip, half, g, group, i, t, odd] -> [strip, half, g, group, t, odd, i]
    values = _pack16(elements.permute(0, 1, 2, 3, 5, 6, 4))
    packed = torch.stack([values & 255, values >> 8], dim=-1).to(torch.uint8)  # [strip, half, g, group, t, odd, byte]
    body = packed[:, :, :, : 4 * full].reshape(strips, 2, 8, full, 4, 4, 4)
    parts = [body.permute(0, 3, 1, 2, 5, 4, 6).reshape(strips, -1)]  # [strip, block, half, g, t, group, 4 bytes]
    if words:
        tail = packed[:, :, :, 4 * full :].reshape(strips, 2, 8, words, 4, 4)
        parts.append(tail.permute(0, 1, 3, 2, 4, 5).reshape(strips, -1))  # [strip, half, group, g, t, 4 bytes]
    return torch.cat(parts, dim=1)


def unpack_codes(packed: torch.Tensor, k: int) -> torch.Tensor:
    """The inverse of pack_codes."""
    strips = packed.shape[0]
    full, words = k // BLOCK, k % BLOCK // GROUP
    body = packed[:, : full * 1024].reshape(strips, full, 2, 8, 4, 4, 4).permute(0, 2, 3, 1, 5, 4, 6)
    groups = [body.reshape(strips, 2, 8, 4 * full, 4, 4)]
    if words:
        groups.append(packed[:, full * 1024 :].reshape(strips, 2, words, 8, 4, 4).permute(0, 1, 3, 2, 4, 5))
    both = torch.cat(groups, dim=3).reshape(strips, 2, 8, k // GROUP, 4, 2, 2).to(torch.int32)
    elements = _unpack16(both[..., 0] | both[..., 1] << 8)  # [strip, half, g, group, t, odd, i]
    nibbles = elements.permute(0, 1, 2, 3, 6, 4, 5).reshape(strips * STRIP, k // 2, 2)
    return nibbles[..., 0] | nibbles[..., 1] << 4


def pack_scales(scales: torch.Tensor) -> torch.Tensor:
    """[rows, k / 32] checkpoint bytes, rows already in packed order -> [rows / 16, k / 2] bytes."""
    rows, groups = scales.shape
    strips, full, words = rows // STRIP, groups // 4, groups % 4
    halves = scales.view(strips, 2, 8, groups)
    parts = [halves[..., : 4 * full].reshape(strips, 2, 8, full, 4).permute(0, 3, 2, 4, 1).reshape(strips, -1)]
    if words:
        parts.append(halves[..., 4 * full :].permute(0, 2, 3, 1).reshape(strips, -1))
    return torch.cat(parts, dim=1)


def unpack_scales(packed: torch.Tensor, k: int) -> torch.Tensor:
    """The inverse of pack_scales."""
    strips, groups = packed.shape[0], k // GROUP
    full, words = groups // 4, groups % 4
    parts = [packed[:, : full * 64].reshape(strips, full, 8, 4, 2).permute(0, 4, 2, 1, 3).reshape(strips, 2, 8, -1)]
    if words:
        parts.append(packed[:, full * 64 :].reshape(strips, 8, words, 2).permute(0, 3, 1, 2))
    return torch.cat(parts, dim=3).reshape(strips * STRIP, groups)
