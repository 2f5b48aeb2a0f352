"""The e4m3 quantiser of activation rows, against numbers by hand and the MXFP8 examples."""

from __future__ import annotations

import math

import ml_dtypes
import numpy
import pytest
import torch

from moe_ops.reference.e4m3 import quantize_e4m3, round_e4m3


@pytest.mark.parametrize(
    "amax, scale",
    [(448.0, 1.0), (449.0, 2.0), (1.0, 2.0**-8), (0.875, 2.0**-9), (2.0**-126, 2.0**-126), (3.0e38, 2.0**120)],
)
def test_scales(amax, scale):
    codes, scales = quantize_e4m3(torch.tensor([[amax, -amax / 2, 0.0]]))
    assert scales.tolist() == [scale]
    assert codes.float().abs().max() <= 448


def test_rounding_is_to_nearest_even_as_in_ml_dtypes():
    rows = torch.randn(64, 160, generator=torch.Generator().manual_seed(0)) * torch.logspace(-12, 12, 64).unsqueeze(1)
    codes, scales = quantize_e4m3(rows)
    expected = (rows.double() / scales.double().unsqueeze(1)).numpy().astype(numpy.float32)
    expected = expected.astype(ml_dtypes.float8_e4m3fn).view(numpy.uint8)
    assert numpy.array_equal(codes.view(torch.uint8).numpy(), expected)
    error = (round_e4m3(rows) - rows).norm(dim=1) / rows.norm(dim=1)
    assert error.max() < 0.035


def test_rows_of_zeros_and_rows_that_are_not_finite():
    rows = torch.tensor([[0.0, -0.0], [math.inf, 1.0], [math.nan, 1.0], [1.0, 2.0]])
    _, scales = quantize_e4m3(rows)
    assert scales[0] == 0 and torch.isnan(scales[1:3]).all() and scales[3] == 2.0**-7
    assert torch.equal(round_e4m3(rows)[3], rows[3])
