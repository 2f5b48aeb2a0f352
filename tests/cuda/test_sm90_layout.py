"""The packed layout of the Hopper kernels, on any device: word by word as the kernel reads it, and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_ops.cuda.layout import pack_codes, pack_scales, unpack_codes, unpack_scales, w13_row_order
from moe_ops.cuda.prepare import ALL_SCALES, LAYOUT, layout_for, prepare_sm90, scales_outside
from moe_ops.meta.fused_mxfp4_moe import PREPARED_LAYOUTS
from moe_ops.reference.mxfp4 import dequantize_mxfp4

SIZES = [32, 64, 96, 128, 160, 288, 576]


def checkpoint(rows: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, generator=generator)
    return codes, torch.randint(1, 129, (rows, k // 32), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("k", SIZES)
def test_packing_is_a_permutation_of_the_bytes_and_has_an_inverse(k):
    codes, scales = checkpoint(48, k)
    packed, packed_scales = pack_codes(codes), pack_scales(scales)
    assert packed.shape == (3, 8 * k) and packed_scales.shape == (3, k // 2)
    assert torch.equal(unpack_codes(packed, k), codes)
    assert torch.equal(unpack_scales(packed_scales, k), scales)
    assert not torch.equal(packed.flatten(), codes.flatten())


def kernel_words(word: int) -> list[tuple[float, float]]:
    """The four fp16 pairs that the kernel's masks and shifts make of a word."""
    both, magnitude, sign = 0x8E008E00, 0x0E000E00, 0x80008000
    words = [
        word & both,
        (word << 3) & 0xFFFFFFFF & both,
        ((word << 6) & magnitude) | ((word << 1) & sign),
        ((word << 9) & magnitude) | ((word << 2) & sign),
    ]
    halves = np.array([[w & 0xFFFF, w >> 16 & 0xFFFF] for w in words], dtype=np.uint16).view(np.float16)
    return [(float(low), float(high)) for low, high in halves]


@pytest.mark.parametrize("k", [32, 96, 128, 192])
def test_every_lane_finds_its_fragments(k):
    codes, scales = checkpoint(16, k, seed=1)
    packed, packed_scales = pack_codes(codes)[0].numpy().tobytes(), pack_scales(scales)[0].numpy().tobytes()
    expected = dequantize_mxfp4(codes, torch.full_like(scales, 127)).numpy()
    found = np.full((16, k), np.nan, dtype=np.float32)
    full, words = k // 128, k % 128 // 32
    for block in range(full + (words > 0)):
        for lane in range(32):
            g, t = lane // 4, lane % 4
            for half in range(2):
                for group in range(4 if block < full else words):
                    if block < full:
                        at, scale_at = block * 1024 + half * 512 + lane * 16 + 4 * group, block * 64 + g * 8
                    else:
                        at, scale_at = full * 1024 + (half * words + group) * 128 + lane * 4, full * 64 + g * 2 * words
                    assert packed_scales[scale_at + 2 * group + half] == scales[half * 8 + g, block * 4 + group]
                    for i, pair in enumerate(kernel_words(int.from_bytes(packed[at : at + 4], "little"))):
                        first = block * 128 + group * 32 + 8 * i + 2 * t
                        found[half * 8 + g, first : first + 2] = np.array(pair) * 2.0**14
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("layout", ["gate_up", "up_gate", "interleaved"])
def test_rows_of_a_strip_are_gate_and_up_of_the_same_columns(layout):
    order = w13_row_order(32, layout).view(4, 2, 8)
    names = {
        "gate_up": lambda c, up: c + 32 * up,
        "up_gate": lambda c, up: c + 32 * (1 - up),
        "interleaved": lambda c, up: 2 * c + up,
    }
    for strip in range(4):
        for up in range(2):
            assert order[strip, up].tolist() == [names[layout](8 * strip + c, up) for c in range(8)]


def experts(num_experts: int = 3, hidden: int = 96, intermediate: int = 64) -> list[torch.Tensor]:
    w13 = [checkpoint(2 * intermediate, hidden, seed) for seed in range(num_experts)]
    w2 = [checkpoint(hidden, intermediate, 100 + seed) for seed in range(num_experts)]
    return [torch.stack([pair[i] for pair in pairs]) for pairs in (w13, w2) for i in range(2)]


