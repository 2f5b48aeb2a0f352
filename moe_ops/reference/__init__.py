"""The semantics of every op in plain PyTorch, one file per op: the oracle that all kernels are compared with.

Readable before fast; every function has the signature of its op and works on any device.
"""

from moe_ops.reference.cpu_moe_submit import cpu_moe_submit
from moe_ops.reference.cpu_moe_sync import cpu_moe_sync
from moe_ops.reference.ep_remap import ep_remap
from moe_ops.reference.fused_mxfp4_moe import fused_mxfp4_moe
from moe_ops.reference.fused_mxfp4_moe_backward import fused_mxfp4_moe_backward
from moe_ops.reference.fused_mxfp4_moe_out import fused_mxfp4_moe_out
from moe_ops.reference.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from moe_ops.reference.route_metadata import route_metadata
from moe_ops.reference.topk_permute import topk_permute
from moe_ops.reference.topk_permute_out import topk_permute_out
from moe_ops.reference.topk_unpermute import topk_unpermute
from moe_ops.reference.topk_unpermute_backward import topk_unpermute_backward

__all__ = [
    "cpu_moe_submit",
    "cpu_moe_sync",
    "dequantize_mxfp4",
    "ep_remap",
    "fused_mxfp4_moe",
    "fused_mxfp4_moe_backward",
    "fused_mxfp4_moe_out",
    "quantize_mxfp4",
    "route_metadata",
    "topk_permute",
    "topk_permute_out",
    "topk_unpermute",
    "topk_unpermute_backward",
]
