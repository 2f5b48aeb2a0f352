"""Gradients in hidden_states and topk_weights; the MXFP4 weights and the biases are frozen.

The backward recomputes the expert's hidden activations instead of keeping them: what is saved is the op's own inputs.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_ops._register import overload
from moe_ops.autograd._rule import attach

_TENSORS = ("hidden_states", "topk_ids", "topk_weights", "w13", "w13_scale", "w2", "w2_scale")
_OPTIONAL_TENSORS = ("w13_bias", "w2_bias", "expert_map")
_OPTIONS = ("w13_layout", "activation", "swiglu_limit", "swiglu_alpha", "weight_layout")


def _save(ctx: Any, arguments: dict[str, Any], result: torch.Tensor) -> None:
    ctx.save_for_backward(*(arguments[name] for name in _TENSORS + _OPTIONAL_TENSORS))
    ctx.options = {name: arguments[name] for name in _OPTIONS}


def _backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    saved = ctx.saved_tensors
    tensors, optional = saved[: len(_TENSORS)], dict(zip(_OPTIONAL_TENSORS, saved[len(_TENSORS) :], strict=True))
    grad_hidden_states, grad_topk_weights = overload("fused_mxfp4_moe_backward")(
        grad_output, *tensors, **optional, **ctx.options
    )
    topk_weights = tensors[2]
    return grad_hidden_states, grad_topk_weights.to(topk_weights.dtype)


def register() -> None:
    attach(
        "fused_mxfp4_moe",
        ("hidden_states", "topk_weights"),
        _save,
        _backward,
        frozen=("w13_bias", "w2_bias"),
    )
