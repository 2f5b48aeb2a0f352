"""What the ops do on the NPUs of this machine, in lines for `python -m moe_ops info`."""

from __future__ import annotations

import os

import torch

from moe_ops.npu import _native, mx
from moe_ops.npu._callbacks import external_subscriber, only_callbacks
from moe_ops.npu._device import FAMILIES, family, has_operator, runtime

_OPERATORS = ("npu_moe_init_routing_v2", "npu_grouped_matmul", "npu_swiglu", "npu_clipped_swiglu")


def describe_device(index: int) -> str:
    device = torch.device("npu", index)
    kind = family(device)
    missing = [name for name in _OPERATORS if not has_operator(device, name)]
    if not kind:
        known = ", ".join(f"{prefix}*" for prefix in FAMILIES)
        path = f"a name that is not known ({known} are): plain ATen compositions"
    elif missing:
        path = f"{kind}; plain ATen instead of {', '.join(missing)}"
    else:
        native = f", or multiplied as it is once prepared ({mx.LAYOUT})" if kind == "A5" else ""
        path = f"{kind}: fused routing, grouped matmul, fused activations; MXFP4 dequantised{native}"
    return f"npu:{index} {runtime().get_device_name(index)}, {path}"


def describe_callbacks() -> str:
    """How CPU experts are coupled to streams."""
    acl = _native.runtime()
    if os.environ.get("MOE_OPS_SYNC", "0") not in ("", "0"):
        return "CPU experts: synchronous (MOE_OPS_SYNC)"
    if acl.has("aclrtLaunchHostFunc") and not only_callbacks():
        return "CPU experts: aclrtLaunchHostFunc, aclrtLaunchCallback on streams that the application has subscribed"
    if acl.has("aclrtLaunchCallback"):
        who = "the application subscribes" if external_subscriber() else "streams are subscribed by a thread of moe_ops"
        return f"CPU experts: aclrtLaunchCallback, {who}"
    return "CPU experts: synchronous, since this CANN has no host callbacks"


def lines() -> list[str]:
    return [*(describe_device(index) for index in range(runtime().device_count())), describe_callbacks()]
