"""fused_mxfp4_moe_backward on NPU: the gate and up products again, then two products with the transposed weights.

With d the gradient of a slot's row before its weight, and h the activations: the gradient of the weight is
<down(h), grad> = <h, d> + <w2_bias, grad>, which needs no second down product. Everything is float32: rounded gates
would fall on the other side of the limit, where the gradient is 0.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_ops.meta.fused_mxfp4_moe import check_moe
from moe_ops.meta.fused_mxfp4_moe_backward import fused_mxfp4_moe_backward as check_and_allocate
from moe_ops.npu import mx
from moe_ops.npu._device import require_npu
from moe_ops.npu._experts import Experts, arrange, gate_up, hidden_gradient, input_gradient, make_experts
from moe_ops.npu._routing import combine, local_keys
from moe_ops.npu.topk_unpermute_backward import slots_of_rows


def fused_mxfp4_moe_backward(
    grad_output: torch.Tensor,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *weights: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    op = "fused_mxfp4_moe_backward"
    require_npu(op)
    grad_hidden_states, grad_topk_weights = check_and_allocate(
        grad_output, hidden_states, topk_ids, topk_weights, *weights, expert_map=expert_map, **options
    )
    if topk_ids.numel() == 0:
        return grad_hidden_states.zero_(), grad_topk_weights.zero_()
    geometry = check_moe(op, hidden_states, topk_ids, topk_weights, *weights, expert_map=expert_map, **options)
    if options.get("weight_layout") == mx.LAYOUT:
        mx.check_packed(op, weights[0], weights[2])
    experts = make_experts(op, geometry, hidden_states.shape[1], weights, **options)
    keys = local_keys(topk_ids, experts.num_experts, expert_map)
    permutation, groups = arrange(hidden_states, keys, experts)

    row_map = permutation.row_map
    slot = slots_of_rows(row_map, row_map >= 0, row_map.numel())
    slot = torch.where(slot >= 0, slot, torch.zeros_like(slot))  # what is past the routed rows is read by nobody
    grad_rows = grad_output.index_select(0, slot // row_map.shape[1]).to(torch.float32)
    weight = topk_weights.to(torch.float32).flatten().index_select(0, slot).unsqueeze(1)

    first = gate_up(permutation.rows.to(torch.float32), groups, experts)  # [M, 2I]
    d = hidden_gradient(grad_rows, groups, experts)  # [M, I]
    hidden, grad_gate, grad_up = _activation_gradient(first, d, experts)
    grad_first = torch.cat([grad_gate, grad_up], dim=1) * weight
    grad_x = input_gradient(grad_first, groups, experts)  # [M, H]

    grad_weight = (hidden * d).sum(1)
    if experts.w2_bias is not None:
        expert = keys.flatten().index_select(0, slot).clamp(max=experts.num_experts - 1)
        bias = experts.w2_bias.index_select(0, expert).to(torch.float32)
        grad_weight = grad_weight + (bias * grad_rows).sum(1)
    absent = row_map < 0
    row = torch.where(absent, torch.zeros_like(row_map), row_map)
    grad_weight = grad_weight.index_select(0, row.flatten()).view(row_map.shape)
    grad_weight = torch.where(absent, torch.zeros_like(grad_weight), grad_weight)
    # Selected away, not multiplied: what an expert of no weight does may be infinite.
    used = torch.where(topk_weights == 0, torch.full_like(row_map, -1), row_map)
    return combine(grad_x, used, None).to(hidden_states.dtype), grad_weight


def _activation_gradient(
    first: torch.Tensor, d: torch.Tensor, experts: Experts
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(act(gate, up), d * d act / d gate, d * d act / d up), all float32 [M, I]."""
    gate, up = first.chunk(2, dim=-1)
    inside_gate = inside_up = None
    if experts.limit is not None:
        inside_gate, inside_up = gate <= experts.limit, (up >= -experts.limit) & (up <= experts.limit)
        gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
    if experts.activation == "swiglu_oai":
        up = up + 1
    sigmoid = torch.sigmoid(gate * experts.alpha)
    silu = gate * sigmoid
    grad_gate = d * up * (sigmoid + experts.alpha * silu * (1 - sigmoid))
    grad_up = d * silu
    if inside_gate is not None and inside_up is not None:
        grad_gate = torch.where(inside_gate, grad_gate, torch.zeros_like(grad_gate))
        grad_up = torch.where(inside_up, grad_up, torch.zeros_like(grad_up))
    return silu * up, grad_gate, grad_up
