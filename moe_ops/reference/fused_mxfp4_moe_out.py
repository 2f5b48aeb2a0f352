"""fused_mxfp4_moe into a caller's tensor, whose dtype is that of the result."""

from __future__ import annotations

from typing import Any

import torch

from moe_ops.reference.fused_mxfp4_moe import fused_mxfp4_moe


def fused_mxfp4_moe_out(*args: Any, out: torch.Tensor, **options: Any) -> None:
    out.copy_(fused_mxfp4_moe(*args, out_dtype=out.dtype, **options))
