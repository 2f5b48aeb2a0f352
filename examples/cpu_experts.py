"""Half of the experts in host memory: they run on the CPU engine while the others run where the activations are."""

from __future__ import annotations

import torch

import moe_ops
from moe_ops.engine import CpuMoeEngine
from moe_ops.reference.mxfp4 import quantize_mxfp4

T, K, E, H, I = 16, 4, 8, 256, 128  # noqa: E741
device = "cuda" if torch.cuda.is_available() else "cpu"

generator = torch.Generator().manual_seed(0)
w13, w13_scale = quantize_mxfp4(torch.randn(E, 2 * I, H, generator=generator) * 0.1)
w2, w2_scale = quantize_mxfp4(torch.randn(E, H, I, generator=generator) * 0.1)
hidden_states = torch.randn(T, H, generator=generator).to(device, torch.bfloat16)
topk_weights, topk_ids = (t.to(device) for t in torch.rand(T, E, generator=generator).softmax(-1).topk(K))

# Experts 0 to 3 live on the device under local ids; the engine loads the others and knows them by their own ids.
on_device = [tensor[:4].to(device) for tensor in (w13, w13_scale, w2, w2_scale)]
expert_map = torch.tensor([0, 1, 2, 3, -1, -1, -1, -1], dtype=torch.int32, device=device)

with CpuMoeEngine("example") as engine:
    experts = engine.add_experts("layer", E, H, I, w13_layout="gate_up")
    experts.load(
        {"w13": w13, "w13_scale": w13_scale, "w2": w2, "w2_scale": w2_scale}, on_cpu=[e >= 4 for e in range(E)]
    )
    experts = experts.to(device)

    cpu_ids = torch.where(topk_ids >= 4, topk_ids, -1)
    ticket, _ = experts.submit(hidden_states, cpu_ids, topk_weights)  # returns before the experts have run
    device_out = moe_ops.fused_mxfp4_moe(
        hidden_states,
        topk_ids,
        topk_weights,
        *on_device,
        w13_layout="gate_up",
        expert_map=expert_map,
        out_dtype=torch.float32,  # so that the sum with the CPU part is rounded once
        after=ticket,
    )
    out = experts.sync(ticket, device_out, out_dtype=hidden_states.dtype)

    whole = [tensor.to(device) for tensor in (w13, w13_scale, w2, w2_scale)]
    expected = moe_ops.fused_mxfp4_moe(hidden_states, topk_ids, topk_weights, *whole, w13_layout="gate_up")
    print("against all experts in one place:", f"{(out - expected).float().norm() / expected.float().norm():.1e}")
    print("jobs run by the engine:", engine.stats()["completed"])
