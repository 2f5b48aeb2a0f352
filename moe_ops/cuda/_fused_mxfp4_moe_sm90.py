"""fused_mxfp4_moe on Hopper, for weights in layout "sm90_v1", "sm90_v1_all_scales" or "sm90_v1_e4m3"."""

from __future__ import annotations

import math
from typing import Any

import torch

from moe_ops._errors import require
from moe_ops.cuda.plans import Geometry, Plan, cached_plan, chunk_of, grouped_serves, serves
from moe_ops.cuda.prepare import ALL_SCALES, E4M3, LAYOUT
from moe_ops.meta.fused_mxfp4_moe import resolve_activation


def _float32(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(torch.float32).contiguous()


def _aligned_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Rows that 16-byte loads can read."""
    aligned = tensor.stride(-1) == 1 and tensor.stride(0) % 8 == 0 and tensor.data_ptr() % 16 == 0
    return tensor if aligned else tensor.clone(memory_format=torch.contiguous_format)


def _grouped(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    tensors: tuple[torch.Tensor, ...],
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    expert_map: torch.Tensor | None,
    function: tuple[Any, ...],
    wide: bool,
    e4m3: bool,
    out: torch.Tensor,
) -> None:
    """Map, both matmuls, weighted sum."""
    from moe_ops.triton._permutation_map import permutation_map

    slots, num_experts = ids.numel(), tensors[0].shape[0]
    row_map = ids.new_empty(ids.shape, dtype=torch.int32)
    row_slot, counts = row_map.new_empty((slots,)), row_map.new_empty((num_experts,))
    permutation_map(
        ids, row_map, counts, num_rows=slots, row_slot=row_slot, expert_map=expert_map, topk_weights=weights
    )
    torch.ops.moe_ops._sm90_grouped.default(
        x, weights, row_map, row_slot, counts, *tensors, *biases, *function, wide, e4m3, out
    )


def _plan(
    geometry: Geometry, num_tokens: int, hidden_states: torch.Tensor, batch_invariant: bool, kernel: str | None
) -> Plan:
    if hidden_states.dtype == torch.float32:
        kernel = "unpacked"
    elif batch_invariant:  # the grouped kernels sum in another order than the decode kernel
        kernel = "decode" if serves(geometry, "decode") else "unpacked"
    if kernel is None:
        return cached_plan(geometry, num_tokens, hidden_states.device.index)
    return Plan(kernel, chunk_of(geometry, kernel), "given")


def run_kernel(kernel: str | None, *args: torch.Tensor, out: torch.Tensor, **options: Any) -> None:
    """_fused_mxfp4_moe_sm90 with a named kernel of plans.KERNELS, for tuning; None: by plan."""
    _compute(*args, kernel=kernel, out=out, **options)


def _fused_mxfp4_moe_sm90(*args: Any, **options: Any) -> None:
    """Write all of `out`; fused_mxfp4_moe has checked the arguments that it knows."""
    _compute(*args, **options)


def _compute(
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
    batch_invariant: bool = False,
    weight_layout: str = LAYOUT,
    out: torch.Tensor,
    kernel: str | None = None,
) -> None:
    op = "fused_mxfp4_moe"
    layouts = (LAYOUT, ALL_SCALES, E4M3)
    require(
        weight_layout in layouts,
        op,
        "weight_layout",
        f"'{LAYOUT}', '{ALL_SCALES}' or '{E4M3}' on a CUDA device",
        f"'{weight_layout}'",
    )
    capability = torch.cuda.get_device_capability(hidden_states.device)
    if capability != (9, 0):
        raise RuntimeError(
            f"{op}: weight_layout '{weight_layout}' needs compute capability 9.0, this device has {capability[0]}."
            f"{capability[1]}: keep the checkpoint's layout here"
        )
    num_tokens, top_k = topk_ids.shape
    if num_tokens == 0 or top_k == 0:
        out.zero_()
        return
    tensors = (w13, w13_scale, w2, w2_scale)
    all_scales = weight_layout == ALL_SCALES
    intermediate = w13.shape[1] * 8
    grouped = grouped_serves(weight_layout, hidden_states.dtype)
    geometry = Geometry(w13.shape[0], hidden_states.shape[1], intermediate, top_k, grouped)
    plan = _plan(geometry, num_tokens, hidden_states, batch_invariant, kernel)
    for name, tensor in zip(("w13", "w13_scale", "w2", "w2_scale"), tensors, strict=True):
        address = tensor.data_ptr() % 16
        require(address == 0, op, name, "at a multiple of 16 bytes", f"an address {address} bytes past one")
    fits = out.is_contiguous() and out.data_ptr() % 16 == 0
    result = out if fits else torch.empty_like(out, memory_format=torch.contiguous_format)
    if plan.kernel == "unpacked":
        from moe_ops.cuda.unpacked import matrices_of
        from moe_ops.triton.fused_mxfp4_moe import compute

        compute(
            op,
            result,
            hidden_states,
            topk_ids,
            topk_weights,
            *matrices_of(*tensors, w13_layout),
            w13_layout=w13_layout,
            w13_bias=w13_bias,
            w2_bias=w2_bias,
            activation=activation,
            swiglu_limit=swiglu_limit,
            swiglu_alpha=swiglu_alpha,
            expert_map=expert_map,
            batch_invariant=batch_invariant,
        )
        if result is not out:
            out.copy_(result)
        return
    kind, limit, alpha = resolve_activation(op, activation, swiglu_limit, swiglu_alpha)
    row_places = {"gate_up": [0, intermediate, 1], "up_gate": [intermediate, 0, 1], "interleaved": [0, 1, 2]}
    function = (row_places[w13_layout], kind == "swiglu_oai", math.inf if limit is None else limit, alpha)
    if expert_map is not None and expert_map.numel() == 0:
        expert_map, topk_ids = None, torch.full_like(topk_ids, -1)
    x, ids = _aligned_rows(hidden_states), topk_ids.contiguous()
    weights = topk_weights.to(torch.float32).contiguous()
    biases = _float32(w13_bias), _float32(w2_bias)
    routes = None if expert_map is None else expert_map.contiguous()
    for first in range(0, num_tokens, plan.chunk):
        part = slice(first, first + plan.chunk)
        batch = x[part], ids[part], weights[part]
        if plan.kernel == "decode":
            torch.ops.moe_ops._sm90_decode.default(
                *batch, *tensors, *biases, routes, *function, batch_invariant, all_scales, result[part]
            )
        else:
            wide = plan.kernel == "wide"
            e4m3 = wide and weight_layout == E4M3
            _grouped(*batch, tensors, biases, routes, function, wide, e4m3, result[part])
    if result is not out:
        out.copy_(result)
