"""fused_mxfp4_moe on CUDA: the portable form, for raw MXFP4 weights on any device since Ampere.

Map, tiles, gate and up with the activation, down, and the weighted sum: five launches for a batch that one class of
tiles serves, six on Hopper, where low tiles of bfloat16 want rows in another order. Weights are exact; hidden
activations are rounded once, to bfloat16 (11 bits for float16 activations, none for float32); sums over top_k are
float32 in slot order and rounded once.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from moe_ops._register import MISSING
from moe_ops.meta.fused_mxfp4_moe import CHECKPOINT, resolve_activation
from moe_ops.meta.fused_mxfp4_moe import fused_mxfp4_moe as check_and_allocate
from moe_ops.schema import BY_NAME
from moe_ops.triton import _expert_words
from moe_ops.triton._combine_rows import combine_rows
from moe_ops.triton._expert_matmul import Activation, arithmetic, down, gate_up, row_order
from moe_ops.triton._launch import as_float32, dense_rows, refuse_hip
from moe_ops.triton._matrix import CheckpointMatrix, Matrix
from moe_ops.triton._schedule import make_schedule

# Of hidden activations and unsummed results; a larger batch is computed in pieces.
WORKSPACE_BYTES = 2 << 30
PREPARED_OP = "_fused_mxfp4_moe_sm90"


def activation_of(op: str, activation: str, swiglu_limit: float | None, swiglu_alpha: float | None) -> Activation:
    kind, limit, alpha = resolve_activation(op, activation, swiglu_limit, swiglu_alpha)
    return Activation(math.inf if limit is None else limit, alpha, 1.0 if kind == "swiglu_oai" else 0.0)


def pieces(num_tokens: int, bytes_per_token: int) -> list[slice]:
    step = max(16, WORKSPACE_BYTES // max(1, bytes_per_token) // 16 * 16)  # pieces start at aligned addresses
    return [slice(first, min(first + step, num_tokens)) for first in range(0, num_tokens, step)]


def compute(
    op: str,
    out: torch.Tensor,
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
    batch_invariant: bool = False,
) -> None:
    """Write all of `out` [T, H], of any float dtype; the arguments have been checked."""
    refuse_hip()
    num_tokens, hidden_size = hidden_states.shape
    top_k, intermediate = topk_ids.shape[1], w13.rows // 2
    if num_tokens == 0 or top_k == 0:
        out.zero_()
        return
    numbers = arithmetic(hidden_states.dtype)
    function = activation_of(op, activation, swiglu_limit, swiglu_alpha)
    order = row_order(w13_layout, intermediate)
    x, weights = dense_rows(hidden_states), as_float32(topk_weights)
    biases = [None if bias is None else bias.contiguous() for bias in (w13_bias, w2_bias)]
    row_bytes = hidden_size * 4 + intermediate * numbers.stored.itemsize
    for tokens in pieces(num_tokens, top_k * row_bytes):
        schedule = make_schedule(
            topk_ids[tokens], w13.num_experts, expert_map=expert_map, topk_weights=weights[tokens],
            batch_invariant=batch_invariant, tile_rows=numbers.tile_rows,
        )  # fmt: skip
        slots = schedule.row_slot.numel()
        # Low tiles may have kernels of their own, which want rows in another order.
        words = _expert_words.serves(x, schedule, w13, w2)
        skipped = (_expert_words.ROWS,) if words else ()
        hidden = x.new_empty((slots, intermediate), dtype=numbers.stored)
        ordered = _expert_words.in_word_order(x[tokens]) if words else None
        for part in w13.parts(schedule):
            if ordered is not None:
                _expert_words.gate_up(ordered, part, biases[0], order, function, numbers, hidden)
            gate_up(x[tokens], part, biases[0], order, function, numbers, (hidden, None, None), skipped)
        rows = x.new_empty((slots, hidden_size), dtype=torch.float32)
        for part in w2.parts(schedule):
            if words:
                _expert_words.down(hidden, part, biases[1], numbers, rows)
            down(hidden, part, biases[1], numbers, rows, skipped)
        combine_rows(rows, schedule.row_map, weights[tokens], out[tokens])


def prepared(op: str, weight_layout: str, out: torch.Tensor, *args: Any, **options: Any) -> None:
    """Weights in a packed layout belong to the kernel that reads it."""
    if PREPARED_OP not in BY_NAME or (PREPARED_OP, "CUDA") in MISSING:
        reason = MISSING.get((PREPARED_OP, "CUDA"), "it is not part of this build")
        raise RuntimeError(f"{op}: no kernel for weight_layout '{weight_layout}' here: {reason}")
    getattr(torch.ops.moe_ops, PREPARED_OP).default(*args, weight_layout=weight_layout, out=out, **options)


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
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    weight_layout: str = CHECKPOINT,
    after: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    op = "fused_mxfp4_moe"
    args = (hidden_states, topk_ids, topk_weights, w13, w13_scale, w2, w2_scale)
    options = {**options, "w13_layout": w13_layout}
    out = check_and_allocate(
        *args, out_dtype=out_dtype, batch_invariant=batch_invariant, weight_layout=weight_layout, after=after, **options
    )
    if weight_layout == CHECKPOINT:
        matrices = CheckpointMatrix(w13, w13_scale), CheckpointMatrix(w2, w2_scale)
        compute(op, out, *args[:3], *matrices, batch_invariant=batch_invariant, **options)
    else:
        prepared(op, weight_layout, out, *args, batch_invariant=batch_invariant, **options)
    return out
