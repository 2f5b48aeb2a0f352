"""The oracle of fused_mxfp4_moe against a dense float64 computation written another way, and against worked numbers."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from moe_ops import reference
from moe_ops.reference.fused_mxfp4_moe import swiglu
from tests.support import make_experts, make_routing, make_rows

# gate, up, plain, limit 10, limit 7, swiglu_oai (alpha 1.702, limit 7)
WORKED = [
    (12.0, 3.0, 36.000, 29.999, 20.981, 28.000),
    (-12.0, 3.0, -2.21e-4, -2.21e-4, -2.21e-4, -6.47e-8),
    (3.0, -12.0, -34.293, -28.577, -20.004, -17.892),
    (1.0, 1.0, 0.73106, 0.73106, 0.73106, 1.6916),
    (8.0, 8.0, 63.979, 63.979, 48.955, 56.000),
]


@pytest.mark.parametrize(("gate", "up", "plain", "limit10", "limit7", "oai"), WORKED)
def test_activation_values(gate, up, plain, limit10, limit7, oai):
    g, u = torch.tensor(gate), torch.tensor(up)
    assert swiglu(g, u, "silu", None, 1.0).item() == pytest.approx(plain, rel=1e-3)
    assert swiglu(g, u, "silu", 10.0, 1.0).item() == pytest.approx(limit10, rel=1e-3)
    assert swiglu(g, u, "silu", 7.0, 1.0).item() == pytest.approx(limit7, rel=1e-3)
    assert swiglu(g, u, "swiglu_oai", 7.0, 1.702).item() == pytest.approx(oai, rel=2e-3)


def decode(codes: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    """MXFP4 through ml_dtypes and NumPy only."""
    bytes_ = codes.numpy()
    nibbles = np.stack([bytes_ & 15, bytes_ >> 4], -1).reshape(*bytes_.shape[:-1], -1)
    values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    powers = scales.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    return values * np.repeat(powers, 32, axis=-1)


@pytest.mark.parametrize("layout", ["gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
def test_against_a_dense_computation(layout, activation):
    tokens, hidden, inter, experts, top_k = 9, 64, 96, 5, 3
    weights = make_experts(experts, inter, hidden)
    x = make_rows(tokens, hidden, torch.float32)
    ids, routing = make_routing(tokens, top_k, experts, invalid=0.2)
    b13, b2 = torch.randn(experts, 2 * inter), torch.randn(experts, hidden)
    actual = reference.fused_mxfp4_moe(
        x, ids, routing, **weights, w13_layout=layout, w13_bias=b13, w2_bias=b2, activation=activation, swiglu_limit=1.5
    )
    # Every expert on every token, then a [T, E] matrix of combine weights.
    xs = x.double().numpy()
    w13, w2 = decode(weights["w13"], weights["w13_scale"]), decode(weights["w2"], weights["w2_scale"])
    rows = np.einsum("th,erh->ter", xs, w13) + b13.double().numpy()
    gate = {"gate_up": rows[..., :inter], "up_gate": rows[..., inter:], "interleaved": rows[..., 0::2]}[layout]
    up = {"gate_up": rows[..., inter:], "up_gate": rows[..., :inter], "interleaved": rows[..., 1::2]}[layout]
    gate, up = np.minimum(gate, 1.5), np.clip(up, -1.5, 1.5)
    alpha, plus = (1.702, 1.0) if activation == "swiglu_oai" else (1.0, 0.0)
    hidden_rows = gate / (1 + np.exp(-alpha * gate)) * (up + plus)
    y = np.einsum("tei,ehi->teh", hidden_rows, w2) + b2.double().numpy()
    combine = np.zeros((tokens, experts))
    for t in range(tokens):
        for k in range(top_k):
            if 0 <= ids[t, k] < experts:
                combine[t, ids[t, k]] += float(routing[t, k])
    expected = np.einsum("te,teh->th", combine, y)
    np.testing.assert_allclose(actual.numpy(), expected, rtol=2e-5, atol=2e-5)


def test_backward_against_finite_differences():
    tokens, hidden, inter, experts = 3, 32, 32, 4
    weights = make_experts(experts, inter, hidden)
    x = make_rows(tokens, hidden, torch.float32)
    ids, routing = make_routing(tokens, 2, experts)
    options = {"w13_layout": "gate_up", "activation": "swiglu_oai"}
    grad = make_rows(tokens, hidden, torch.float32, seed=5)
    grad_x, grad_routing = reference.fused_mxfp4_moe_backward(grad, x, ids, routing, *weights.values(), **options)

    def loss(x: torch.Tensor, routing: torch.Tensor) -> float:
        out = reference.fused_mxfp4_moe(x, ids, routing, *weights.values(), **options)
        return float((out.double() * grad.double()).sum())

    step = 1e-2
    for index in [(0, 0), (1, 17), (2, 31)]:
        delta = torch.zeros_like(x)
        delta[index] = step
        numeric = (loss(x + delta, routing) - loss(x - delta, routing)) / (2 * step)
        assert grad_x[index].item() == pytest.approx(numeric, rel=2e-2, abs=2e-3)
    for index in [(0, 0), (2, 1)]:
        delta = torch.zeros_like(routing)
        delta[index] = step
        numeric = (loss(x, routing + delta) - loss(x, routing - delta)) / (2 * step)
        assert grad_routing[index].item() == pytest.approx(numeric, rel=1e-2, abs=1e-3)


def test_a_limit_beyond_float32_limits_nothing():
    gate, up = torch.tensor([3.0, 1e30]), torch.tensor([2.0, -1e30])
    assert torch.equal(swiglu(gate, up, "silu", 1e300, 1.0), swiglu(gate, up, "silu", None, 1.0))
