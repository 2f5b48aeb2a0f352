"""Checks and outputs of fused_mxfp4_moe."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from moe_ops._errors import argument_error, rank, require
from moe_ops.meta._checks import FLOATS, FLOATS_TEXT, check_device, check_ids, check_rows, check_ticket, check_weights

W13_LAYOUTS = ("gate_up", "up_gate", "interleaved")
ACTIVATIONS = ("silu", "swiglu_oai")
CHECKPOINT = "checkpoint"
BLOCK = 32  # elements that share one E8M0 scale
SWIGLU_OAI_ALPHA = 1.702
SWIGLU_OAI_LIMIT = 7.0


@dataclass(frozen=True)
class PreparedLayout:
    """A packed form of the weights. `geometry` checks the packed tensors of `op` against the hidden size and returns
    (num_experts, intermediate_size)."""

    device_type: str
    geometry: Callable[[str, int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[int, int]]


# Filled by the modules that prepare weights (moe_ops.experts for the CPU, moe_ops.cuda for Hopper).
PREPARED_LAYOUTS: dict[str, PreparedLayout] = {}


def resolve_activation(
    op: str, activation: str, swiglu_limit: float | None, swiglu_alpha: float | None
) -> tuple[str, float | None, float]:
    """(activation, limit or None, alpha) with the defaults filled in."""
    require(activation in ACTIVATIONS, op, "activation", "'silu' or 'swiglu_oai'", f"'{activation}'")
    if swiglu_limit is not None:
        ok = math.isfinite(swiglu_limit) and swiglu_limit > 0
        require(ok, op, "swiglu_limit", "None or a finite number above 0", str(swiglu_limit))
    if activation == "silu":
        require(swiglu_alpha is None, op, "swiglu_alpha", "None for activation 'silu'", str(swiglu_alpha))
        return activation, swiglu_limit, 1.0
    if swiglu_alpha is not None:
        require(math.isfinite(swiglu_alpha), op, "swiglu_alpha", "a finite number", str(swiglu_alpha))
    limit = SWIGLU_OAI_LIMIT if swiglu_limit is None else swiglu_limit
    return activation, limit, SWIGLU_OAI_ALPHA if swiglu_alpha is None else swiglu_alpha


def check_u8(op: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    ok = rank(tensor) == len(shape) and tensor.dtype == torch.uint8 and tensor.is_contiguous()
    ok = ok and all(actual == expected for actual, expected in zip(tensor.shape, shape, strict=True))
    got = tensor if tensor is None or tensor.is_contiguous() else "a tensor that is not contiguous"
    require(ok, op, name, f"a contiguous [{', '.join(map(str, shape))}] uint8", got)


def checkpoint_geometry(
    op: str,
    hidden_size: int,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
) -> tuple[int, int]:
    """Check the raw MXFP4 tensors; (num_experts, intermediate_size)."""
    require(hidden_size > 0 and hidden_size % BLOCK == 0, op, "hidden_size", f"a multiple of {BLOCK}", str(hidden_size))
    ok = rank(w13) == 3 and w13.dtype == torch.uint8 and w13.shape[1] % 2 == 0
    require(
        ok, op, "w13", "[num_experts, 2 * intermediate_size, hidden_size / 2] uint8 for weight_layout 'checkpoint'", w13
    )
    num_experts, intermediate_size = w13.shape[0], w13.shape[1] // 2
    ok = intermediate_size > 0 and intermediate_size % BLOCK == 0
    require(ok, op, "intermediate_size", f"a multiple of {BLOCK}", str(intermediate_size))
    require(num_experts > 0, op, "w13", "of at least one expert", w13)
    check_u8(op, "w13", w13, (num_experts, 2 * intermediate_size, hidden_size // 2))
    check_u8(op, "w13_scale", w13_scale, (num_experts, 2 * intermediate_size, hidden_size // BLOCK))
    check_u8(op, "w2", w2, (num_experts, hidden_size, intermediate_size // 2))
    check_u8(op, "w2_scale", w2_scale, (num_experts, hidden_size, intermediate_size // BLOCK))
    return num_experts, intermediate_size


def check_moe(
    op: str,
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
) -> tuple[int, int]:
    """Check everything that the ops of the family share; (num_experts, intermediate_size)."""
    check_rows(op, "hidden_states", hidden_states)
    num_tokens, hidden_size = hidden_states.shape
    check_ids(op, topk_ids, num_tokens, topk_weights)
    check_weights(op, topk_weights, num_tokens, topk_ids.shape[1])
    require(w13_layout in W13_LAYOUTS, op, "w13_layout", "'gate_up', 'up_gate' or 'interleaved'", f"'{w13_layout}'")
    resolve_activation(op, activation, swiglu_limit, swiglu_alpha)
    if weight_layout == CHECKPOINT:
        num_experts, intermediate_size = checkpoint_geometry(op, hidden_size, w13, w13_scale, w2, w2_scale)
    else:
        layout = PREPARED_LAYOUTS.get(weight_layout)
        here = hidden_states.device.type
        if layout is None or here not in (layout.device_type, "meta"):
            expected = f"'{CHECKPOINT}' or a prepared layout of {here}"
            raise argument_error(op, "weight_layout", expected, f"'{weight_layout}'")
        num_experts, intermediate_size = layout.geometry(op, hidden_size, w13, w13_scale, w2, w2_scale)
    check_bias(op, "w13_bias", w13_bias, num_experts, 2 * intermediate_size)
    check_bias(op, "w2_bias", w2_bias, num_experts, hidden_size)
    if expert_map is not None:
        ok = expert_map.dim() == 1 and expert_map.dtype == torch.int32
        require(ok, op, "expert_map", "[num_experts] int32", expert_map)
    check_device(
        op,
        hidden_states,
        topk_ids=topk_ids,
        topk_weights=topk_weights,
        w13=w13,
        w13_scale=w13_scale,
        w2=w2,
        w2_scale=w2_scale,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        expert_map=expert_map,
    )
    return num_experts, intermediate_size


def check_bias(op: str, name: str, bias: torch.Tensor | None, num_experts: int, width: int) -> None:
    if bias is None:
        return
    ok = bias.dim() == 2 and bias.dtype in FLOATS and bias.shape[0] == num_experts and bias.shape[1] == width
    require(ok, op, name, f"[{num_experts}, {width}] {FLOATS_TEXT}", bias)


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
    check_moe(
        op,
        hidden_states,
        topk_ids,
        topk_weights,
        w13,
        w13_scale,
        w2,
        w2_scale,
        w13_layout=w13_layout,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        activation=activation,
        swiglu_limit=swiglu_limit,
        swiglu_alpha=swiglu_alpha,
        expert_map=expert_map,
        weight_layout=weight_layout,
    )
    check_ticket(op, "after", after)
    check_device(op, hidden_states, after=after)
    dtype = hidden_states.dtype if out_dtype is None else out_dtype
    require(dtype in FLOATS, op, "out_dtype", f"None, {FLOATS_TEXT}", dtype)
    return hidden_states.new_empty(hidden_states.shape, dtype=dtype)
