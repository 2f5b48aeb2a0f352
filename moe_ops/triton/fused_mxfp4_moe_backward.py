"""fused_mxfp4_moe_backward on CUDA: gradients in hidden_states and topk_weights; the expert's activations are
recomputed.

With d = grad_output[t] and g = d @ w2 of a slot's expert: grad_topk_weights = <hidden, g> + <w2_bias, d>, and the row's
gradient is the derivative of the activation at (gate, up) times topk_weight * g, through w13.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_ops.meta.fused_mxfp4_moe import CHECKPOINT
from moe_ops.meta.fused_mxfp4_moe_backward import fused_mxfp4_moe_backward as check_and_allocate
from moe_ops.triton._combine_rows import combine_rows
from moe_ops.triton._expert_gradient import activation_gradient, by_rows
from moe_ops.triton._expert_matmul import arithmetic, gate_up, row_order
from moe_ops.triton._launch import as_float32, dense_rows, refuse_hip
from moe_ops.triton._matrix import CheckpointMatrix, Matrix
from moe_ops.triton._schedule import make_schedule
from moe_ops.triton.fused_mxfp4_moe import activation_of, pieces


def compute(
    op: str,
    grads: tuple[torch.Tensor, torch.Tensor],
    grad_output: torch.Tensor,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: Matrix,
    w2: Matrix,
    *,
    w13_layout: str,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    activation: str = "silu",
    swiglu_limit: float | None = None,
    swiglu_alpha: float | None = None,
    expert_map: torch.Tensor | None = None,
) -> None:
    """Write all of grads: grad_hidden_states, of any float dtype, and grad_topk_weights, of float32. The arguments have
    been checked."""
    grad_hidden_states, grad_topk_weights = grads
    num_tokens, hidden_size = hidden_states.shape
    top_k, intermediate = topk_ids.shape[1], w13.rows // 2
    grad_topk_weights.zero_()
    if num_tokens == 0 or top_k == 0:
        grad_hidden_states.zero_()
        return
    numbers = arithmetic(hidden_states.dtype)
    function = activation_of(op, activation, swiglu_limit, swiglu_alpha)
    order = row_order(w13_layout, intermediate)
    x, grad = dense_rows(hidden_states), dense_rows(grad_output)
    weights, topk_ids = as_float32(topk_weights), topk_ids.contiguous()
    w13_bias, w2_bias, expert_map = (
        None if tensor is None else tensor.contiguous() for tensor in (w13_bias, w2_bias, expert_map)
    )
    row_bytes = hidden_size * 4 + intermediate * (12 + 2 * numbers.stored.itemsize)
    for tokens in pieces(num_tokens, top_k * row_bytes):
        # Slots of weight 0 stay: the weight has a gradient.
        schedule = make_schedule(
            topk_ids[tokens], w13.num_experts, expert_map=expert_map, topk_weights=None, batch_invariant=False,
            tile_rows=numbers.tile_rows,
        )  # fmt: skip
        slots = schedule.row_slot.numel()
        gate, up, grad_hidden = (x.new_empty((slots, intermediate), dtype=torch.float32) for _ in range(3))
        for part in w13.parts(schedule):
            gate_up(x[tokens], part, w13_bias, order, function, numbers, (None, gate, up))
        for part in w2.parts(schedule):
            by_rows(grad[tokens], part, numbers, grad_hidden, gather=True)
        grad_rows = x.new_empty((slots, 2 * intermediate), dtype=numbers.stored)
        activation_gradient(
            gate, up, grad_hidden, grad[tokens], schedule, weights[tokens], topk_ids[tokens], expert_map, w2_bias,
            order, function, numbers, grad_rows, grad_topk_weights[tokens],
        )  # fmt: skip
        grad_x = x.new_empty((slots, hidden_size), dtype=torch.float32)
        for part in w13.parts(schedule):
            by_rows(grad_rows, part, numbers, grad_x, gather=False)
        # Selected away, not multiplied: what an expert of no weight does may be infinite.
        used = torch.where(weights[tokens] == 0, -1, schedule.row_map)
        combine_rows(grad_x, used, None, grad_hidden_states[tokens])


def fused_mxfp4_moe_backward(
    grad_output: torch.Tensor,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    *,
    w13_layout: str,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    activation: str = "silu",
    swiglu_limit: float | None = None,
    swiglu_alpha: float | None = None,
    expert_map: torch.Tensor | None = None,
    weight_layout: str = CHECKPOINT,
) -> tuple[torch.Tensor, torch.Tensor]:
    op = "fused_mxfp4_moe_backward"
    refuse_hip()
    options: dict[str, Any] = {
        "w13_layout": w13_layout,
        "w13_bias": w13_bias,
        "w2_bias": w2_bias,
        "activation": activation,
        "swiglu_limit": swiglu_limit,
        "swiglu_alpha": swiglu_alpha,
        "expert_map": expert_map,
        "weight_layout": weight_layout,
    }
    grad_hidden_states, grad_topk_weights = check_and_allocate(
        grad_output, hidden_states, topk_ids, topk_weights, w13, w13_scale, w2, w2_scale, **options
    )
    batch = (grad_output, hidden_states, topk_ids, topk_weights)
    grads = grad_hidden_states, grad_topk_weights
    del options["weight_layout"]
    matrices: tuple[Matrix, Matrix] = CheckpointMatrix(w13, w13_scale), CheckpointMatrix(w2, w2_scale)
    if weight_layout != CHECKPOINT:
        from moe_ops.cuda.unpacked import matrices_of

        matrices = matrices_of(w13, w13_scale, w2, w2_scale, w13_layout)
    compute(op, grads, *batch, *matrices, **options)
    return grads
