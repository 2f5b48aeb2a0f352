"""fused_mxfp4_moe on NPU: route, dequantise what is needed, two grouped matmuls, a float32 sum over the slots.

The weighted sum is float32 with one rounding. With bfloat16 activations the activation between the products and each
expert's row are rounded to bfloat16 as well, since a grouped matmul of bfloat16 gives bfloat16 (docs/npu.md).
"""

from __future__ import annotations

from typing import Any

import torch

from moe_ops.meta.fused_mxfp4_moe import CHECKPOINT, check_moe, resolve_activation
from moe_ops.meta.fused_mxfp4_moe import fused_mxfp4_moe as check_and_allocate
from moe_ops.npu import mx
from moe_ops.npu._device import require_npu
from moe_ops.npu._experts import activate, arrange, down, hidden_activations, make_experts, product_dtypes
from moe_ops.npu._grouped import mx_product
from moe_ops.npu._routing import combine, local_keys, permute
from moe_ops.npu._weights import gate_up_rows, take


def fused_mxfp4_moe(
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
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    weight_layout: str = CHECKPOINT,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    op = "fused_mxfp4_moe"
    require_npu(op)
    # `after` needs nothing: the submit was queued on the stream of this op, or on one that waits for it.
    # `batch_invariant` needs nothing: a row's dot products never depend on the rows beside it.
    weights = (w13, w13_scale, w2, w2_scale)
    options: dict[str, Any] = {
        "w13_layout": w13_layout,
        "w13_bias": w13_bias,
        "w2_bias": w2_bias,
        "activation": activation,
        "swiglu_limit": swiglu_limit,
        "swiglu_alpha": swiglu_alpha,
        "weight_layout": weight_layout,
        "expert_map": expert_map,
    }
    out = check_and_allocate(
        hidden_states, topk_ids, topk_weights, *weights, out_dtype=out_dtype, after=after, **options
    )
    return out.copy_(expert_sum(op, hidden_states, topk_ids, topk_weights, *weights, **options))


def expert_sum(
    op: str,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    *,
    expert_map: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """[T, H] float32, before the only rounding of the sum."""
    geometry = check_moe(
        op, hidden_states, topk_ids, topk_weights, w13, w13_scale, w2, w2_scale, expert_map=expert_map, **options
    )
    if topk_ids.numel() == 0:
        return torch.zeros(hidden_states.shape, dtype=torch.float32, device=hidden_states.device)
    layout = options.get("weight_layout", CHECKPOINT)
    keys = local_keys(topk_ids, geometry[0], expert_map)
    weights = (w13, w13_scale, w2, w2_scale)
    if layout == mx.LAYOUT:
        mx.check_packed(op, w13, w2)
        if hidden_states.dtype == torch.bfloat16:
            return combine(*_native_rows(op, hidden_states, keys, weights, geometry, **options), topk_weights)
    experts = make_experts(op, geometry, hidden_states.shape[1], weights, **options)
    permutation, groups = arrange(hidden_states, keys, experts)
    first, second = product_dtypes(hidden_states.dtype, layout)
    hidden = hidden_activations(permutation.rows.to(first), groups, experts, second)
    rows = down(hidden, groups, experts)
    return combine(rows, permutation.row_map, topk_weights)


def _native_rows(
    op: str,
    hidden_states: torch.Tensor,
    keys: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    geometry: tuple[int, int],
    *,
    w13_layout: str,
    weight_layout: str,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    activation: str = "silu",
    swiglu_limit: float | None = None,
    swiglu_alpha: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows [T * K, H] bfloat16, row_map) with the products of Ascend950 for MXFP4 weights, all experts in place."""
    w13, w13_scale, w2, w2_scale = weights
    num_experts, size = geometry
    rows, row_map, counts = permute(hidden_states, keys, num_experts)
    if w13_bias is not None:
        w13_bias = take(w13_bias, None, gate_up_rows(w13_layout, size, 0, size))
    kind, limit, alpha = resolve_activation(op, activation, swiglu_limit, swiglu_alpha)
    first = mx_product(rows, w13, w13_scale, w13_bias, counts)
    return mx_product(activate(first, kind, limit, alpha), w2, w2_scale, w2_bias, counts), row_map
