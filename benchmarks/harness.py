"""What the CPU benchmarks share: measured roofs, a correctness gate, interleaved timing, CSV files and plots.

A number is only reported for a provider whose result was checked in the same process, and beside the limits of the
machine measured right before and after: other guests change the speed of a virtual machine from minute to minute,
ratios within one run are what stays.
"""

from __future__ import annotations

import csv
import ctypes
import datetime
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results"


class Roofs:
    """Limits of this machine, measured by roofs.cpp. MOE_OPS_ROOFS names a built library where there is no compiler."""

    BUFFER_BYTES = 1 << 30

    def __init__(self) -> None:
        path = os.environ.get("MOE_OPS_ROOFS") or str(self.build(Path(tempfile.mkdtemp())))
        self.library = ctypes.CDLL(path)
        self.library.roof_buffer.restype = ctypes.c_void_p
        for name in ("roof_dram_read", "roof_amx_bf16", "roof_int16"):
            getattr(self.library, name).restype = ctypes.c_double
        self.buffer = ctypes.c_void_p(self.library.roof_buffer(ctypes.c_int64(self.BUFFER_BYTES)))

    @staticmethod
    def build(folder: Path) -> Path:
        out = folder / "roofs.so"
        command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O3", "-shared", "-fPIC", str(ROOT / "roofs.cpp")]
        subprocess.run([*command, "-lpthread", "-o", str(out)], check=True)
        return out

    def dram_read(self, threads: int, passes: int = 2) -> float:
        """GB/s, the best of some passes over 1 GiB."""
        size = ctypes.c_int64(self.BUFFER_BYTES)
        return max(self.library.roof_dram_read(self.buffer, size, threads) for _ in range(passes))

    def amx_bf16(self, threads: int, passes: int = 3) -> float:
        """TFLOP/s; 0 without AMX."""
        return max(self.library.roof_amx_bf16(ctypes.c_int64(400_000), threads) for _ in range(passes))

    def int16(self, threads: int, passes: int = 3) -> float:
        """TOP/s of 16-bit integer products on vectors; 0 where there is no kernel for them."""
        return max(self.library.roof_int16(ctypes.c_int64(2_000_000), threads) for _ in range(passes))

    @cached_property
    def compute_unit(self) -> str:
        """What `compute_tflops` is the limit of: the fastest unit here for products of 16-bit operands."""
        if self.amx_bf16(1, 1):
            return "amx_bf16"
        return "vector_int16" if self.int16(1, 1) else "none"

    def measure(self, threads: int) -> dict[str, float]:
        compute = self.amx_bf16(threads) if self.compute_unit == "amx_bf16" else self.int16(threads)
        return {"dram_gbs": self.dram_read(threads), "compute_tflops": compute}


@dataclass
class Provider:
    """Something to time. `call(i)` does the i-th piece of work and returns its result."""

    name: str
    call: Callable[[int], Any]
    error: float = float("nan")  # relative error in the 2-norm, from the gate
    once: bool = False  # too slow for more than one call
    times: list[float] = field(default_factory=list)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.to(torch.float64), expected.to(torch.float64)
    return float((actual - expected).norm() / expected.norm())


def gate(provider: Provider, actual: torch.Tensor, expected: torch.Tensor, allowed: float) -> bool:
    """Whether the provider may be timed; a wrong one is named and left out."""
    provider.error = relative_error(actual, expected)
    passed = provider.error <= allowed
    if not passed:
        print(f"{provider.name}: relative error {provider.error:.2e} is above {allowed:.2e}: not timed")
    return passed


def interleave(
    providers: Iterable[Provider], seconds: float, roofs: Roofs, threads: int, least: int = 3
) -> dict[str, float]:
    """Time providers in turns of a few calls each, so that all of them see the same machine; the roofs of the run.

    The limits are measured before, between and after the turns; their medians are what the shares refer to.
    """
    chosen = list(providers)
    measured = [roofs.measure(threads)]
    for provider in chosen:
        provider.times.clear()
        if not provider.once:
            provider.call(0)
    turns = 4
    counts = {provider.name: 0 for provider in chosen}
    for turn in range(turns):
        for provider in chosen:
            if provider.once and turn > 0:
                continue
            until = time.perf_counter() + seconds / turns / max(1, len(chosen))
            calls = 0
            while calls < (1 if provider.once else least // turns + 1) or (
                not provider.once and time.perf_counter() < until
            ):
                index = counts[provider.name]
                begin = time.perf_counter()
                provider.call(index)
                provider.times.append(time.perf_counter() - begin)
                counts[provider.name] += 1
                calls += 1
        if turn in (turns // 2 - 1, turns - 1):
            measured.append(roofs.measure(threads))
    return {name: statistics.median(m[name] for m in measured) for name in measured[0]}


def machine_facts() -> dict[str, str]:
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": model,
        "cpus": str(len(os.sched_getaffinity(0))),
        "torch": torch.__version__,
    }


def write_csv(path: Path, rows: list[Mapping[str, Any]], append: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not (append and path.exists())
    with path.open("w" if fresh else "a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerows(rows)


def read_csv(path: Path) -> list[dict[str, str]]:
    """Rows of a table; lines that start with # say where it was measured."""
    with path.open(newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))
