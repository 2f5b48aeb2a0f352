"""Which experts live where, and which slots of a token may run late."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops._errors import require
from moe_ops.meta._checks import IDS, check_weights


def select_deferred_experts(topk_ids: Tensor, topk_weights: Tensor, max_deferred: int) -> tuple[Tensor, Tensor]:
    """Split ids into those that run now and those that may run one layer late, token by token.

    Up to max_deferred valid slots of a token, those of lowest weight, are deferred. Of two equal weights the lower slot
    stays immediate; a NaN weight counts as the largest; a slot of weight 0 is no work and stays. A token's split does
    not depend on the other tokens.

    topk_ids:     [T, K] int32 or int64; a negative id is no expert and stays -1 in both results.
    topk_weights: [T, K] float.
    Returns (immediate, deferred), both like topk_ids; each valid id is in exactly one of them, the other holds -1.
    """
    op = "select_deferred_experts"
    ok = topk_ids.dim() == 2 and topk_ids.dtype in IDS
    require(ok, op, "topk_ids", "[num_tokens, top_k] int32 or int64", topk_ids)
    check_weights(op, topk_weights, *topk_ids.shape)
    valid = topk_ids >= 0
    weights = topk_weights.to(torch.float32)
    weights = torch.where(torch.isnan(weights), torch.inf, weights)
    # Ascending and stable over reversed slots: of equal weights the higher slot comes first. No work comes last.
    work = valid & (weights != 0)
    order = torch.where(work, weights, torch.inf).flip(1).argsort(dim=1, stable=True)
    order = topk_ids.shape[1] - 1 - order
    # Work of weight inf must still come before what is none.
    order = order.gather(1, (~work).gather(1, order).to(torch.int8).argsort(dim=1, stable=True))
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    late = work & (rank < max_deferred)
    none = torch.full_like(topk_ids, -1)
    return torch.where(valid & ~late, topk_ids, none), torch.where(late, topk_ids, none)


def gpu_expert_masks(frequencies: Tensor, num_gpu_experts: int) -> Tensor:
    """The most used experts of a whole model: True for the num_gpu_experts largest entries over layers x experts.

    frequencies: [L, E] real, on any device, any strides.
    num_gpu_experts: clamped to [0, L * E].
    Returns [L, E] bool on the CPU. Of equal frequencies the earlier layer, then the lower expert, comes first; NaN
    counts as the smallest.
    """
    require(frequencies.dim() == 2, "gpu_expert_masks", "frequencies", "[num_layers, num_experts]", frequencies)
    flat = frequencies.detach().to("cpu", torch.float64).reshape(-1)
    flat = torch.where(torch.isnan(flat), -torch.inf, flat)
    count = min(max(int(num_gpu_experts), 0), flat.numel())
    mask = torch.zeros(flat.numel(), dtype=torch.bool)
    mask[flat.argsort(descending=True, stable=True)[:count]] = True
    return mask.reshape(frequencies.shape)
