"""fused_mxfp4_moe over weights in layout sm90_v1: microseconds per layer call on a Hopper card.

A CUDA graph holds several calls with different random routings and inputs; it is replayed after the L2 cache was
overwritten; the median over replays is divided by the calls. The share is of the card's read-only stream, measured in
the same run, and counts the weights of the distinct experts alone. Prints a table and writes JSON with --json.

    python benchmarks/bench_sm90.py [--layers gptoss,dsv3,dsv41] [--tokens 1,2,4,...] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable

import torch
import triton
import triton.language as tl

import moe_ops
from moe_ops.cuda import LAYOUT

# hidden size, intermediate size, experts, top-k of one layer on one card
LAYERS = {
    "gptoss": (2880, 2880, 128, 4),
    "dsv3": (7168, 2048, 256, 8),
    "dsv41": (5120, 576, 384, 6),
}
TOKENS = [1, 2, 4, 6, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]


@triton.jit
def _read(source, target, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for i in range(ROUNDS):
        total += tl.load(source + (program * ROUNDS + i) * BLOCK + tl.arange(0, BLOCK))
    tl.store(target + program, tl.sum(total, 0))


def read_stream() -> float:
    """Bytes per second of a kernel that only reads 4 GiB."""
    source = torch.ones(1 << 30, dtype=torch.int32, device="cuda")
    block, rounds = 4096, 8
    programs = source.numel() // (block * rounds)
    target = torch.empty(programs, dtype=torch.int32, device="cuda")
    times = []
    for _ in range(9):
        times.append(elapsed(lambda: _read[(programs,)](source, target, BLOCK=block, ROUNDS=rounds, num_warps=8)))
    return source.numel() * 4 / (statistics.median(times[2:]) * 1e-3)


def elapsed(run: Callable[[], object]) -> float:
    """Milliseconds on the device."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    run()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last)


def graph_microseconds(calls: list[Callable[[], object]], replays: int) -> float:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(replays):
        flush.zero_()
        times.append(elapsed(graph.replay))
    return statistics.median(times) * 1e3 / len(calls)


def random_layer(hidden: int, intermediate: int, num_experts: int) -> list[torch.Tensor]:
    """Packed weights of random bytes: any order of random codes is random codes."""

    def random(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device="cuda")

    return [
        random(num_experts, intermediate // 8, 16, hidden // 2),
        random(num_experts, intermediate // 8, 16, hidden // 32, low=119, high=123),
        random(num_experts, hidden // 16, 16, intermediate // 2),
        random(num_experts, hidden // 16, 16, intermediate // 32, low=119, high=123),
    ]


def measure(name: str, token_counts: list[int], stream: float) -> list[dict]:
    hidden, intermediate, num_experts, top_k = LAYERS[name]
    weights = random_layer(hidden, intermediate, num_experts)
    expert_bytes = 3 * hidden * intermediate * 17 / 32
    rows = []
    for num_tokens in token_counts:
        sets = 16 if num_tokens <= 64 else 8 if num_tokens <= 512 else 4 if num_tokens <= 1024 else 2
        calls, distinct = [], []
        for _ in range(sets):
            values, ids = torch.randn(num_tokens, num_experts, device="cuda").topk(top_k, dim=1)
            x = (torch.randn(num_tokens, hidden, device="cuda") / 4).to(torch.bfloat16)
            inputs = (x, ids.to(torch.int32), torch.softmax(values, 1))
            distinct.append(len(ids.unique()))
            calls.append(
                lambda inputs=inputs: moe_ops.fused_mxfp4_moe(
                    *inputs, *weights, w13_layout="gate_up", weight_layout=LAYOUT
                )
            )
        us = graph_microseconds(calls, 9 if num_tokens <= 512 else 5)
        read = statistics.mean(distinct) * expert_bytes
        flop = 6.0 * hidden * intermediate * num_tokens * top_k
        rows.append(
            {
                "layer": name,
                "tokens": num_tokens,
                "us": round(us, 1),
                "experts": statistics.mean(distinct),
                "share": round(read / us * 1e6 / stream, 3),
                "tflops": round(flop / us / 1e6, 1),
            }
        )
        print(
            "{layer:8} {tokens:6} {us:9.1f} us {share:6.1%} of the read stream {tflops:7.1f} TFLOP/s".format(**rows[-1])
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--json")
    options = parser.parse_args()
    stream = read_stream()
    print(f"{torch.cuda.get_device_name()}, read-only stream {stream / 1e12:.2f} TB/s")
    rows = []
    for name in options.layers.split(","):
        rows += measure(name, [int(count) for count in options.tokens.split(",")], stream)
        torch.cuda.empty_cache()
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"read_stream": stream, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
