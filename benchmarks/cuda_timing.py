"""Timing on a CUDA device: one captured graph of several calls with different inputs, the L2 cache flushed before each
replay, the median of the replays; and the roofs of the device, measured in the same process.

A result is added to a table only after its own check has passed: no speed is reported for a wrong answer.
"""

from __future__ import annotations

import csv
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import torch

FLUSH_BYTES = 256 << 20
RESULTS = Path(__file__).parent / "results"


def device_folder() -> Path:
    """benchmarks/results/<device>, by the marketing name: nvidia h200 -> h200."""
    name = torch.cuda.get_device_name().lower().removeprefix("nvidia ").replace(" ", "-")
    return RESULTS / name


@cache
def _flush_buffer() -> torch.Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")


# Bytes a second, at the least: on an H200 memory that goes back to the driver is cleared at 440 GB/s in the background,
# and what runs meanwhile has that much less of the bandwidth. Captures give back what PyTorch's allocator has cached.
CLEARING = 300e9
_given_back = 0


def wait_for_clearing() -> None:
    global _given_back
    torch.cuda.synchronize()
    given_back = torch.cuda.memory_stats().get("reserved_bytes.all.freed", 0)
    time.sleep((given_back - _given_back) / CLEARING)
    _given_back = given_back


def microseconds(calls: Sequence[Callable[[], object]], budget_ms: float = 60.0, least: int = 7) -> float:
    """Per call, in a graph of all `calls`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    wait_for_clearing()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []
    while len(times) < least or (sum(times) < budget_ms and len(times) < 40):
        _flush_buffer().zero_()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times) * 1e3 / len(calls)


def eager_microseconds(call: Callable[[], object], repeats: int = 11) -> float:
    """Of one long call between two events."""
    call()
    wait_for_clearing()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []
    for _ in range(repeats + 3):
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:]) * 1e3


@cache
def roofs() -> dict[str, float]:
    """copy, read and write in TB/s over 2 GiB, the empty kernel in microseconds."""
    x = torch.randint(0, 100, (1 << 29,), dtype=torch.int32, device="cuda")
    y = torch.empty_like(x)
    nbytes = x.numel() * 4
    small = torch.zeros(1, device="cuda")
    return {
        "copy_tb_s": 2 * nbytes / eager_microseconds(lambda: y.copy_(x)) / 1e6,
        "write_tb_s": nbytes / eager_microseconds(lambda: y.fill_(1)) / 1e6,
        "empty_kernel_us": microseconds([partial(small.add_, 1)] * 64),
    }


class Table:
    """Rows of one op: printed, and written to results/<device>/<name>.csv together with the roofs."""

    def __init__(self, name: str, columns: Sequence[str]) -> None:
        self.name, self.columns = name, list(columns)
        self.rows: list[dict[str, object]] = []

    def add(self, **row: object) -> None:
        self.rows.append(row)
        print(self.name, " ".join(f"{key}={value}" for key, value in row.items()), flush=True)

    def save(self, folder: Path | None = None) -> Path:
        folder = folder or device_folder()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.csv"
        with path.open("w", newline="") as file:
            measured = ", ".join(f"{key} {value:.3f}" for key, value in roofs().items())
            versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
            file.write(f"# {torch.cuda.get_device_name()}, {versions}; roofs: {measured}\n")
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(self.rows)
        return path


def routing(num_tokens: int, top_k: int, num_experts: int, seed: int) -> torch.Tensor:
    """Distinct experts of each token, int32, on the device."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    scores = torch.rand(num_tokens, num_experts, device="cuda", generator=generator)
    return scores.topk(top_k, dim=1).indices.to(torch.int32)
