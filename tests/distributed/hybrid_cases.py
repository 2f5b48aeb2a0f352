"""Experts that are partly on the CPU engine, inside the expert-parallel layer."""

from __future__ import annotations

import torch
import torch.distributed as dist
from layer_cases import batch

import moe_ops
from moe_ops.distributed import ExpertParallelMoE, ExpertShards
from moe_ops.reference.mxfp4 import quantize_mxfp4

EXPERT_NAMES = ("w13", "w13_scale", "w2", "w2_scale")


def hybrid_equals_fused(tokens: list[int], slots: int, dtype: torch.dtype) -> None:
    """Every rank's experts split between slots and engine: the result of one call with all experts."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    num_experts, top_k, hidden, intermediate = 3 * ranks - 1, 3, 64, 32
    generator = torch.Generator().manual_seed(8)
    w13 = quantize_mxfp4(torch.randn(num_experts, 2 * intermediate, hidden, generator=generator) * 0.3)
    w2 = quantize_mxfp4(torch.randn(num_experts, hidden, intermediate, generator=generator) * 0.3)
    owned = ExpertShards(num_experts, ranks).owned(rank)
    mine = [tensor[owned.start : owned.stop].clone() for tensor in (*w13, *w2)]
    with moe_ops.CpuMoeEngine(f"rank-{rank}-{slots}-{dtype}", threads=1) as engine:
        cpu_experts = engine.add_experts("layer", len(owned), hidden, intermediate, w13_layout="gate_up")
        cpu_experts.load(dict(zip(EXPERT_NAMES, mine, strict=True)))
        hybrid = moe_ops.HybridExperts(cpu_experts, slots)
        hybrid.place(range(slots))
        layer = ExpertParallelMoE(hybrid, num_experts, top_k, hidden, group=dist.group.WORLD)
        inputs = batch(rank, tokens[rank], num_experts, top_k, dtype, hidden)[:3]
        expected = moe_ops.fused_mxfp4_moe(*inputs, *w13, *w2, w13_layout="gate_up", out_dtype=torch.float32)
        limit = (1e-4 if dtype == torch.float32 else 3e-2) * max([1.0, *expected.abs().reshape(-1).tolist()])
        traveled = set()
        hook = hybrid.register_forward_hook(lambda module, arguments, results: traveled.add(results[0].dtype))
        with torch.inference_mode():
            for _ in range(2):
                torch.testing.assert_close(layer(*inputs).float(), expected, rtol=0, atol=limit)
        hook.remove()
        assert traveled == {torch.float32}  # rounded once, after the sum over a token's experts
        try:
            layer(inputs[0].requires_grad_(), *inputs[1:])
        except RuntimeError as error:
            assert "hybrid experts are forward only" in str(error)
        else:
            raise AssertionError("a gradient was not refused")
        hybrid.max_deferred = 1
        try:
            ExpertParallelMoE(hybrid, num_experts, top_k, hidden, group=dist.group.WORLD)
        except ValueError as error:
            assert "experts must be without deferred work (max_deferred=0), got 1" in str(error)
        else:
            raise AssertionError("deferred work was not refused")
