"""d hidden_states[t] = sum over k of d permuted[row_map[t, k]]: topk_unpermute without weights."""

from __future__ import annotations

from typing import Any

import torch

from moe_ops._register import overload
from moe_ops.autograd._rule import attach


def _save(ctx: Any, arguments: dict[str, Any], result: tuple[torch.Tensor, ...]) -> None:
    _, row_map, tokens_per_expert = result
    ctx.save_for_backward(row_map)
    ctx.mark_non_differentiable(row_map, tokens_per_expert)


def _backward(ctx: Any, grad_permuted: torch.Tensor, *_: Any) -> tuple[torch.Tensor]:
    (row_map,) = ctx.saved_tensors
    return (overload("topk_unpermute")(grad_permuted, row_map),)


def register() -> None:
    attach("topk_permute", ("hidden_states",), _save, _backward)
