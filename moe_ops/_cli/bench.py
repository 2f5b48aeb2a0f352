"""`python -m moe_ops bench OP`: runs benchmarks/bench_<op>.py of the repository."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rich.console import Console

import moe_ops

ROOT = Path(moe_ops.__file__).resolve().parents[1]


def benchmarks() -> dict[str, Path]:
    return {path.stem.removeprefix("bench_"): path for path in sorted((ROOT / "benchmarks").glob("bench_*.py"))}


def run(console: Console, op: str, arguments: list[str]) -> int:
    found = benchmarks()
    if not found:
        console.print(
            "benchmarks/ belongs to the repository and is not installed: run this command from a clone of it",
            style="red",
        )
        return 1
    if op not in found:
        if op:
            console.print(f"bench: op must be one of {', '.join(found)}, got {op!r}", style="red", soft_wrap=True)
            return 1
        for name, path in found.items():
            console.print(f"{name:28} {path.relative_to(ROOT)}", highlight=False)
        return 0
    # A process of its own: some benchmarks set thread counts and environment variables before torch is imported.
    return subprocess.call([sys.executable, "-m", f"benchmarks.{found[op].stem}", *arguments], cwd=ROOT)
