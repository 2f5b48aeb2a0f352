"""fused_mxfp4_moe over weights in layout sm90_v1: microseconds per layer call on a Hopper card.

Calls with different random routings and inputs share a CUDA graph, the L2 cache is overwritten before each replay. The
share is of the card's read-only stream, measured in the same run, and counts the weights of the distinct experts alone.

    python -m benchmarks.bench_sm90 --out FOLDER
    python -m benchmarks.bench_sm90 --e4m3 --out FOLDER    # activations rounded to e4m3, where large batches do that
    python -m benchmarks.bench_sm90 --plot FOLDER     # sm90.csv beside peers.csv, no device needed
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl

import moe_ops
from benchmarks.cuda_timing import Table, eager_microseconds, microseconds
from benchmarks.harness import read_csv
from moe_ops.cuda import E4M3, LAYOUT
from moe_ops.cuda.layout import unpack_codes, unpack_scales, w13_row_order
from moe_ops.reference.mxfp4 import dequantize_mxfp4

CUDA = True
# hidden size, intermediate size, experts, top-k of one layer on one card
LAYERS = {
    "gptoss": (2880, 2880, 128, 4),
    "dsv3": (7168, 2048, 256, 8),
    "dsv41": (5120, 576, 384, 6),
}
TOKENS = [1, 2, 4, 6, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192]
# Of weights in layout sm90_v1_e4m3; smaller batches are those of sm90_v1.
E4M3_TOKENS = [2048, 4096, 8192]


@triton.jit
def _read(source, target, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for i in range(ROUNDS):
        total += tl.load(source + (program * ROUNDS + i) * BLOCK + tl.arange(0, BLOCK))
    tl.store(target + program, tl.sum(total, 0))


def read_stream() -> float:
    """TB/s of a kernel that only reads 4 GiB."""
    source = torch.ones(1 << 30, dtype=torch.int32, device="cuda")
    block, rounds = 4096, 8
    programs = source.numel() // (block * rounds)
    target = torch.empty(programs, dtype=torch.int32, device="cuda")
    us = eager_microseconds(lambda: _read[(programs,)](source, target, BLOCK=block, ROUNDS=rounds, num_warps=8))
    return source.numel() * 4 / us / 1e6


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


def expected_row(weights: list[torch.Tensor], x: torch.Tensor, ids: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    """One token, in float64 from the exact weights."""
    hidden, intermediate = x.numel(), weights[0].shape[1] * 8
    order = w13_row_order(intermediate, "gate_up", "cuda")
    total = torch.zeros(hidden, dtype=torch.float64, device="cuda")
    for expert, weight in zip(ids.tolist(), router.tolist(), strict=True):
        w13, w13_scale, w2, w2_scale = (tensor[expert].flatten(1) for tensor in weights)
        packed = dequantize_mxfp4(unpack_codes(w13, hidden), unpack_scales(w13_scale, hidden)).double() @ x.double()
        gate, up = torch.empty_like(packed).index_copy_(0, order, packed).chunk(2)
        down = dequantize_mxfp4(unpack_codes(w2, intermediate), unpack_scales(w2_scale, intermediate)).double()
        total += weight * (down @ (torch.nn.functional.silu(gate) * up))
    return total


def measure(table: Table, name: str, stream: float, layout: str = LAYOUT) -> None:
    hidden, intermediate, num_experts, top_k = LAYERS[name]
    weights = random_layer(hidden, intermediate, num_experts)
    call = partial(moe_ops.fused_mxfp4_moe, w13_layout="gate_up", weight_layout=layout)
    for tokens in E4M3_TOKENS if layout == E4M3 else TOKENS:
        sets = 16 if tokens <= 64 else 8 if tokens <= 512 else 4 if tokens <= 1024 else 2
        calls, distinct = [], []
        for i in range(sets):
            values, ids = torch.randn(tokens, num_experts, device="cuda").topk(top_k, dim=1)
            x = (torch.randn(tokens, hidden, device="cuda") / 4).to(torch.bfloat16)
            router = torch.softmax(values, 1)
            distinct.append(len(ids.unique()))
            calls.append(partial(call, x, ids.to(torch.int32), router, *weights))
            if i == 0:
                expected = expected_row(weights, x[-1], ids[-1], router[-1])
                error = ((calls[0]()[-1].double() - expected).norm() / expected.norm()).item()
                assert error < (8e-2 if layout == E4M3 else 6e-3), (name, tokens, error)
        us = microseconds(calls, least=5)
        read = statistics.mean(distinct) * 3 * hidden * intermediate * 17 / 32
        table.add(
            layer=name,
            tokens=tokens,
            us=round(us, 1),
            experts=round(statistics.mean(distinct), 1),
            share=round(read / us / 1e6 / stream, 3),
            tflops=round(6.0 * hidden * intermediate * tokens * top_k / us / 1e6, 1),
            error=round(error, 5),
        )


def plot(folder: Path) -> None:
    """How many times our time the peers take, a panel for each layer."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ours = {(row["layer"], int(row["tokens"])): float(row["us"]) for row in read_csv(folder / "sm90.csv")}
    peers = read_csv(folder / "peers.csv")
    figure, axes = plt.subplots(1, len(LAYERS), figsize=(3.4 * len(LAYERS), 2.8), sharey=True)
    for axis, name in zip(axes, LAYERS, strict=True):
        for provider in dict.fromkeys(row["provider"] for row in peers):
            times = {
                int(row["tokens"]): float(row["us"])
                for row in peers
                if (row["layer"], row["provider"]) == (name, provider)
            }
            points = [(tokens, us / ours[name, tokens]) for tokens, us in times.items() if (name, tokens) in ours]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=provider)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("tokens", fontsize=8)
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=7)
    axes[0].set_ylabel("time of the peer / ours", fontsize=8)
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(folder / "sm90.png", dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--e4m3", action="store_true")
    parser.add_argument("--plot", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    if arguments.plot:
        return plot(arguments.plot)
    out = arguments.out
    if torch.cuda.get_device_capability() != (9, 0):
        print("bench_sm90: this is for a Hopper card")
        return
    stream = read_stream()
    print(f"{torch.cuda.get_device_name()}, read-only stream {stream:.2f} TB/s")
    table = Table(
        "sm90_e4m3" if arguments.e4m3 else "sm90", ["layer", "tokens", "us", "experts", "share", "tflops", "error"]
    )
    for name in LAYERS:
        measure(table, name, stream, E4M3 if arguments.e4m3 else LAYOUT)
        torch.cuda.empty_cache()
    print(table.save(out))


if __name__ == "__main__":
    main()
