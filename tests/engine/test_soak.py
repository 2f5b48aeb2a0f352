"""Engines under mixed load: soak.py, for seconds in CI and for ten minutes in scripts/test-full."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("seconds", [8, pytest.param(600, marks=pytest.mark.heavy)])
def test_soak(seconds):
    """In a process of its own, whose memory, threads and files belong to nobody else."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.soak", "--seconds", str(seconds)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=seconds + 300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    print(done.stdout.strip())
    figures = json.loads(done.stdout)
    for name in ("synced", "discarded", "failures", "closed", "placed"):
        assert figures[name] > 0, figures
    assert figures["files_grown"] <= 0 and figures["threads_grown"] <= 0, figures
    if seconds > 60:
        assert figures["rss_grown_kib"] < 8 << 10, figures
