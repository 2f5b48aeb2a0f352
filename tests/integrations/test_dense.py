"""Cutting a dense layer: all experts chosen give the dense layer, and groups follow co-activation."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moe_ops.integrations.dense import cut_dense, fit_router, group_neurons
from moe_ops.reference.fused_mxfp4_moe import fused_mxfp4_moe
from moe_ops.reference.mxfp4 import dequantize_mxfp4, quantize_mxfp4

H, I, E, T = 64, 256, 4, 200  # noqa: E741


def layer() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    # Weights that MXFP4 holds exactly, so that quantisation adds nothing to the comparison.
    gate, up, down = (
        dequantize_mxfp4(*quantize_mxfp4(torch.randn(*shape, generator=generator) * 0.2))
        for shape in ((I, H), (I, H), (H, I))
    )
    return gate, up, down, torch.randn(T, H, generator=generator)


def test_all_experts_at_weight_one_are_the_dense_layer() -> None:
    gate, up, down, x = layer()
    cut = cut_dense(gate, up, down, x, E, always=1)
    ids = torch.arange(E).expand(T, E)
    out = fused_mxfp4_moe(x, ids, torch.ones(T, E), **cut.experts.arguments()) + cut.output_bias
    dense = (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()
    # w2 is cut along its blocks of 32, so its values are quantised anew: MXFP4's own error, 12 % of a weight, at most.
    assert (out - dense).norm() / dense.norm() < 0.12
    w13 = dequantize_mxfp4(cut.experts.w13, cut.experts.w13_scale)
    expected = torch.cat((gate, up), dim=1).sort(dim=0).values
    actual = torch.cat((w13[:, : I // E].flatten(0, 1), w13[:, I // E :].flatten(0, 1)), dim=1).sort(dim=0).values
    assert torch.equal(actual, expected)  # every neuron once, gate and up rows of one neuron together


def test_left_out_experts_are_replaced_by_their_mean() -> None:
    gate, up, down, x = layer()
    cut = cut_dense(gate, up, down, x, E, always=1)
    ids = torch.full((T, 1), -1)
    out = fused_mxfp4_moe(x, ids, torch.ones(T, 1), **cut.experts.arguments()) + cut.output_bias
    everything = fused_mxfp4_moe(x, torch.arange(E).expand(T, E), torch.ones(T, E), **cut.experts.arguments())
    torch.testing.assert_close(out, (everything + cut.output_bias).mean(dim=0).expand(T, H), rtol=1e-3, atol=1e-4)


def test_groups_follow_co_activation() -> None:
    generator = torch.Generator().manual_seed(5)
    truth = torch.randperm(64, generator=generator).view(4, 16)
    activity = torch.rand(100, 64, generator=generator) * 0.01
    for group, neurons in enumerate(truth):
        activity[group::4, neurons] += 1.0
    groups = group_neurons(activity, 4, always=0, seed=3)
    assert sorted(groups.flatten().tolist()) == list(range(64))
    found = {frozenset(group.tolist()) for group in groups}
    assert found == {frozenset(group.tolist()) for group in truth}


def test_always_groups_hold_the_most_active_neurons() -> None:
    activity = torch.rand(50, 32, generator=torch.Generator().manual_seed(5)) * 0.1
    strong = torch.tensor([3, 9, 11, 12, 20, 21, 30, 31])
    activity[:, strong] += 1
    assert torch.equal(group_neurons(activity, 4, always=1)[0], strong)


def test_router_ranks_experts_as_their_outputs_do() -> None:
    generator = torch.Generator().manual_seed(6)
    x, truth = torch.randn(2000, 16, generator=generator), torch.randn(4, 16, generator=generator)
    strength = (x @ truth.t() * 0.3).exp()
    weight, bias = fit_router(x[:1000], strength[:1000], ridge=1e-3)
    chosen = (x[1000:] @ weight.t() + bias).argmax(dim=1)
    assert (chosen == strength[1000:].argmax(dim=1)).float().mean() > 0.98
