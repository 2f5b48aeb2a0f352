"""Ops after a fork of a process whose OpenMP threads were at work: those threads do not exist in the child."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import BACKEND

pytestmark = [
    pytest.mark.skipif(BACKEND != "cpu", reason="about the CPU kernels"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
]

CODE = """
import os, signal
import torch
import moe_ops
from tests.support import make_experts, make_routing, make_rows

ops = torch.ops.moe_ops
ids, weights = make_routing(9000, 4, 8, invalid=0.1)
x, experts = make_rows(9000, 64, torch.bfloat16), make_experts(8, 32, 64).values()
wide = make_rows(64, 9000, torch.bfloat16).t()
ids32, double, half = ids.int(), weights.double(), weights.half()  # here: torch's own ops hang in the child

def run():
    permuted, row_map, counts = ops.topk_permute(wide, ids32, 8)
    out = ops.topk_unpermute(permuted, row_map, double)
    grads = ops.topk_unpermute_backward(x, permuted, row_map, weights)
    remapped = ops.ep_remap(ids32, half, expert_offset=2, num_local_experts=4)
    moe = ops.fused_mxfp4_moe(wide, ids32, half, *experts, w13_layout="gate_up")
    moe_grads = ops.fused_mxfp4_moe_backward(moe, wide, ids, weights, *experts, w13_layout="gate_up")
    return [permuted, row_map, counts, out, *grads, *remapped, moe, *moe_grads]

expected = run()
assert torch.get_num_threads() == 2
child = os.fork()
if child == 0:
    signal.alarm(30)
    same = all(a.view(torch.uint8).numpy().tobytes() == b.view(torch.uint8).numpy().tobytes()
               for a, b in zip(run(), expected))
    os._exit(0 if same else 1)
assert os.waitpid(child, 0)[1] == 0
"""


def test_ops_work_in_a_forked_child():
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, cwd=root, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
