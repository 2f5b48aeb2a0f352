"""topk_permute, topk_unpermute, route_metadata and ep_remap on the CPU, beside their composition in plain PyTorch.

    python -m benchmarks.bench_topk_permute          # the benchmark of an op runs this where there is no CUDA device

Bytes counted: permute reads T rows and writes T * K, unpermute the other way round; the share is of the DRAM read
bandwidth of the same run (a copy moves less, since a written line is first read). The integer ops are reported in
microseconds. Every provider is compared with the reference before it is timed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

import moe_ops
from benchmarks.harness import Provider, Roofs, gate, interleave, machine_facts, write_csv

EXPERTS, TOP_K, HIDDEN = 256, 8, 4096


def routing(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    weights, ids = scores.topk(TOP_K, dim=1)
    return ids, weights


def permute(tokens: int) -> tuple[dict[str, Callable[[], torch.Tensor]], int]:
    ids, _ = routing(tokens)
    x = torch.randn(tokens, HIDDEN).to(torch.bfloat16)

    def plain() -> torch.Tensor:
        return x[torch.argsort(ids.reshape(-1), stable=True) // TOP_K]

    return {"ours": lambda: moe_ops.topk_permute(x, ids, EXPERTS)[0], "torch": plain}, tokens * (1 + TOP_K) * HIDDEN * 2


def unpermute(tokens: int) -> tuple[dict[str, Callable[[], torch.Tensor]], int]:
    ids, weights = routing(tokens)
    rows, row_map, _ = moe_ops.topk_permute(torch.randn(tokens, HIDDEN).to(torch.bfloat16), ids, EXPERTS)

    def plain() -> torch.Tensor:
        picked = rows[row_map.reshape(-1).to(torch.int64)].view(tokens, TOP_K, HIDDEN)
        return (picked.float() * weights[..., None]).sum(1).to(rows.dtype)

    return {
        "ours": lambda: moe_ops.topk_unpermute(rows, row_map, weights),
        "torch": plain,
    }, tokens * (1 + TOP_K) * HIDDEN * 2


def metadata(ranks: int) -> tuple[dict[str, Callable[[], torch.Tensor]], int]:
    counts = torch.randint(0, 64, (ranks, EXPERTS), dtype=torch.int32)

    def ours() -> torch.Tensor:
        return torch.cat([part.reshape(-1).to(torch.int64) for part in moe_ops.route_metadata(counts, 0)])

    def plain() -> torch.Tensor:
        parts = moe_ops.reference.route_metadata(counts, 0)
        return torch.cat([part.reshape(-1).to(torch.int64) for part in parts])

    return {"ours": ours, "torch": plain}, 0


def remap(tokens: int) -> tuple[dict[str, Callable[[], torch.Tensor]], int]:
    ids, weights = routing(tokens)
    span: dict[str, Any] = {"expert_offset": 32, "num_local_experts": 32}
    return {
        "ours": lambda: moe_ops.ep_remap(ids, weights, **span)[0],
        "torch": lambda: moe_ops.reference.ep_remap(ids, weights, **span)[0],
    }, 0


STAGES: dict[str, tuple[Callable[[int], tuple[dict[str, Callable[[], torch.Tensor]], int]], tuple[int, ...]]] = {
    "topk_permute": (permute, (1, 64, 1024, 8192)),
    "topk_unpermute": (unpermute, (1, 64, 1024, 8192)),
    "route_metadata": (metadata, (2, 8, 64)),
    "ep_remap": (remap, (1, 64, 1024, 16384)),
}
ALLOWED = {"topk_unpermute": 4e-3}  # bfloat16 rounds once; everything else is exact


def run(op: str) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for <op>.csv")
    parser.add_argument("--seconds", type=float, default=2.0, help="of timing for each size")
    options = parser.parse_args()
    make, sizes = STAGES[op]
    threads, roofs, rows = torch.get_num_threads(), Roofs(), []
    for size in track(sizes, description=op):
        calls, nbytes = make(size)
        expected = calls["torch"]().double()
        providers = [Provider(name, lambda _, call=call: call()) for name, call in calls.items()]
        timed = [p for p in providers if gate(p, calls[p.name]().double(), expected, ALLOWED.get(op, 0.0))]
        limits = interleave(timed, options.seconds, roofs, threads)
        for provider in timed:
            seconds = statistics.median(provider.times)
            rows.append(
                {
                    **machine_facts(),
                    "threads": threads,
                    "op": op,
                    "size": size,
                    "provider": provider.name,
                    "median_us": round(seconds * 1e6, 1),
                    "gbs": round(nbytes / seconds / 1e9, 2) if nbytes else "",
                    "dram_share": round(nbytes / seconds / 1e9 / limits["dram_gbs"], 2) if nbytes else "",
                }
            )
    for row in rows:
        print(*(f"{row[name]!s:>14}" for name in ("op", "size", "provider", "median_us", "gbs", "dram_share")))
    if options.out:
        write_csv(options.out / f"{op}.csv", rows)
