"""The number format against hand-computed values and against an independent decoder (ml_dtypes)."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from moe_ops.reference.mxfp4 import E2M1_VALUES, decode_e8m0, dequantize_mxfp4, quantize_mxfp4, unpack_e2m1
from tests.support import assert_same, generator


def test_nibble_order_low_first():
    assert unpack_e2m1(torch.tensor([0xA7], dtype=torch.uint8)).tolist() == [6.0, -1.0]


def test_all_codes_against_ml_dtypes():
    every = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert list(E2M1_VALUES) == every.tolist()
    assert np.signbit(every).tolist() == [code >= 8 for code in range(16)]  # code 8 is -0


def test_all_scales_against_ml_dtypes():
    every = torch.arange(256, dtype=torch.uint8)
    expected = torch.from_numpy(every.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    assert_same(decode_e8m0(every), expected)


@pytest.mark.parametrize(
    ("byte", "value"), [(0, 2.0**-127), (1, 2.0**-126), (120, 2.0**-7), (127, 1.0), (128, 2.0), (134, 128.0)]
)
def test_scale_values(byte: int, value: float):
    assert decode_e8m0(torch.tensor([byte], dtype=torch.uint8)).item() == value


def test_scale_254_and_255():
    values = decode_e8m0(torch.tensor([254, 255], dtype=torch.uint8))
    assert values[0].item() == 2.0**127
    assert torch.isnan(values[1])


def test_every_code_times_every_scale_is_the_float32_of_the_exact_product():
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)[None]  # one block of 32 codes, each twice
    packed = (codes[:, 0::2] | (codes[:, 1::2] << 4)).expand(256, 16).contiguous()
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    actual = dequantize_mxfp4(packed, scales)
    values = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    powers = np.array([2.0 ** (s - 127) if s < 255 else np.nan for s in range(256)])
    with np.errstate(over="ignore"):
        expected = torch.from_numpy((powers[:, None] * np.tile(values, 2)).astype(np.float32))
    assert_same(actual, expected)


def test_quantize_by_hand():
    block = torch.zeros(32)
    block[:9] = torch.tensor([6.0, -6.0, 0.25, 0.75, 1.25, 2.5, 5.0, -0.26, 3.6])  # amax 6: scale 2^0
    codes, scales = quantize_mxfp4(block)
    assert scales.tolist() == [127]
    assert dequantize_mxfp4(codes, scales)[:9].tolist() == [6.0, -6.0, 0.0, 1.0, 1.0, 2.0, 4.0, -0.5, 4.0]


def test_quantize_saturates_between_the_largest_value_and_the_next_scale():
    block = torch.zeros(32)
    block[0] = 7.9  # floor(log2(7.9)) = 2: scale 2^0, element saturates at 6
    codes, scales = quantize_mxfp4(block)
    assert scales.tolist() == [127]
    assert dequantize_mxfp4(codes, scales)[0].item() == 6.0


def test_quantize_keeps_what_is_representable():
    g = generator(3)
    codes = torch.randint(0, 256, (64, 16), generator=g, dtype=torch.uint8)
    codes[:, 0] = 0x77  # each block holds a 6, so that its scale is determined
    scales = torch.randint(3, 254, (64, 1), generator=g).to(torch.uint8)
    values = dequantize_mxfp4(codes, scales)
    again = dequantize_mxfp4(*quantize_mxfp4(values))
    assert_same(again, values)


def test_quantize_edges():
    blocks = torch.zeros(4, 32)
    blocks[1, 5] = float("nan")
    blocks[2, 5] = float("-inf")
    blocks[3, 5] = 2.0**-140  # below the smallest scale
    codes, scales = quantize_mxfp4(blocks)
    assert scales[:, 0].tolist() == [0, 255, 255, 0]
    values = dequantize_mxfp4(codes, scales)
    assert values[0].tolist() == [0.0] * 32
    assert torch.isnan(values[1]).all() and torch.isnan(values[2]).all()
    assert values[3, 5].item() == 0.0


def test_quantize_refuses_partial_blocks():
    with pytest.raises(ValueError, match="multiple of 32 wide, got 48"):
        quantize_mxfp4(torch.zeros(2, 48))
