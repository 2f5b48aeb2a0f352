"""Gradients through frozen MXFP4 experts: a router learns which experts a teacher used."""

from __future__ import annotations

import torch

import moe_ops
from moe_ops.reference.mxfp4 import quantize_mxfp4

T, K, E, H, I = 256, 2, 4, 64, 64  # noqa: E741
generator = torch.Generator().manual_seed(0)
w13, w13_scale = quantize_mxfp4(torch.randn(E, 2 * I, H, generator=generator) * 0.2)
w2, w2_scale = quantize_mxfp4(torch.randn(E, H, I, generator=generator) * 0.2)
x = torch.randn(T, H, generator=generator)


def experts(router: torch.Tensor) -> torch.Tensor:
    topk_weights, topk_ids = (x @ router.t()).softmax(-1).topk(K)
    return moe_ops.fused_mxfp4_moe(x, topk_ids, topk_weights, w13, w13_scale, w2, w2_scale, w13_layout="gate_up")


with torch.no_grad():
    target = experts(torch.randn(E, H, generator=generator))
router = (torch.randn(E, H, generator=generator) * 0.1).requires_grad_()
optimiser = torch.optim.Adam([router], lr=0.05)
for step in range(61):
    loss = (experts(router) - target).square().mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    if step % 20 == 0:
        print(f"step {step:3}: loss {loss.item():.4f}")
