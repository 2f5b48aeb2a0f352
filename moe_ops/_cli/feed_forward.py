"""The demo's feed-forward layer: a router, experts beside the activations and experts in the CPU engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

import moe_ops
from moe_ops.engine import CpuExperts
from moe_ops.integrations.checkpoints import ExpertTensors


class CutFeedForward(torch.nn.Module):
    """output(x) = output_bias + the sum of the `top_k` experts that the router scores highest, each with weight 1.

    on_device:      the experts whose ids are `device_experts`, on the device of the activations.
    on_cpu:         the other experts, under their own ids.
    """

    router_weight: torch.Tensor
    router_bias: torch.Tensor
    output_bias: torch.Tensor
    device_map: torch.Tensor
    cpu_map: torch.Tensor

    def __init__(
        self,
        on_device: ExpertTensors,
        device_experts: Sequence[int],
        on_cpu: CpuExperts,
        router_weight: torch.Tensor,
        router_bias: torch.Tensor,
        output_bias: torch.Tensor,
    ) -> None:
        super().__init__()
        num_experts = router_weight.shape[0]
        self.top_k = num_experts
        self.on_device = on_device
        self.on_cpu = on_cpu
        self.register_buffer("router_weight", router_weight)
        self.register_buffer("router_bias", router_bias)
        self.register_buffer("output_bias", output_bias)
        # Where an expert lives is decided before the submit: each side sees -1 for what is not its own.
        device_map = torch.full((num_experts,), -1, dtype=torch.int32)
        device_map[list(device_experts)] = torch.arange(len(device_experts), dtype=torch.int32)
        self.register_buffer("device_map", device_map)
        self.register_buffer("cpu_map", torch.where(device_map < 0, torch.arange(num_experts), -1))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.flatten(0, -2)  # [T, H]
        scores = F.linear(x.to(torch.float32), self.router_weight, self.router_bias)  # [T, E]
        topk_ids = scores.topk(self.top_k, dim=-1).indices
        topk_weights = torch.ones(topk_ids.shape, dtype=torch.float32, device=x.device)
        ticket, _ = self.on_cpu.submit(x, self.cpu_map[topk_ids], topk_weights)
        out = moe_ops.fused_mxfp4_moe(
            x,
            topk_ids,
            topk_weights,
            **self.on_device.arguments(),
            expert_map=self.device_map,
            out_dtype=torch.float32,
            after=ticket,
        )
        out = self.on_cpu.sync(ticket, out + self.output_bias, out_dtype=x.dtype)
        return out.view_as(hidden_states)
