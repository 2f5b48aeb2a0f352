"""A pytest plugin: failures go to $MOE_OPS_FAILURES as they happen, so that a run that is cut off has lost none."""

from __future__ import annotations

import os

import pytest

LINES = 45  # of a failure's text, its end


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Called in the process that reports, for the tests of all workers."""
    path = os.environ.get("MOE_OPS_FAILURES")
    if path is None or not report.failed or "PYTEST_XDIST_WORKER" in os.environ:
        return
    text = report.longreprtext.splitlines()
    with open(path, "a") as file:
        file.write(f"==== FAILED {report.nodeid} ({report.when}) ====\n")
        file.write("\n".join(text[-LINES:]) + "\n")
