"""Every native CUDA kernel of the ops once or twice, on small inputs: what `scripts/test-gpu sanitize` runs under
compute-sanitizer. Nothing is compared here; the tests do that."""

from __future__ import annotations

import os
import sys

# Every tensor in memory of its own: what one has written does not count for the next.
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch

import moe_ops
from moe_ops.cuda import ALL_SCALES, LAYOUT, sm90_reason
from moe_ops.cuda._fused_mxfp4_moe_sm90 import run_kernel
from moe_ops.experts import Mxfp4Experts


def experts(num_experts: int, hidden: int, intermediate: int, *, wide_scales: bool) -> Mxfp4Experts:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator).cuda()

    def scales(*shape: int) -> torch.Tensor:
        return random(*shape, low=110, high=140 if wide_scales else 123)

    return Mxfp4Experts(
        random(num_experts, 2 * intermediate, hidden // 2),
        scales(num_experts, 2 * intermediate, hidden // 32),
        random(num_experts, hidden, intermediate // 2),
        scales(num_experts, hidden, intermediate // 32),
        w13_layout="gate_up",
        w13_bias=torch.randn(num_experts, 2 * intermediate, generator=generator).cuda(),
        w2_bias=torch.randn(num_experts, hidden, generator=generator).cuda(),
    )


def batch(num_tokens: int, hidden: int, num_experts: int, top_k: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, hidden, generator=generator).to(torch.bfloat16)
    ids = torch.randint(-1, num_experts + 1, (num_tokens, top_k), generator=generator, dtype=torch.int32)
    return x.cuda(), ids.cuda(), torch.rand(num_tokens, top_k, generator=generator).cuda()


def hopper_kernels() -> None:
    for hidden, intermediate in ((96, 64), (640, 352)):
        for wide_scales in (False, True):
            raw = experts(8, hidden, intermediate, wide_scales=wide_scales)
            reason = sm90_reason(raw.w13, raw.w13_scale, raw.w2, raw.w2_scale)
            if reason is not None:
                print(f"without the Hopper kernels: {reason}")
                return
            prepared = raw.prepare(LAYOUT)
            assert prepared.weight_layout == (ALL_SCALES if wide_scales else LAYOUT)
            arguments = prepared.arguments()
            for num_tokens in (1, 3, 40):
                x, ids, weights = batch(num_tokens, hidden, 8, 4)
                for batch_invariant in (False, True):
                    moe_ops.fused_mxfp4_moe(x, ids, weights, **arguments, batch_invariant=batch_invariant)
                moe_ops.fused_mxfp4_moe(x.half(), ids.long(), weights, **arguments)
            for num_tokens in (1, 6):  # every slot of a token with another expert
                x, ids, weights = batch(num_tokens, hidden, 8, 4)
                ids = torch.arange(4, dtype=torch.int32, device="cuda") * 2 + ids.clamp(0, 1)
                moe_ops.fused_mxfp4_moe(x, ids, weights, **arguments)
            # Tiles of up to 64, 96 and 152 tokens.
            for num_tokens, kernel in () if wide_scales else ((70, "narrow"), (150, "narrow"), (330, "wide")):
                inputs = batch(num_tokens, hidden, 8, 4)
                run_kernel(kernel, *inputs, out=torch.empty_like(inputs[0]), **arguments)
            torch.cuda.synchronize()


def map_copy_and_remap() -> None:
    for num_tokens in (5, 1000, 4000, 70000):
        _, ids, weights = batch(num_tokens, 32, 64, 4)
        rows = torch.zeros(num_tokens, 32, dtype=torch.bfloat16, device="cuda")
        moe_ops.topk_permute(rows, ids, 64)
        moe_ops.topk_permute(rows, ids.long(), 64, num_out_tokens=num_tokens)
    for num_tokens in (3, 4000):
        _, ids, weights = batch(num_tokens, 32, 64, 4)
        expert_map = torch.arange(64, dtype=torch.int32, device="cuda") - 32
        for fill in ("reuse", "skip"):
            moe_ops.ep_remap(ids, weights, expert_offset=16, num_local_experts=32, fill=fill)
            moe_ops.ep_remap(ids, weights, expert_map=expert_map, fill=fill)
    torch.cuda.synchronize()


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["map", "hopper"]
    if "map" in wanted:
        map_copy_and_remap()
    if "hopper" in wanted:
        hopper_kernels()
    print("ran", " ".join(wanted))
