"""Routed experts over MXFP4 weights: out[t] = sum over k of weight[t, k] * down(act(gate(x[t]), up(x[t]))).

Everything is float32 from the exact weights to the sum in slot order, which is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_ops.meta.fused_mxfp4_moe import resolve_activation
from moe_ops.reference.ep_remap import local_ids
from moe_ops.reference.mxfp4 import dequantize_mxfp4


def split_gate_up(rows: torch.Tensor, w13_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate, up) of the last dimension of [..., 2I]."""
    if w13_layout == "interleaved":
        return rows[..., 0::2], rows[..., 1::2]
    first, second = rows.chunk(2, dim=-1)
    return (first, second) if w13_layout == "gate_up" else (second, first)


def swiglu(gate: torch.Tensor, up: torch.Tensor, activation: str, limit: float | None, alpha: float) -> torch.Tensor:
    """gate * sigmoid(alpha * gate) * up, or * (up + 1) for "swiglu_oai"; the gate is clamped from above only.

    "silu" with a limit: the DeepSeek-V4 expert; "swiglu_oai": the gpt-oss expert.
    """
    if limit is not None:
        limit = min(limit, torch.finfo(torch.float32).max)  # a larger one limits nothing
        gate = gate.clamp(max=limit)
        up = up.clamp(min=-limit, max=limit)
    if activation == "swiglu_oai":
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    return gate * torch.sigmoid(gate) * up


def moe_float32(
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
    select_zero_weights: bool = True,
    rounded: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """The float32 sum before rounding, differentiable in hidden_states and topk_weights.

    rounded: what kernels of lower precision do to the rows of both matrices."""
    activation, limit, alpha = resolve_activation("fused_mxfp4_moe", activation, swiglu_limit, swiglu_alpha)
    num_tokens, hidden_size = hidden_states.shape
    num_experts = w13.shape[0]
    if expert_map is None:
        ids = local_ids(topk_ids, 0, num_experts, None)
    else:
        ids = local_ids(topk_ids, None, None, expert_map)
        ids = torch.where(ids < num_experts, ids, -1)
    x = hidden_states.to(torch.float32)
    if rounded is not None:
        x = rounded(x)
    weights = topk_weights.to(torch.float32)
    top_k = ids.shape[1]
    contributions = [torch.zeros(num_tokens, hidden_size, dtype=torch.float32, device=x.device) for _ in range(top_k)]
    for expert in ids.unique().tolist():
        if expert < 0:
            continue
        gate_up = dequantize_mxfp4(w13[expert], w13_scale[expert])  # [2I, H]
        down = dequantize_mxfp4(w2[expert], w2_scale[expert])  # [H, I]
        for k in range(top_k):
            chosen = ids[:, k] == expert
            if select_zero_weights:
                chosen = chosen & (weights[:, k] != 0)
            token = torch.nonzero(chosen).reshape(-1)
            used = (weights[token, k] != 0).unsqueeze(1)
            rows = torch.where(used, x[token], x[token].detach()) @ gate_up.t()  # [n, 2I]
            if w13_bias is not None:
                rows = rows + w13_bias[expert].to(torch.float32)
            hidden = swiglu(*split_gate_up(rows, w13_layout), activation, limit, alpha)  # [n, I]
            if rounded is not None:
                hidden = rounded(hidden)
            y = hidden @ down.t()  # [n, H]
            if w2_bias is not None:
                y = y + w2_bias[expert].to(torch.float32)
            contributions[k] = contributions[k].index_put((token,), y * weights[token, k].unsqueeze(1))
    total = torch.zeros(num_tokens, hidden_size, dtype=torch.float32, device=x.device)
    for contribution in contributions:
        total = total + contribution
    return total


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
    weight_layout: str = "checkpoint",
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    if weight_layout != "checkpoint":
        raise ValueError(f"fused_mxfp4_moe: weight_layout must be 'checkpoint', got '{weight_layout}'")
    total = moe_float32(
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
    )
    return total.to(hidden_states.dtype if out_dtype is None else out_dtype)
