"""The demo's feed-forward layer: a router, experts beside the activations and experts in the CPU engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import moe_ops.reference as reference
from moe_ops.integrations.checkpoints import ExpertTensors


class CutFeedForward(torch.nn.Module):
    def __init__(
        self,
        on_device: ExpertTensors,
        on_cpu: ExpertTensors,
        router_weight: torch.Tensor,
        router_bias: torch.Tensor,
        output_bias: torch.Tensor,
        *,
        device_experts: Sequence[int],
        cpu_experts: Sequence[int],
    ) -> None:
        super().__init__()
        num_experts = router_weight.shape[0]
        self.top_k = num_experts
        self.register_buffer("router_weight", router_weight)
        self.register_buffer("router_bias", router_bias)
        self.register_buffer("output_bias", output_bias)
        self.on_device, self.on_cpu = on_device, on_cpu
        m = torch.full((2, num_experts), -1, dtype=torch.int32)
        m[0, list(device_experts)] = torch.arange(len(device_experts), dtype=torch.int32)
        m[1, list(cpu_experts)] = torch.arange(len(cpu_experts), dtype=torch.int32)
        self.register_buffer("m", m)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.flatten(0, -2)  # [T, H]
        scores = torch.nn.functional.linear(x.to(torch.float32), self.router_weight, self.router_bias)  # [T, E]
        topk_ids = scores.topk(self.top_k, dim=-1).indices
        topk_weights = torch.ones(topk_ids.shape, dtype=torch.float32, device=x.device)
        a = reference.fused_mxfp4_moe(
            x, topk_ids, topk_weights, expert_map=self.m[0], out_dtype=torch.float32, **self.on_device.arguments()
        )
        b = reference.fused_mxfp4_moe(
            x, topk_ids, topk_weights, expert_map=self.m[1], out_dtype=torch.float32, **self.on_cpu.arguments()
        )
        return (a + b + self.output_bias).to(hidden_states.dtype).view_as(hidden_states)
