"""The memory of calls is reused: in a steady state a call takes no fresh pages, whatever sizes came before."""

from __future__ import annotations

import resource

import torch

from moe_ops.reference.mxfp4 import quantize_mxfp4

HIDDEN, INTER, EXPERTS, TOP_K = 4096, 32, 16, 8


def test_a_new_size_takes_the_place_of_old_ones():
    w13, w13_scale = quantize_mxfp4(torch.randn(EXPERTS, 2 * INTER, HIDDEN) * 0.05)
    w2, w2_scale = quantize_mxfp4(torch.randn(EXPERTS, HIDDEN, INTER) * 0.05)

    def faults(num_tokens: int, calls: int) -> list[int]:
        x, out = (torch.randn(num_tokens, HIDDEN).bfloat16() for _ in range(2))
        ids, weights = torch.arange(num_tokens * TOP_K).view(num_tokens, TOP_K) % EXPERTS, torch.rand(num_tokens, TOP_K)
        counts = []
        for _ in range(calls):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            torch.ops.moe_ops.fused_mxfp4_moe_out(
                x, ids, weights, w13, w13_scale, w2, w2_scale, w13_layout="gate_up", out=out
            )
            counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        return counts

    # Each is too small for the next; together they are more than is kept.
    for num_tokens in [*range(100, 700, 50), *range(700, 1400, 100), *range(1500, 2200, 200)]:
        counts = faults(num_tokens, 4)
        assert min(counts[-2:]) < 32, (num_tokens, counts)
