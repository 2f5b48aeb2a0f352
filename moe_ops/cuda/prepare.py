"""Packing MXFP4 checkpoint tensors for the Hopper kernels: in place, one expert at a time."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

import torch

from moe_ops import _repacked
from moe_ops._errors import require
from moe_ops.cuda.layout import GROUP, STRIP, pack_codes, pack_scales, w13_row_order
from moe_ops.meta.fused_mxfp4_moe import PREPARED_LAYOUTS, W13_LAYOUTS, PreparedLayout, checkpoint_geometry

if TYPE_CHECKING:
    from moe_ops.experts import Mxfp4Experts, PreparedExperts

LAYOUT = "sm90_v1"
# The same bytes, with scale codes from 0 to 255: slower kernels, as exact.
ALL_SCALES = "sm90_v1_all_scales"
# The same bytes as well; the kernels may round activations to e4m3 where an expert has many rows.
E4M3 = "sm90_v1_e4m3"
LAYOUTS = (LAYOUT, ALL_SCALES, E4M3)

# Scale codes of weights that are normal bfloat16 numbers and one multiplication away from their codes: 2^-126 to 2.
LEAST_SCALE, MOST_SCALE = 1, 128
NAN_SCALE = 255
# How far a scale code may be under and over the first one of its row, so that e4m3 holds the row's weights exactly:
# 0.5 * 2^-8 is the least subnormal, 6 * 2^6 is under 448. As in csrc/cuda/fused_mxfp4_moe_sm90.h.
E4M3_BELOW, E4M3_ABOVE = 8, 6


def _geometry(
    op: str, hidden_size: int, w13: torch.Tensor, w13_scale: torch.Tensor, w2: torch.Tensor, w2_scale: torch.Tensor
) -> tuple[int, int]:
    ok = w13.dim() == 4 and w13.dtype == torch.uint8 and w13.shape[2] == STRIP
    require(ok, op, "w13", f"[num_experts, strips, {STRIP}, hidden_size / 2] uint8 for weight_layout '{LAYOUT}'", w13)
    num_experts, intermediate = w13.shape[0], w13.shape[1] * 8
    shapes = {
        "w13": (w13, (num_experts, intermediate // 8, STRIP, hidden_size // 2)),
        "w13_scale": (w13_scale, (num_experts, intermediate // 8, STRIP, hidden_size // GROUP)),
        "w2": (w2, (num_experts, hidden_size // STRIP, STRIP, intermediate // 2)),
        "w2_scale": (w2_scale, (num_experts, hidden_size // STRIP, STRIP, intermediate // GROUP)),
    }
    for name, (tensor, shape) in shapes.items():
        ok = tensor.dtype == torch.uint8 and tensor.dim() == 4 and tensor.is_contiguous()
        ok = ok and all(actual == expected for actual, expected in zip(tensor.shape, shape, strict=True))
        require(ok, op, name, f"a contiguous {list(shape)} uint8", tensor)
    return num_experts, intermediate


for _layout in LAYOUTS:
    PREPARED_LAYOUTS[_layout] = PreparedLayout("cuda", _geometry)


def sm90_reason(w13: torch.Tensor, w13_scale: torch.Tensor, w2: torch.Tensor, w2_scale: torch.Tensor) -> str | None:
    """Why these checkpoint tensors cannot have the Hopper kernels, in one line, or None."""
    from moe_ops._register import MISSING

    if os.environ.get("MOE_OPS_SM90", "1") == "0":
        return "MOE_OPS_SM90=0"

    if ("_sm90_decode", "CUDA") in MISSING:
        return MISSING["_sm90_decode", "CUDA"]
    if w13.device.type != "cuda":
        return f"the weights are on {w13.device.type}, not on a CUDA device"
    capability = torch.cuda.get_device_capability(w13.device)
    if capability != (9, 0):
        return f"the device has compute capability {capability[0]}.{capability[1]}, not 9.0"
    return None


def _outside(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of one expert's matrix whose scale codes are not among those of LAYOUT: those of zeros, to which any
    finite scale gives the same value, and the others."""
    outside = (scale < LEAST_SCALE) | (scale > MOST_SCALE)
    if not outside.any():
        return outside, outside
    zeros = (codes.view(*scale.shape, GROUP // 2) & 0x77).amax(-1) == 0
    harmless = outside & zeros & (scale != NAN_SCALE)
    return harmless, outside & ~harmless


def scales_outside(codes: torch.Tensor, scale: torch.Tensor) -> int:
    """How many blocks of 32 weights LAYOUT does not hold exactly. Waits for the device."""
    return sum(int(_outside(*expert)[1].sum()) for expert in zip(codes, scale, strict=True))


def _e4m3_bases(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one expert's matrix: blocks of zeros, and the scale codes of the first other block of each row."""
    zeros = (codes.view(*scale.shape, GROUP // 2) & 0x77).amax(-1) == 0
    zeros &= scale != NAN_SCALE
    base = scale.gather(1, (~zeros).to(torch.uint8).argmax(1, keepdim=True))
    return zeros, torch.where(zeros.all(1, keepdim=True), MOST_SCALE - 1, base)


def e4m3_outside(codes: torch.Tensor, scale: torch.Tensor) -> int:
    """How many blocks of 32 weights E4M3 does not hold exactly. Waits for the device."""
    total = 0
    for expert_codes, expert_scale in zip(codes, scale, strict=True):
        zeros, base = _e4m3_bases(expert_codes, expert_scale)
        distance = expert_scale.to(torch.int16) - base.to(torch.int16)
        outside = (expert_scale < LEAST_SCALE) | (expert_scale > MOST_SCALE)
        outside |= (distance < -E4M3_BELOW) | (distance > E4M3_ABOVE)
        total += int((outside & ~zeros).sum())
    return total


def layout_for(w13: torch.Tensor, w13_scale: torch.Tensor, w2: torch.Tensor, w2_scale: torch.Tensor) -> str:
    """LAYOUT, or ALL_SCALES where blocks need it."""
    return ALL_SCALES if scales_outside(w13, w13_scale) or scales_outside(w2, w2_scale) else LAYOUT


def _pack(codes: torch.Tensor, scale: torch.Tensor, w13_layout: str | None) -> None:
    """One expert's matrix, in place; a copy of it lives besides. w13_layout: None for w2."""
    source, source_scale = codes.clone(), scale.clone()
    if codes.is_cuda:
        from moe_ops.cuda._repack import repack

        repack(source[None], source_scale[None], codes[None], scale[None], w13_layout, pack=True)
        return
    order = None if w13_layout is None else w13_row_order(codes.shape[0] // 2, w13_layout)
    for target, rows, pack in ((codes, source, pack_codes), (scale, source_scale, pack_scales)):
        target.copy_(pack(rows if order is None else rows[order]).view(target.shape))


def prepare_sm90(
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    *,
    w13_layout: str,
    weight_layout: str = LAYOUT,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pack contiguous checkpoint tensors inside their own storage; (w13, w13_scale, w2, w2_scale) for
    `fused_mxfp4_moe(..., weight_layout=...)`, of rank 4.

    The checkpoint tensors are consumed: their bytes are the packed ones afterwards. Memory beyond the weights: one
    expert. `w13_layout` stays an argument of the op, for the bias. Weights that were prepared already, or whose scales
    "sm90_v1" does not hold exactly, are refused by name, before anything is changed: `layout_for` says which layout
    does, and `e4m3_outside` whether "sm90_v1_e4m3" may. Blocks of zeros get a scale that the layout has.
    """
    op = "prepare_sm90"
    known = f"'{LAYOUT}', '{ALL_SCALES}' or '{E4M3}'"
    require(weight_layout in LAYOUTS, op, "weight_layout", known, f"'{weight_layout}'")
    require(w13_layout in W13_LAYOUTS, op, "w13_layout", "'gate_up', 'up_gate' or 'interleaved'", f"'{w13_layout}'")
    for name, tensor in (("w13", w13), ("w13_scale", w13_scale), ("w2", w2), ("w2_scale", w2_scale)):
        fresh = tensor.dim() == 3 and not _repacked.is_marked(tensor)
        require(fresh, op, name, "a checkpoint tensor of 3 dimensions, not prepared before", tensor)
    hidden_size = w13.shape[2] * 2
    num_experts, intermediate = checkpoint_geometry(op, hidden_size, w13, w13_scale, w2, w2_scale)
    for name, codes, scale in (("w13_scale", w13, w13_scale), ("w2_scale", w2, w2_scale)):
        if weight_layout == E4M3:
            outside = e4m3_outside(codes, scale)
            near = f"of codes at most {E4M3_BELOW} under and {E4M3_ABOVE} over the first of their row"
            require(outside == 0, op, name, near, f"{outside} codes outside")
        outside = scales_outside(codes, scale) if weight_layout == LAYOUT else 0
        require(outside == 0, op, name, f"of codes {LEAST_SCALE} to {MOST_SCALE}", f"{outside} codes outside")
    strips13, strips2 = intermediate // 8, hidden_size // STRIP
    _repacked.mark(w13, w13_scale, w2, w2_scale)
    with torch.no_grad():
        for expert in range(num_experts):
            for codes, scale, layout in ((w13, w13_scale, w13_layout), (w2, w2_scale, None)):
                if weight_layout == E4M3:
                    zeros, base = _e4m3_bases(codes[expert], scale[expert])
                    scale[expert].copy_(torch.where(zeros, base, scale[expert]))
                else:
                    harmless, _ = _outside(codes[expert], scale[expert])
                    scale[expert].masked_fill_(harmless, MOST_SCALE)
                _pack(codes[expert], scale[expert], layout)
    return (
        w13.view(num_experts, strips13, STRIP, -1),
        w13_scale.view(num_experts, strips13, STRIP, -1),
        w2.view(num_experts, strips2, STRIP, -1),
        w2_scale.view(num_experts, strips2, STRIP, -1),
    )


def prepare(experts: Mxfp4Experts, *, layout: str = LAYOUT) -> PreparedExperts | Mxfp4Experts:
    """Pack experts on a Hopper card, in place. Where the kernels do not apply, one warning says why, and the experts
    stay as they are, for the portable kernel: both results have `arguments()`.

    layout: "sm90_v1", or "sm90_v1_e4m3" for activations that may be rounded to e4m3 in large batches; experts whose
    weights e4m3 does not hold exactly are packed as "sm90_v1" then, with a warning that says so."""
    reason = sm90_reason(experts.w13, experts.w13_scale, experts.w2, experts.w2_scale)
    if reason is not None:
        warnings.warn(f"moe_ops: the portable kernel serves these experts: {reason}", stacklevel=2)
        return experts
    return experts.prepare(layout)
