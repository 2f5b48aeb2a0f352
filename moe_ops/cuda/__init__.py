"""Kernels for NVIDIA Hopper: their packed weight layout, and what calls them.

    prepared = moe_ops.cuda.prepare(experts)     # Mxfp4Experts on a Hopper card; elsewhere it stays what it is
    moe_ops.cuda.warm_up(prepared.arguments(), top_k=4)
    out = moe_ops.fused_mxfp4_moe(hidden_states, topk_ids, topk_weights, **prepared.arguments())

Importing this touches no device.
"""

from moe_ops.cuda.plans import cache_file, report, report_text
from moe_ops.cuda.prepare import ALL_SCALES, E4M3, LAYOUT, layout_for, prepare, prepare_sm90, sm90_reason
from moe_ops.cuda.tuning import autotune, geometry_of, warm_up

__all__ = [
    "ALL_SCALES",
    "E4M3",
    "LAYOUT",
    "autotune",
    "cache_file",
    "geometry_of",
    "layout_for",
    "prepare",
    "prepare_sm90",
    "report",
    "report_text",
    "sm90_reason",
    "warm_up",
]
