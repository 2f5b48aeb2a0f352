"""A mixture-of-experts layer: stage by stage with any expert in the middle, and fused over MXFP4 weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import moe_ops
from moe_ops.reference.mxfp4 import dequantize_mxfp4, quantize_mxfp4

T, K, E, H, I = 64, 2, 8, 128, 64  # noqa: E741

generator = torch.Generator().manual_seed(0)
hidden_states = torch.randn(T, H, generator=generator)
topk_weights, topk_ids = torch.rand(T, E, generator=generator).softmax(-1).topk(K)
w13, w13_scale = quantize_mxfp4(torch.randn(E, 2 * I, H, generator=generator) * 0.1)  # rows [gate; up]
w2, w2_scale = quantize_mxfp4(torch.randn(E, H, I, generator=generator) * 0.1)


def fused(x: torch.Tensor) -> torch.Tensor:
    return moe_ops.fused_mxfp4_moe(x, topk_ids, topk_weights, w13, w13_scale, w2, w2_scale, w13_layout="gate_up")


def by_stages(x: torch.Tensor) -> torch.Tensor:
    rows, row_map, tokens_per_expert = moe_ops.topk_permute(x, topk_ids, E)  # rows of one expert lie together
    gate_up, down = dequantize_mxfp4(w13, w13_scale), dequantize_mxfp4(w2, w2_scale)
    parts = []
    for expert, part in enumerate(rows.split(tokens_per_expert.tolist())):
        gate, up = (part @ gate_up[expert].t()).chunk(2, dim=-1)
        parts.append((F.silu(gate) * up) @ down[expert].t())
    return moe_ops.topk_unpermute(torch.cat(parts), row_map, topk_weights)


expected, actual = by_stages(hidden_states), fused(hidden_states)
print("fused against stages:", f"{(expected - actual).norm() / expected.norm():.1e}")
compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
print("compiled, the same bits:", torch.equal(compiled(hidden_states), actual))

# An id outside the experts is no expert; a token without any gets zeros.
nobody = torch.full_like(topk_ids, -1)
zero = moe_ops.fused_mxfp4_moe(hidden_states, nobody, topk_weights, w13, w13_scale, w2, w2_scale, w13_layout="gate_up")
print("no expert, all zeros:", not zero.any())
