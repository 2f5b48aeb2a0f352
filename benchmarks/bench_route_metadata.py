"""route_metadata on CUDA: one launch. Beside it the same in PyTorch operations (the reference)."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch

import moe_ops  # noqa: F401  (registers the ops)
from benchmarks.cuda_timing import Table, microseconds, roofs
from moe_ops import reference

CUDA = True
CASES = [(ranks, experts) for ranks in (2, 8, 64) for experts in (128, 256, 384)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    table = Table("route_metadata", ["what", "mode", "ranks", "experts", "us"])
    op = torch.ops.moe_ops.route_metadata
    for ranks, experts in CASES:
        counts = [torch.randint(0, 500, (ranks, experts), dtype=torch.int32, device="cuda") for _ in range(8)]
        for mode in ("push", "pull"):
            for actual, expected in zip(
                op(counts[0], 1, mode=mode), reference.route_metadata(counts[0], 1, mode=mode), strict=True
            ):
                assert torch.equal(actual, expected)
            us = microseconds([partial(op, c, 1, mode=mode) for c in counts])
            table.add(what="route_metadata", mode=mode, ranks=ranks, experts=experts, us=round(us, 2))
        us = microseconds([partial(reference.route_metadata, c, 1) for c in counts[:2]])
        table.add(what="torch", mode="push", ranks=ranks, experts=experts, us=round(us, 2))
    print(roofs(), table.save(out))


if __name__ == "__main__":
    if torch.cuda.is_available():
        main()
    else:
        from benchmarks.cpu_stages import run

        run("route_metadata")
