"""fused_mxfp4_moe_out on CUDA."""

from __future__ import annotations

from typing import Any

import torch

from moe_ops.meta.fused_mxfp4_moe import CHECKPOINT
from moe_ops.meta.fused_mxfp4_moe_out import check_out_overlap
from moe_ops.meta.fused_mxfp4_moe_out import fused_mxfp4_moe_out as check
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
    check_out_overlap(out, *args, **options)
    if weight_layout == CHECKPOINT:
        compute(op, out, *args, batch_invariant=batch_invariant, **options)
    else:
        prepared(op, weight_layout, out, *args, batch_invariant=batch_invariant, **options)
