"""fused_mxfp4_moe_out on NPU: the float32 sum of fused_mxfp4_moe, rounded into `out`."""

from __future__ import annotations

from typing import Any

import torch

from moe_ops.meta.fused_mxfp4_moe_out import check_out_overlap
from moe_ops.meta.fused_mxfp4_moe_out import fused_mxfp4_moe_out as check
from moe_ops.npu._device import require_npu
from moe_ops.npu.fused_mxfp4_moe import expert_sum


def fused_mxfp4_moe_out(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *weights: torch.Tensor,
    out: torch.Tensor,
    batch_invariant: bool = False,
    after: torch.Tensor | None = None,
    **options: Any,
) -> None:
    op = "fused_mxfp4_moe_out"
    require_npu(op)
    check(hidden_states, topk_ids, topk_weights, *weights, out=out, after=after, **options)
    check_out_overlap(out, hidden_states, topk_ids, topk_weights, *weights, **options)
    out.copy_(expert_sum(op, hidden_states, topk_ids, topk_weights, *weights, **options))
