"""A pytest plugin of scripts/test-gpu: failures go to $MOE_OPS_FAILURES as they happen, so that a run that is cut off
has lost none; tests that take tens of seconds come first, so that the last worker is not alone with one of them."""

from __future__ import annotations

import os

import pytest

LINES = 45  # of a failure's text, its end
SLOW = ("package", "test_stress", "test_compiles_whole", "compile", "test_lifecycle", "test_cuda_engine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {name: rank for rank, name in enumerate(SLOW)}
    items.sort(key=lambda item: min([ranks[name] for name in SLOW if name in item.nodeid], default=len(SLOW)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Called in the process that reports, for the tests of all workers."""
    path = os.environ.get("MOE_OPS_FAILURES")
    if path is None or not report.failed or "PYTEST_XDIST_WORKER" in os.environ:
        return
    text = report.longreprtext.splitlines()
    with open(path, "a") as file:
        file.write(f"==== FAILED {report.nodeid} ({report.when}) ====\n")
        file.write("\n".join(text[-LINES:]) + "\n")
