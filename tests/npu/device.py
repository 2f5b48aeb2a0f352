"""The NPU that the tests run on: the simulated CANN runtime, or real hardware where MOE_OPS_TEST_NPU=hardware."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import ModuleType

ON_HARDWARE = os.environ.get("MOE_OPS_TEST_NPU", "simulation") == "hardware"


def load() -> ModuleType:
    """Imports torch_npu, over the simulation unless the tests run on hardware, and selects device 0."""
    if ON_HARDWARE:
        import torch_npu
    else:
        from tests.npu.sim import loader

        torch_npu = loader.load(devices=2, hbm_mb=16384, strict=1)
    import torch

    torch.npu.set_device(0)
    return torch_npu


def describe() -> str:
    """What the tests ran on, for the report header."""
    import torch

    where = "hardware" if ON_HARDWARE else "simulated CANN runtime"
    return f"npu: {torch.npu.get_device_name(0)} ({where}), torch {torch.__version__}"


@contextlib.contextmanager
def slow_device() -> Iterator[None]:
    """Delays every simulated device task, so that a missing synchronisation shows. Hardware is slow enough as it is."""
    if ON_HARDWARE:
        yield
        return
    from tests.npu.sim import loader

    with loader.task_delay(2000):
        yield
