"""d permuted[row_map[t, k]] = weight[t, k] * d out[t]; d weight[t, k] = <permuted[row_map[t, k]], d out[t]>."""

from __future__ import annotations

from typing import Any

import torch

from moe_ops._register import overload
from moe_ops.autograd._rule import attach


def _save(ctx: Any, arguments: dict[str, Any], result: torch.Tensor) -> None:
    ctx.save_for_backward(arguments["permuted_hidden_states"], arguments["row_map"], arguments["topk_weights"])


def _backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    permuted, row_map, weights = ctx.saved_tensors
    grad_permuted, grad_weights = overload("topk_unpermute_backward")(grad_output, permuted, row_map, weights)
    return grad_permuted, None if weights is None else grad_weights.to(weights.dtype)


def register() -> None:
    attach("topk_unpermute", ("permuted_hidden_states", "topk_weights"), _save, _backward)
