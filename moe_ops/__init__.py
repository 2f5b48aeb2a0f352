"""Mixture-of-experts stages as PyTorch operators: `torch.ops.moe_ops.*`.

Importing the package registers the ops: schemas, fake kernels, the native libraries that were built, Triton and NPU
kernels, autograd rules. None of the backends is needed to import it; what is missing and why is in `python -m moe_ops
info`.
"""

import warnings

from moe_ops import _installation, _register, autograd, cuda
from moe_ops._version import __version__

if _clash := _installation.clash():
    warnings.warn(_clash, RuntimeWarning, stacklevel=2)

_register.define()
_register.register_fakes()
_register.register_kernels(_register.load_native())
autograd.register()

from moe_ops.cpu_experts import CpuExperts  # noqa: E402
from moe_ops.engine import CpuMoeEngine  # noqa: E402
from moe_ops.experts import Mxfp4Experts, PreparedExperts  # noqa: E402
from moe_ops.hybrid import HybridExperts  # noqa: E402
from moe_ops.modules import FusedMxfp4Experts  # noqa: E402
from moe_ops.ops import (  # noqa: E402  (the ops must exist before the functions that call them)
    cpu_moe_submit,
    cpu_moe_sync,
    ep_remap,
    fused_mxfp4_moe,
    fused_mxfp4_moe_out,
    route_metadata,
    topk_permute,
    topk_permute_out,
    topk_unpermute,
)
from moe_ops.placement import gpu_expert_masks, select_deferred_experts  # noqa: E402

__all__ = [
    "CpuExperts",
    "CpuMoeEngine",
    "FusedMxfp4Experts",
    "HybridExperts",
    "Mxfp4Experts",
    "PreparedExperts",
    "__version__",
    "cpu_moe_submit",
    "cpu_moe_sync",
    "cuda",
    "ep_remap",
    "fused_mxfp4_moe",
    "fused_mxfp4_moe_out",
    "gpu_expert_masks",
    "route_metadata",
    "select_deferred_experts",
    "topk_permute",
    "topk_permute_out",
    "topk_unpermute",
]
