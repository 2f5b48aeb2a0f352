"""fused_mxfp4_moe_out on CUDA."""

from __future__ import annotations

from typing import Any

import torch

from moe_ops.meta.fused_mxfp4_moe import CHECKPOINT
from moe_ops.meta.fused_mxfp4_moe_out import fused_mxfp4_moe_out as check
from moe_ops.meta.topk_permute_out import check_no_overlap
from moe_ops.triton.fused_mxfp4_moe import compute, prepared


def fused_mxfp4_moe_out(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *weights: torch.Tensor,
    out: torch.Tensor,
    batch_invariant: bool = False,
    weight_layout: str = CHECKPOINT,
    after: torch.Tensor | None = None,
    **options: Any,
) -> None:
    op = "fused_mxfp4_moe_out"
    args = (hidden_states, topk_ids, topk_weights, *weights)
    check(*args, out=out, batch_invariant=batch_invariant, weight_layout=weight_layout, after=after, **options)
    names = ("hidden_states", "topk_ids", "topk_weights", "w13", "w13_scale", "w2", "w2_scale")
    optional = {name: options.get(name) for name in ("w13_bias", "w2_bias", "expert_map")}
    check_no_overlap(op, out, **dict(zip(names, args, strict=True)), **optional)
    if weight_layout == CHECKPOINT:
        compute(op, out, *args, batch_invariant=batch_invariant, **options)
    else:
        prepared(op, weight_layout, out, *args, batch_invariant=batch_invariant, **options)
