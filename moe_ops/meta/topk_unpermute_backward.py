"""Checks and outputs of topk_unpermute_backward."""

from __future__ import annotations

import torch

from moe_ops._errors import dtype_name, rank, require
from moe_ops.meta._checks import check_device
from moe_ops.meta.topk_unpermute import check_unpermute


def topk_unpermute_backward(
    grad_output: torch.Tensor,
    permuted_hidden_states: torch.Tensor,
    row_map: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    op = "topk_unpermute_backward"
    check_unpermute(op, permuted_hidden_states, row_map, topk_weights)
    check_device(op, permuted_hidden_states, grad_output=grad_output)
    num_tokens, hidden_size = row_map.shape[0], permuted_hidden_states.shape[1]
    dtype = permuted_hidden_states.dtype
    ok = (
        rank(grad_output) == 2
        and grad_output.dtype == dtype
        and grad_output.shape[0] == num_tokens
        and grad_output.shape[1] == hidden_size
    )
    require(ok, op, "grad_output", f"[{num_tokens}, {hidden_size}] {dtype_name(dtype)}", grad_output)
    grad_weights_shape = (0,) if topk_weights is None else tuple(row_map.shape)
    return (
        permuted_hidden_states.new_empty(permuted_hidden_states.shape),
        permuted_hidden_states.new_empty(grad_weights_shape, dtype=torch.float32),
    )
