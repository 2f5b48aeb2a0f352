"""Checks of fused_mxfp4_moe_out, which has no outputs of its own."""

from __future__ import annotations

from typing import Any

import torch

from moe_ops._errors import rank, require
from moe_ops.meta._checks import FLOATS, FLOATS_TEXT, check_device, check_ticket
from moe_ops.meta.fused_mxfp4_moe import check_moe
from moe_ops.meta.topk_permute_out import check_no_overlap

_TENSORS = ("hidden_states", "topk_ids", "topk_weights", "w13", "w13_scale", "w2", "w2_scale")
_OPTIONAL_TENSORS = ("w13_bias", "w2_bias", "expert_map")


def fused_mxfp4_moe_out(
    hidden_states: torch.Tensor,
    *args: Any,
    out: torch.Tensor,
    batch_invariant: bool = False,
    after: torch.Tensor | None = None,
    **options: Any,
) -> None:
    op = "fused_mxfp4_moe_out"
    check_moe(op, hidden_states, *args, **options)
    check_ticket(op, "after", after)
    check_device(op, hidden_states, after=after, out=out)
    num_tokens, hidden_size = hidden_states.shape
    ok = rank(out) == 2 and out.dtype in FLOATS and out.is_contiguous()
    ok = ok and out.shape[0] == num_tokens and out.shape[1] == hidden_size
    require(ok, op, "out", f"a contiguous [{num_tokens}, {hidden_size}] {FLOATS_TEXT}", out)


def check_out_overlap(out: torch.Tensor, *tensors: torch.Tensor, **options: Any) -> None:
    """Real tensors only: `out` may not share memory with an input."""
    optional = {name: options.get(name) for name in _OPTIONAL_TENSORS}
    check_no_overlap("fused_mxfp4_moe_out", out, **dict(zip(_TENSORS, tensors, strict=True)), **optional)
