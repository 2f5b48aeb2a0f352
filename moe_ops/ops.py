"""The public functions: what each op computes, with shapes, dtypes and errors. They only call `torch.ops.moe_ops`.

T tokens, K top-k, H hidden size, I intermediate size, E experts, R expert-parallel ranks. Everywhere: an expert id
outside [0, E), -1 as well as E and above, means "no expert"; sums are float32 and rounded once; every argument error
is a ValueError of the form `<op>: <argument> must be <expected>, got <actual>`; T = 0 is legal.
"""

from __future__ import annotations

import torch
from torch import Tensor


def topk_permute(
    hidden_states: Tensor,
    topk_ids: Tensor,
    num_experts: int,
    *,
    num_out_tokens: int | None = None,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Expand token rows into expert-major order.

    permuted[row_map[t, k]] = hidden_states[t]; rows are sorted by expert, and by slot t * K + k within one expert.

    Args:
        hidden_states: [T, H] bfloat16, float16 or float32, any strides.
        topk_ids: [T, K] int32 or int64; ids outside [0, num_experts) get no row.
        num_experts: E.
        num_out_tokens: rows of the output; slots that sort past it are dropped. None: T * K, which holds every slot.
        after: ticket of a `cpu_moe_submit` that must have been issued before this op.

    Returns:
        permuted_hidden_states: [T * K, H] (or [num_out_tokens, H]), dtype of hidden_states; rows past the routed ones
            are 0.
        row_map: [T, K] int32, the row of each slot, -1 where it has none.
        tokens_per_expert: [E] int32, counted before any dropping.

    Differentiable in hidden_states.
    """
    return torch.ops.moe_ops.topk_permute(
        hidden_states, topk_ids, num_experts, num_out_tokens=num_out_tokens, after=after
    )


def topk_permute_out(
    hidden_states: Tensor, topk_ids: Tensor, num_experts: int, *, out: Tensor
) -> tuple[Tensor, Tensor]:
    """`topk_permute` into a buffer whose address must not change; all of its rows are written.

    Args:
        hidden_states, topk_ids, num_experts: as in `topk_permute`.
        out: contiguous [at least T * K, H], dtype of hidden_states, sharing no memory with the inputs.

    Returns:
        row_map: [T, K] int32.
        tokens_per_expert: [E] int32.

    Raises for inputs that require a gradient. torch_npu's npugraphs backend does not take ops that write an argument.
    """
    return torch.ops.moe_ops.topk_permute_out(hidden_states, topk_ids, num_experts, out=out)


def topk_unpermute(permuted_hidden_states: Tensor, row_map: Tensor, topk_weights: Tensor | None = None) -> Tensor:
    """Bring expert-major rows back to their tokens and sum them.

    out[t] = sum over k of topk_weights[t, k] * permuted[row_map[t, k]], in slot order.

    Args:
        permuted_hidden_states: [rows, H] bfloat16, float16 or float32.
        row_map: [T, K] int32 from `topk_permute`; values outside [0, rows) contribute nothing.
        topk_weights: [T, K] float, widened to float32; None: a plain sum. A slot of weight 0 is not read.

    Returns:
        [T, H], dtype of permuted_hidden_states.

    Differentiable in permuted_hidden_states and topk_weights.
    """
    return torch.ops.moe_ops.topk_unpermute(permuted_hidden_states, row_map, topk_weights)


def route_metadata(tokens_per_source: Tensor, ep_rank: int, *, mode: str = "push") -> tuple[Tensor, ...]:
    """Offsets and sizes, in rows, of an expert-parallel exchange, seen from one rank.

    With S[s, e] the rows of source s before expert e and T[t, j, s] the rows of owner t's receive buffer before local
    expert j of source s (expert-major, source-minor): push entry (t, j) sends S[r, e] to T[t, j, r]; pull entry (s, j)
    fetches S[s, r's expert j] to T[r, j, s]; combine entry (s, j) returns T[r, j, s] to S[s, r's expert j].

    Args:
        tokens_per_source: [R, E] int32, the `tokens_per_expert` of every rank.
        ep_rank: this rank, r.
        mode: "push" (the sender's view) or "pull" (the receiver's view) of the dispatch.

    Returns, with L = ceil(E / R); where R does not divide E the first E mod R ranks own L experts and the others L -
    1, with an empty virtual expert at their end:
        dispatch_src, dispatch_dst: [R * L] int64; dispatch_size: [R * L] int32.
        combine_src, combine_dst: [R * L] int64; combine_size: [R * L] int32.
        group_ends: [L] int64, inclusive end row of each local expert in the receive buffer.
        loads: [R] int64, rows that each rank receives.

    Nothing is read on the host.
    """
    return torch.ops.moe_ops.route_metadata(tokens_per_source, ep_rank, mode=mode)


def ep_remap(
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    expert_offset: int | None = None,
    num_local_experts: int | None = None,
    expert_map: Tensor | None = None,
    fill: str = "reuse",
) -> tuple[Tensor, Tensor]:
    """Global expert ids to this rank's local ids.

    Args:
        topk_ids: [T, K] int32 or int64, any strides.
        topk_weights: [T, K] float, any strides.
        expert_offset, num_local_experts: this rank owns the ids [offset, offset + num); or
        expert_map: [num_experts] int32, local id of each global id, negative for experts that live elsewhere.
        fill: what a slot without a local expert becomes, always with weight 0: "reuse" gives the smallest local id of
            its row, else of the batch, else 0, so that no further weights are read; "skip" gives -1.

    Returns:
        local_ids: [T, K] int32.
        local_weights: [T, K] float32; a foreign slot's weight is replaced, not multiplied.

    Differentiable in topk_weights.
    """
    return torch.ops.moe_ops.ep_remap(
        topk_ids,
        topk_weights,
        expert_offset=expert_offset,
        num_local_experts=num_local_experts,
        expert_map=expert_map,
        fill=fill,
    )


def fused_mxfp4_moe(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    *,
    w13_layout: str,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    activation: str = "silu",
    swiglu_limit: float | None = None,
    swiglu_alpha: float | None = None,
    expert_map: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    weight_layout: str = "checkpoint",
    after: Tensor | None = None,
) -> Tensor:
    """The routed experts: out[t] = sum over k of topk_weights[t, k] * down(act(gate(x[t]), up(x[t]))).

    Args:
        hidden_states: [T, H] bfloat16, float16 or float32; H a multiple of 32. float32 rows are computed in float32.
        topk_ids: [T, K] int32 or int64; an expert named twice in a row counts twice.
        topk_weights: [T, K] float, widened to float32, never renormalised; a slot of weight 0 is selected away. A
            routed scaling factor is folded in here by the caller.
        w13: [E, 2I, H / 2] uint8, two E2M1 codes a byte, low nibble first; I a multiple of 32.
        w13_scale: [E, 2I, H / 32] uint8 E8M0: 2^(s - 127), 255 is NaN.
        w2: [E, H, I / 2] uint8; w2_scale: [E, H, I / 32] uint8.
        w13_layout: order of w13's rows: "gate_up" is [gate; up], "up_gate" is [up; gate], "interleaved" alternates,
            gate first.
        w13_bias: [E, 2I] in w13's row order; w2_bias: [E, H].
        activation: "silu": gate * sigmoid(gate) * up; "swiglu_oai": gate * sigmoid(alpha * gate) * (up + 1).
        swiglu_limit: gate is clamped from above and up on both sides, before the activation. None: off for "silu", 7.0
            for "swiglu_oai".
        swiglu_alpha: of "swiglu_oai" only; None: 1.702.
        expert_map: [num_experts] int32, applied to topk_ids first; negative entries mean no expert here.
        out_dtype: dtype of the result; None: that of hidden_states.
        batch_invariant: a row's bits do not depend on the other rows of the batch.
        weight_layout: "checkpoint" for the shapes above, or the tag of prepared weights (`moe_ops.experts`).
        after: ticket of a `cpu_moe_submit` that must have been issued before this op.

    Returns:
        [T, H]; a row that no expert is left for is exactly 0.

    Same inputs, device and instruction set give the same bits, for any number of threads. Differentiable in
    hidden_states and topk_weights; the weights are frozen.
    """
    return torch.ops.moe_ops.fused_mxfp4_moe(
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
        out_dtype=out_dtype,
        batch_invariant=batch_invariant,
        weight_layout=weight_layout,
        after=after,
    )


def fused_mxfp4_moe_out(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    *,
    w13_layout: str,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    activation: str = "silu",
    swiglu_limit: float | None = None,
    swiglu_alpha: float | None = None,
    expert_map: Tensor | None = None,
    batch_invariant: bool = False,
    weight_layout: str = "checkpoint",
    after: Tensor | None = None,
    out: Tensor,
) -> None:
    """`fused_mxfp4_moe` into a tensor whose address must not change.

    Args:
        out: contiguous [T, H] bfloat16, float16 or float32, which decides the dtype of the result, sharing no memory
            with the inputs.
        The others are as in `fused_mxfp4_moe`.

    Raises for inputs that require a gradient. torch_npu's npugraphs backend does not take ops that write an argument.
    """
    torch.ops.moe_ops.fused_mxfp4_moe_out(
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
        batch_invariant=batch_invariant,
        weight_layout=weight_layout,
        after=after,
        out=out,
    )


def cpu_moe_submit(
    hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, engine: Tensor, *, max_deferred: int | None = None
) -> tuple[Tensor, Tensor]:
    """Start the experts that live in host memory, and return before they have finished.

    The inputs are copied; the caller may overwrite them at once. On an accelerator everything happens in stream order.

    Args:
        hidden_states: [T, H] bfloat16, float16 or float32.
        topk_ids: [T, K] int32 or int64, ids of the engine's experts.
        topk_weights: [T, K] float.
        engine: int64[1], the handle of a `moe_ops.CpuMoeEngine`: a CPU tensor is read at the call (and baked at
            capture), a device tensor is read by the worker in stream order.
        max_deferred: up to this many of a token's slots, those of lowest weight, run one layer late.

    Returns:
        ticket: int64[1] on the device of hidden_states, good for one `cpu_moe_sync`.
        deferred_ticket: int64[1], the deferred part, 0 where there is none; any later `cpu_moe_sync` takes it.

    Raises for hidden_states or topk_weights that require a gradient: the CPU experts have none.
    """
    return torch.ops.moe_ops.cpu_moe_submit(hidden_states, topk_ids, topk_weights, engine, max_deferred=max_deferred)


def cpu_moe_sync(
    ticket: Tensor,
    device_out: Tensor,
    *,
    deferred_ticket: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """device_out + the CPU experts' part of `ticket` (+ the part of `deferred_ticket`), rounded once.

    Args:
        ticket: int64[1] from `cpu_moe_submit`.
        device_out: [T, H] of the same T and H as the submit.
        deferred_ticket: int64[1] of an earlier submit.
        out_dtype: dtype of the result; None: that of device_out.

    Returns:
        [T, H], a fresh tensor.

    The gradient goes to device_out only.
    """
    return torch.ops.moe_ops.cpu_moe_sync(ticket, device_out, deferred_ticket=deferred_ticket, out_dtype=out_dtype)
