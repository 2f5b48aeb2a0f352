"""Which device this is, and which torch_npu operators may be used on it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from types import ModuleType

import torch

# Prefixes of torch.npu.get_device_name(): the generations whose operator contracts docs/npu.md lists.
FAMILIES = {"Ascend910B": "A2", "Ascend910_93": "A3", "Ascend950": "A5"}


def require_npu(op: str) -> None:
    """PrivateUse1 may belong to another backend, which would otherwise be handed these kernels."""
    backend = torch._C._get_privateuse1_backend_name()
    if backend != "npu":
        raise RuntimeError(f"{op}: the PrivateUse1 kernels are for 'npu' (torch_npu), and this backend is '{backend}'")


@cache
def runtime() -> ModuleType:
    """torch.npu."""
    return torch.get_device_module("npu")


@cache
def _family(index: int) -> str:
    name = runtime().get_device_name(index)
    return next((family for prefix, family in FAMILIES.items() if name.startswith(prefix)), "")


def family(device: torch.device) -> str:
    """'A2', 'A3', 'A5', or '' for a device whose operators are not known: it gets the plain ATen compositions."""
    return _family(runtime().current_device() if device.index is None else device.index)


def has_operator(device: torch.device, name: str) -> bool:
    """Whether torch.ops.npu.<name> exists and its contract on this device is known."""
    return bool(family(device)) and hasattr(torch.ops.npu, name)


def on_device(device: torch.device) -> AbstractContextManager[None]:
    return runtime().device(device)


def is_capturing() -> bool:
    return runtime().is_current_stream_capturing()
