"""fused_mxfp4_moe_out on CUDA."""

from __future__ import annotations

from typing import Any

import torch

from moe_ops.meta.fused_mxfp4_moe import CHECKPOINT
from moe_ops.meta.fused_mxfp4_moe_out import check_out_overlap
from moe_ops.meta.fused_mxfp4_moe_out import fused_mxfp4_moe_out as check
from moe_ops.triton._matrix import CheckpointMatrix
from moe_ops.triton.fused_mxfp4_moe import compute, prepared


def fused_mxfp4_moe_out(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    *,
    out: torch.Tensor,
    batch_invariant: bool = False,
    weight_layout: str = CHECKPOINT,
    after: torch.Tensor | None = None,
    **options: Any,
) -> None:
    op = "fused_mxfp4_moe_out"
    args = (hidden_states, topk_ids, topk_weights, w13, w13_scale, w2, w2_scale)
    check(*args, out=out, batch_invariant=batch_invariant, weight_layout=weight_layout, after=after, **options)
    check_out_overlap(out, *args, **options)
    if weight_layout == CHECKPOINT:
        matrices = CheckpointMatrix(w13, w13_scale), CheckpointMatrix(w2, w2_scale)
        compute(op, out, *args[:3], *matrices, batch_invariant=batch_invariant, **options)
    else:
        prepared(op, weight_layout, out, *args, batch_invariant=batch_invariant, **options)
