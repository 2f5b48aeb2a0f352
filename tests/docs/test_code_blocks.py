"""The Python blocks of a document run, each by itself in a fresh process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("docs/engine.md", "docs/checkpoints.md", "docs/ops/topk_permute.md")


def blocks() -> list[tuple[str, str]]:
    found = []
    for name in DOCUMENTS:
        text = (ROOT / name).read_text()
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            found.append((f"{name}:{text.count(chr(10), 0, match.start()) + 1}", match[1]))
    return found


def test_every_document_has_blocks():
    assert {name.split(":")[0] for name, _ in blocks()} == set(DOCUMENTS)


@pytest.mark.parametrize(("place", "code"), blocks(), ids=lambda value: value if value.startswith("docs/") else "code")
def test_runs(place: str, code: str):
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{place}:\n{done.stderr}"
