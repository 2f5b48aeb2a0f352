"""The demo's feed-forward layer: a router before experts that live partly on the device, partly in the CPU engine."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moe_ops.hybrid import HybridExperts


class Constant(torch.nn.Module):
    """A row that every token gets, as the shared expert of a layer."""

    row: torch.Tensor

    def __init__(self, row: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("row", row)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.row.expand(hidden_states.shape[0], -1)


class CutFeedForward(torch.nn.Module):
    """The sum of the `top_k` experts that the router scores highest, each with weight 1, and a constant row."""

    router_weight: torch.Tensor
    router_bias: torch.Tensor

    def __init__(self, experts: HybridExperts, router_weight: torch.Tensor, router_bias: torch.Tensor) -> None:
        super().__init__()
        self.top_k = router_weight.shape[0]
        self.experts = experts
        self.register_buffer("router_weight", router_weight)
        self.register_buffer("router_bias", router_bias)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.flatten(0, -2)  # [T, H]
        scores = F.linear(x.to(torch.float32), self.router_weight, self.router_bias)  # [T, E]
        topk_ids = scores.topk(self.top_k, dim=-1).indices
        topk_weights = torch.ones(topk_ids.shape, dtype=torch.float32, device=x.device)
        out, _ = self.experts(x, topk_ids, topk_weights)
        return out.view_as(hidden_states)
