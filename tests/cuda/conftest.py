"""Tests marked `gpu` need a CUDA device: run with MOE_OPS_TEST_BACKEND=cuda, by scripts/test-gpu. The others need none
and run beside the CPU's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import BACKEND


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("gpu") and BACKEND != "cuda":
            item.add_marker(pytest.mark.skip(reason="needs MOE_OPS_TEST_BACKEND=cuda"))
