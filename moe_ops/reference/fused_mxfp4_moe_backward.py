"""Gradients of fused_mxfp4_moe in hidden_states and topk_weights, by autograd over the reference forward.

A slot of weight 0 has a gradient of its own here: the forward's selection of zero weights is for values only.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_ops.reference.fused_mxfp4_moe import moe_float32


def fused_mxfp4_moe_backward(
    grad_output: torch.Tensor,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *args: Any,
    weight_layout: str = "checkpoint",
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    if weight_layout != "checkpoint":
        raise ValueError(f"fused_mxfp4_moe_backward: weight_layout must be 'checkpoint', got '{weight_layout}'")
    with torch.enable_grad():
        x = hidden_states.detach().to(torch.float32).requires_grad_()
        weights = topk_weights.detach().to(torch.float32).requires_grad_()
        total = moe_float32(x, topk_ids, weights, *args, select_zero_weights=False, **options)
        if total.grad_fn is None:
            return torch.zeros_like(hidden_states), torch.zeros_like(weights)
        grad_x, grad_weights = torch.autograd.grad(
            total, (x, weights), grad_output.to(torch.float32), allow_unused=True, materialize_grads=True
        )
    return grad_x.to(hidden_states.dtype), grad_weights
