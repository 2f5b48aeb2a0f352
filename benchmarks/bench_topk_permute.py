"""topk_permute on CUDA: the whole op, its map alone, and the plain PyTorch composition.

Bytes counted: T rows read and T * K rows written. Peers measured by the same method on an H200 (E 256, top-8), in GB/s
of the same bytes: PyPI's moe-ops 0.1.0 2148 to 3537 (its order is not stable), TransformerEngine 1385 to 2107, vLLM
1128 to 2297.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch

import moe_ops  # noqa: F401  (registers the ops)
from benchmarks.cuda_timing import Table, microseconds, roofs, routing
from moe_ops.triton._permutation_map import permutation_map

CUDA = True
EXPERTS, TOP_K = 256, 8
SHAPES = [(hidden, tokens) for hidden in (4096, 7168) for tokens in (1024, 4096, 16384, 65536)]
MAP_TOKENS = (1, 8, 64, 512, 1024, 4096, 16384, 65536)


def composition(x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    order = torch.argsort(ids.reshape(-1), stable=True)
    return x[order // TOP_K], torch.argsort(order)


def check(x: torch.Tensor, ids: torch.Tensor) -> None:
    permuted, row_map, counts = torch.ops.moe_ops.topk_permute(x, ids, EXPERTS)
    expected, expected_map = composition(x, ids)
    assert torch.equal(permuted, expected)
    assert torch.equal(row_map.reshape(-1).to(torch.int64), expected_map)
    assert torch.equal(counts.to(torch.int64), torch.bincount(ids.reshape(-1).to(torch.int64), minlength=EXPERTS))


def map_only(ids: torch.Tensor):
    """The map and its counts, without a copy of rows."""
    row_map = torch.empty_like(ids)
    counts = torch.empty(EXPERTS, dtype=torch.int32, device="cuda")
    return partial(permutation_map, ids, row_map, counts, num_rows=ids.numel())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    table = Table("topk_permute", ["what", "hidden", "tokens", "us", "gb_s", "percent_of_copy"])
    for tokens in MAP_TOKENS:
        ids = [routing(tokens, TOP_K, EXPERTS, seed) for seed in range(8)]
        table.add(what="map", hidden="", tokens=tokens, us=round(microseconds([map_only(i) for i in ids]), 2))
    for hidden, tokens in SHAPES:
        sets = 2 if tokens >= 16384 else 4
        x = [torch.randn(tokens, hidden, device="cuda").to(torch.bfloat16) for _ in range(sets)]
        ids = [routing(tokens, TOP_K, EXPERTS, seed) for seed in range(sets)]
        check(x[0], ids[0])
        nbytes = tokens * (1 + TOP_K) * hidden * 2
        whole = [partial(torch.ops.moe_ops.topk_permute, *pair, EXPERTS) for pair in zip(x, ids, strict=True)]
        torch_calls = [partial(composition, *pair) for pair in zip(x, ids, strict=True)]
        for what, calls in (("topk_permute", whole), ("torch", torch_calls)):
            if what == "torch" and tokens > 16384:
                continue
            us = microseconds(calls)
            gb_s = nbytes / us / 1e3
            share = round(100 * gb_s / 1e3 / roofs()["copy_tb_s"], 1)
            table.add(what=what, hidden=hidden, tokens=tokens, us=round(us, 1), gb_s=round(gb_s), percent_of_copy=share)
        torch.cuda.empty_cache()
    print(roofs(), table.save(out))


if __name__ == "__main__":
    if torch.cuda.is_available():
        main()
    else:
        from benchmarks.cpu_stages import run

        run("topk_permute")
