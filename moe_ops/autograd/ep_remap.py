"""d topk_weights[t, k] = d local_weights[t, k] where the expert is local, else 0."""

from __future__ import annotations

from typing import Any

import torch

from moe_ops.autograd._rule import attach
from moe_ops.reference.ep_remap import local_ids


def _save(ctx: Any, arguments: dict[str, Any], result: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.mark_non_differentiable(result[0])
    ctx.save_for_backward(arguments["topk_ids"], arguments["expert_map"])
    ctx.expert_offset = arguments["expert_offset"]
    ctx.num_local_experts = arguments["num_local_experts"]
    ctx.dtype = arguments["topk_weights"].dtype


def _backward(ctx: Any, _: Any, grad_weights: torch.Tensor) -> tuple[torch.Tensor]:
    topk_ids, expert_map = ctx.saved_tensors
    owned = local_ids(topk_ids, ctx.expert_offset, ctx.num_local_experts, expert_map) >= 0
    return (torch.where(owned, grad_weights, 0.0).to(ctx.dtype),)


def register() -> None:
    attach("ep_remap", ("topk_weights",), _save, _backward)
