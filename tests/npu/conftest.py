"""Tests of the NPU backend. Each module runs in a process of its own: see run.py."""

from __future__ import annotations

import contextlib
import importlib.util
import os

import pytest

# Where torch_npu is installed without CANN, `import torch` fails as long as it loads backends by itself.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

if importlib.util.find_spec("torch_npu") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from tests.npu import device

    device.load()

    def pytest_report_header() -> str:
        return device.describe()

    def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
        if device.ON_HARDWARE:
            skip = pytest.mark.skip(reason="examines the simulation")
            for item in items:
                if "simulation" in item.keywords:
                    item.add_marker(skip)

    def pytest_configure(config: pytest.Config) -> None:
        config.addinivalue_line("markers", "simulation: examines the simulated runtime; skipped on hardware")

    @pytest.fixture
    def stream():
        """A stream to capture on. A failed capture leaves the current stream changed, and torch_npu's task queue
        drops what is queued after an error until somebody synchronises."""
        import torch

        yield torch.npu.Stream()
        torch.npu.set_stream(torch.npu.default_stream())
        with contextlib.suppress(RuntimeError):
            torch.npu.synchronize()
