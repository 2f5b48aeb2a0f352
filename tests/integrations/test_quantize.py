"""Quantisation with calibration inputs: loses less of the output than rounding to nearest, keeps what it can keep."""

from __future__ import annotations

import pytest
import torch

from moe_ops.integrations.quantize import quantize_for_inputs
from moe_ops.reference.mxfp4 import dequantize_mxfp4, quantize_mxfp4


def correlated(tokens: int, columns: int, seed: int) -> torch.Tensor:
    """Inputs as layers have them: a few directions carry most of the variance."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(8, columns, generator=torch.Generator().manual_seed(99))
    return torch.randn(tokens, 8, generator=generator) @ basis + 0.3 * torch.randn(tokens, columns, generator=generator)


@pytest.mark.parametrize("shared", [True, False])
def test_output_error_on_inputs_it_has_not_seen(shared: bool) -> None:
    weights = torch.randn(2, 40, 96, generator=torch.Generator().manual_seed(1))
    inputs = correlated(400, 96, 2) if shared else torch.stack((correlated(400, 96, 2), correlated(400, 96, 3)))
    codes, scales = quantize_for_inputs(weights, inputs)
    assert codes.shape == (2, 40, 48) and scales.shape == (2, 40, 3)
    fresh = correlated(400, 96, 4)

    def error(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return (fresh @ (dequantize_mxfp4(codes, scales) - weights).transpose(1, 2)).square().mean(dim=(1, 2))

    assert (error(codes, scales) < 0.5 * error(*quantize_mxfp4(weights, search=True))).all()


def test_weights_that_mxfp4_holds_are_kept() -> None:
    weights = dequantize_mxfp4(*quantize_mxfp4(torch.randn(1, 24, 64, generator=torch.Generator().manual_seed(5))))
    codes, scales = quantize_for_inputs(weights, correlated(200, 64, 6))
    assert torch.equal(dequantize_mxfp4(codes, scales), weights)


def test_uncorrelated_inputs_give_rounding_to_nearest() -> None:
    weights = torch.randn(1, 16, 64, generator=torch.Generator().manual_seed(7))
    codes, scales = quantize_for_inputs(weights, torch.eye(64))
    expected = quantize_mxfp4(weights, search=True)
    assert torch.equal(scales, expected[1])
    assert torch.equal(dequantize_mxfp4(codes, scales), dequantize_mxfp4(*expected))
