"""topk_unpermute and its backward on CUDA.

Bytes counted: forward T * K rows read and T rows written; backward T * K + T rows read and T * K written. Peers on an
H200 (E 256, top-8), GB/s: PyPI's moe-ops 0.1.0 2461 to 4334, TransformerEngine 2787 to 4183, vLLM 2763 to 4281, torch
402 to 793; backward at H 4096, T 16384: PyPI's moe-ops 0.1.0 3961, TransformerEngine 3678.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch

import moe_ops  # noqa: F401  (registers the ops)
from benchmarks.cuda_timing import Table, microseconds, roofs, routing
from moe_ops import reference

CUDA = True
EXPERTS, TOP_K = 256, 8
SHAPES = [(hidden, tokens) for hidden in (4096, 7168) for tokens in (1024, 4096, 16384, 65536)]
BACKWARD = [(4096, 4096), (4096, 16384), (7168, 16384)]


def inputs(hidden: int, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = routing(tokens, TOP_K, EXPERTS, seed)
    row_map = torch.argsort(torch.argsort(ids.reshape(-1), stable=True)).to(torch.int32).view(tokens, TOP_K)
    rows = torch.randn(tokens * TOP_K, hidden, device="cuda", dtype=torch.bfloat16)
    return rows, row_map, torch.rand(tokens, TOP_K, device="cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    table = Table("topk_unpermute", ["what", "hidden", "tokens", "us", "gb_s", "percent_of_copy"])

    def add(what: str, hidden: int, tokens: int, us: float, nbytes: int) -> None:
        gb_s = nbytes / us / 1e3
        share = round(100 * gb_s / 1e3 / roofs()["copy_tb_s"], 1)
        table.add(what=what, hidden=hidden, tokens=tokens, us=round(us, 1), gb_s=round(gb_s), percent_of_copy=share)

    op, backward = torch.ops.moe_ops.topk_unpermute, torch.ops.moe_ops.topk_unpermute_backward
    for hidden, tokens in SHAPES:
        sets = [inputs(hidden, tokens, seed) for seed in range(2)]
        rows, row_map, weights = sets[0]
        few = slice(0, 64)
        assert torch.equal(op(*sets[0])[few], reference.topk_unpermute(rows, row_map[few], weights[few]))
        add("topk_unpermute", hidden, tokens, microseconds([partial(op, *s) for s in sets]),
            tokens * (1 + TOP_K) * hidden * 2)  # fmt: skip
        if (hidden, tokens) in BACKWARD:
            grad = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
            grad_rows, grad_weights = backward(grad, *sets[0])
            expected = reference.topk_unpermute_backward(grad, *sets[0])
            assert torch.equal(grad_rows, expected[0])
            torch.testing.assert_close(grad_weights, expected[1], rtol=1e-3, atol=1e-2)
            del expected, grad_rows
            add("topk_unpermute_backward", hidden, tokens, microseconds([partial(backward, grad, *s) for s in sets]),
                tokens * (1 + 2 * TOP_K) * hidden * 2)  # fmt: skip
        del sets, rows
        torch.cuda.empty_cache()
    print(roofs(), table.save(out))


if __name__ == "__main__":
    if torch.cuda.is_available():
        main()
    else:
        from benchmarks.cpu_stages import run

        run("topk_unpermute")