def test_prepare_packs_in_place():
    raw = experts()
    kept = [tensor.clone() for tensor in raw]
    packed = prepare_sm90(*raw, w13_layout="up_gate")
    for before, after, original in zip(raw, packed, kept, strict=True):
        assert after.dim() == 4 and after.data_ptr() == before.data_ptr() and after.numel() == original.numel()
    order = w13_row_order(64, "up_gate")
    for expert in range(3):
        assert torch.equal(unpack_codes(packed[0][expert].flatten(1), 96), kept[0][expert][order])
        assert torch.equal(unpack_scales(packed[1][expert].flatten(1), 96), kept[1][expert][order])
        assert torch.equal(unpack_codes(packed[2][expert].flatten(1), 64), kept[2][expert])
        assert torch.equal(unpack_scales(packed[3][expert].flatten(1), 64), kept[3][expert])
    assert PREPARED_LAYOUTS[LAYOUT].geometry("op", 96, *packed) == (3, 64)


def test_prepare_refuses_prepared_weights_and_scales_that_the_kernels_do_not_hold():
    packed = prepare_sm90(*experts(), w13_layout="gate_up")
    with pytest.raises(ValueError, match="w13 must be a checkpoint tensor of 3 dimensions, not prepared before"):
        prepare_sm90(*packed, w13_layout="gate_up")
    for code in (0, 129, 255):
        raw = experts()
        raw[3][1, 5, 1] = code
        kept = [tensor.clone() for tensor in raw]
        assert scales_outside(raw[2], raw[3]) == 1 and scales_outside(raw[0], raw[1]) == 0
        assert layout_for(*raw) == ALL_SCALES
        with pytest.raises(ValueError, match="w2_scale must be of codes 1 to 128, got 1 codes outside"):
            prepare_sm90(*raw, w13_layout="gate_up")
        assert all(torch.equal(a, b) for a, b in zip(raw, kept, strict=True))


def test_all_scales_are_packed_where_the_layout_says_so():
    raw = experts()
    raw[1][0, 3, 1], raw[3][2, 17, 0] = 255, 0
    kept = [tensor.clone() for tensor in raw]
    packed = prepare_sm90(*raw, w13_layout="gate_up", weight_layout=ALL_SCALES)
    order = w13_row_order(64, "gate_up")
    for expert in range(3):
        assert torch.equal(unpack_scales(packed[1][expert].flatten(1), 96), kept[1][expert][order])
        assert torch.equal(unpack_scales(packed[3][expert].flatten(1), 64), kept[3][expert])
    assert PREPARED_LAYOUTS[ALL_SCALES].geometry("op", 96, *packed) == (3, 64)
    with pytest.raises(
        ValueError, match="weight_layout must be 'sm90_v1', 'sm90_v1_all_scales' or 'sm90_v1_e4m3', got 'x86_v1'"
    ):
        prepare_sm90(*experts(), w13_layout="gate_up", weight_layout="x86_v1")


def test_blocks_of_zeros_get_a_scale_that_the_layout_has():
    raw = experts()
    for codes, scale in ((raw[0], raw[1]), (raw[2], raw[3])):
        codes.view(*scale.shape, 16)[1, 5, 1] = torch.tensor([0x00, 0x88] * 8, dtype=torch.uint8)  # zeros of both signs
        scale[1, 5, 1] = 0
    kept = [tensor.clone() for tensor in raw]
    assert layout_for(*raw) == LAYOUT
    packed = prepare_sm90(*raw, w13_layout="gate_up")
    for i, k in ((0, 96), (2, 64)):
        codes, scale = (packed[i + j][1].flatten(1) for j in range(2))
        row = 5 if i else w13_row_order(64, "gate_up").tolist().index(5)
        found = dequantize_mxfp4(unpack_codes(codes, k), unpack_scales(scale, k))[row]
        expected = dequantize_mxfp4(kept[i][1], kept[i + 1][1])[5]
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    raw = experts()
    raw[2].view(*raw[3].shape, 16)[1, 5, 1] = 0
    raw[3][1, 5, 1] = 255  # NaN, also of zeros
    assert layout_for(*raw) == ALL_SCALES
