"""Checks and outputs of fused_mxfp4_moe_backward."""

from __future__ import annotations

from typing import Any

import torch

from moe_ops._errors import rank, require
from moe_ops.meta._checks import FLOATS, FLOATS_TEXT, check_device
from moe_ops.meta.fused_mxfp4_moe import check_moe


def fused_mxfp4_moe_backward(
    grad_output: torch.Tensor,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *args: Any,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    op = "fused_mxfp4_moe_backward"
    check_moe(op, hidden_states, topk_ids, topk_weights, *args, **options)
    check_device(op, hidden_states, grad_output=grad_output)
    num_tokens, hidden_size = hidden_states.shape
    ok = rank(grad_output) == 2 and grad_output.dtype in FLOATS
    ok = ok and grad_output.shape[0] == num_tokens and grad_output.shape[1] == hidden_size
    require(ok, op, "grad_output", f"[{num_tokens}, {hidden_size}] {FLOATS_TEXT}", grad_output)
    return (
        hidden_states.new_empty(hidden_states.shape),
        hidden_states.new_empty(topk_weights.shape, dtype=torch.float32),
    )
