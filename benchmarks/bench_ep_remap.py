"""ep_remap on CUDA. Peers on an H200 at 1, 8, 64, 512, 4096, 16384 tokens, top-8, 256 experts: a one-block Triton
kernel 1.8, 2.0, 2.6, 11.4, 79.9, 316.9 us; torch.where without the batch minimum 11.0, 11.0, 12.2, 11.9, 12.3, 12.9
us."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch

import moe_ops  # noqa: F401  (registers the ops)
from benchmarks.cuda_timing import Table, microseconds, roofs, routing
from moe_ops import reference

CUDA = True
TOKENS = (1, 8, 64, 512, 1024, 4096, 16384)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    table = Table("ep_remap", ["what", "ids", "experts", "tokens", "us"])
    op = torch.ops.moe_ops.ep_remap
    for experts in (128, 256, 384):
        options = {"expert_offset": experts // 8, "num_local_experts": experts // 8}
        for tokens in TOKENS:
            for dtype in (torch.int32, torch.int64):
                ids = [routing(tokens, 8, experts, seed).to(dtype) for seed in range(8)]
                weights = torch.rand(tokens, 8, device="cuda")
                for fill in ("reuse", "skip"):
                    if fill == "skip" and (dtype == torch.int64 or experts != 256):
                        continue
                    expected = reference.ep_remap(ids[0], weights, **options, fill=fill)
                    for actual, wanted in zip(op(ids[0], weights, **options, fill=fill), expected, strict=True):
                        assert torch.equal(actual, wanted)
                    us = microseconds([partial(op, i, weights, **options, fill=fill) for i in ids])
                    name = str(dtype).removeprefix("torch.")
                    table.add(what=f"ep_remap {fill}", ids=name, experts=experts, tokens=tokens, us=round(us, 2))
    print(roofs(), table.save(out))


if __name__ == "__main__":
    if torch.cuda.is_available():
        main()
    else:
        from benchmarks.cpu_stages import run

        run("ep_remap")
