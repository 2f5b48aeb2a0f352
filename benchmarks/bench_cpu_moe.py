"""cpu_moe_submit / cpu_moe_sync: what the coupling costs and how much CPU time it hides.

    python -m benchmarks.bench_cpu_moe [--device cuda] [--csv FILE]

For each case three times are measured: the CPU experts alone (submit, sync), the device part alone, and both
(submit, device part, sync). `over` is both / max(CPU, device); `hidden` is the share of the CPU experts' time that the
device part covered; `overhead` is both - max. Correctness is checked before anything is timed. On a CUDA device each
case runs eagerly and as a captured graph.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import statistics
import time
from collections.abc import Callable

import torch

import moe_ops

ops = torch.ops.moe_ops

# hidden size, intermediate size, experts, top-k
SHAPE = (2048, 1024, 16, 8)
TOKENS = (1, 16, 64, 96, 256)
# Length of the device part relative to the CPU experts.
RATIOS = (0.5, 1.0, 2.0)


def make_layer(engine: moe_ops.CpuMoeEngine) -> moe_ops.CpuExperts:
    hidden, inter, experts, _ = SHAPE
    g = torch.Generator().manual_seed(0)
    layer = engine.add_experts("bench", experts, hidden, inter, w13_layout="gate_up")
    for expert in range(experts):
        w13 = torch.randint(0, 256, (2 * inter, hidden // 2), generator=g, dtype=torch.uint8)
        w2 = torch.randint(0, 256, (hidden, inter // 2), generator=g, dtype=torch.uint8)
        s13 = torch.full((2 * inter, hidden // 32), 121, dtype=torch.uint8)
        s2 = torch.full((hidden, inter // 32), 121, dtype=torch.uint8)
        layer.load_expert(expert, w13, s13, w2, s2)
    return layer


def make_inputs(tokens: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    hidden, _, experts, top_k = SHAPE
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=g).bfloat16()
    ids = torch.rand(tokens, experts, generator=g).topk(top_k, dim=1).indices
    weights = torch.softmax(torch.randn(tokens, top_k, generator=g), dim=1)
    return x.to(device), ids.to(device), weights.to(device)


class DevicePart:
    """A chain of matrix products that takes about as long as asked."""

    def __init__(self, device: torch.device, milliseconds: float) -> None:
        size = 2048 if device.type == "cuda" else 256
        self.a = torch.randn(size, size, device=device, dtype=torch.bfloat16) / size**0.5
        one = time_of([lambda: self.run(20)], device, 5)[0] / 20
        self.count = max(1, round(milliseconds / one))

    def run(self, count: int | None = None) -> torch.Tensor:
        y = self.a
        for _ in range(self.count if count is None else count):
            y = torch.mm(y, self.a)
        return y


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def time_of(functions: list[Callable[[], object]], device: torch.device, repeats: int = 15) -> list[float]:
    """Medians in milliseconds. The functions take turns, so that a drift of the machine touches all of them."""
    times: list[list[float]] = [[] for _ in functions]
    for repeat in range(repeats + 3):
        for function, mine in zip(functions, times, strict=True):
            synchronize(device)
            start = time.perf_counter()
            function()
            synchronize(device)
            if repeat >= 3:
                mine.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(mine) for mine in times]


def captured(function: Callable[[], object]) -> Callable[[], object]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def check(layer: moe_ops.CpuExperts, inputs: tuple[torch.Tensor, ...]) -> None:
    """The device path gives the bits of the CPU path, and the CPU path agrees with the reference."""
    host = [tensor.cpu() for tensor in inputs]
    handle = torch.tensor([layer.shared.handle])
    zeros = torch.zeros_like(host[0])
    on_cpu = ops.cpu_moe_sync(ops.cpu_moe_submit(*host, handle)[0], zeros, out_dtype=torch.float32)
    out = layer.sync(layer.submit(*inputs)[0], torch.zeros_like(inputs[0]), out_dtype=torch.float32)
    assert torch.equal(out.cpu(), on_cpu), "the device path differs from the CPU path"
    ticket, _ = moe_ops.reference.cpu_moe_submit(*host, handle)
    reference = moe_ops.reference.cpu_moe_sync(ticket, zeros, out_dtype=torch.float32)
    error = (on_cpu - reference).square().mean().sqrt() / reference.square().mean().sqrt()
    assert error < 1e-2, f"the CPU path differs from the reference by {error:.3g}"


def measure(
    layer: moe_ops.CpuExperts, tokens: int, ratio: float, device: torch.device, graph: bool
) -> dict[str, object]:
    inputs = make_inputs(tokens, device)
    zeros = torch.zeros_like(inputs[0])
    wrap = captured if graph else (lambda function: function)

    def experts() -> torch.Tensor:
        return layer.sync(layer.submit(*inputs)[0], zeros)

    part = DevicePart(device, time_of([wrap(experts)], device)[0] * ratio)

    def both() -> torch.Tensor:
        ticket, _ = layer.submit(*inputs)
        part.run()
        return layer.sync(ticket, zeros)

    cpu, device_ms, both_ms = time_of([wrap(experts), wrap(part.run), wrap(both)], device)
    longest = max(cpu, device_ms)
    return {
        "tokens": tokens,
        "graph": int(graph),
        "cpu_ms": round(cpu, 3),
        "device_ms": round(device_ms, 3),
        "both_ms": round(both_ms, 3),
        "over": round(both_ms / longest, 3),
        "overhead_us": round((both_ms - longest) * 1e3, 1),
        "hidden": round(1 - max(0.0, both_ms - device_ms) / cpu, 3),
    }


def coupling(layer: moe_ops.CpuExperts, device: torch.device, graph: bool) -> float:
    """Microseconds of a submit and a sync without any expert to run, per pair, in a row of 20."""
    x, ids, weights = make_inputs(1, device)
    nobody, zeros = torch.full_like(ids, -1), torch.zeros_like(x)

    def pairs() -> None:
        for _ in range(20):
            layer.sync(layer.submit(x, nobody, weights)[0], zeros)

    return time_of([captured(pairs) if graph else pairs], device)[0] / 20 * 1e3


def machine(device: torch.device) -> str:
    name = torch.cuda.get_device_name() if device.type == "cuda" else "no accelerator"
    return f"{platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, {name}, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=None, help="of the engine")
    parser.add_argument("--csv", default=None)
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cpu":
        # The calling thread is the device: it gets one CPU, the engine the others.
        torch.set_num_threads(1)
        options.threads = options.threads or max(1, len(os.sched_getaffinity(0)) - 1)
    rows = []
    with moe_ops.CpuMoeEngine("bench", threads=options.threads) as engine, torch.inference_mode():
        layer = make_layer(engine).to(device)
        print(
            f"{machine(device)}; engine: {sum(len(pool.cpus) for pool in engine.pools)} threads; H, I, E, K = {SHAPE}"
        )
        for tokens in TOKENS:
            check(layer, make_inputs(tokens, device))
        for graph in (False, True) if device.type == "cuda" else (False,):
            print(f"graph {int(graph)}: {coupling(layer, device, graph):.1f} us for a submit and a sync of nothing")
            for tokens in TOKENS:
                for ratio in RATIOS:
                    row = measure(layer, tokens, ratio, device, graph)
                    rows.append(row)
                    print(", ".join(f"{name} {value}" for name, value in row.items()))
        stats = engine.stats()
        busy, waited = stats["busy_ns"] / 1e9, stats["sync_wait_ns"] / 1e9
        print(f"jobs {stats['completed']}, busy {busy:.2f} s, syncs waited {waited:.2f} s")
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
