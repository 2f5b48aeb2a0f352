"""fused_mxfp4_moe on the CPU: threads, forks, and the choice of the instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

import moe_ops
from tests.support import assert_same, make_experts, make_routing, make_rows

pytestmark = pytest.mark.unpoisoned


def call(tokens: int = 40, seed: int = 0) -> torch.Tensor:
    x, (ids, routing) = make_rows(tokens, 96, torch.bfloat16, seed), make_routing(tokens, 2, 4, seed)
    return moe_ops.fused_mxfp4_moe(x, ids, routing, **make_experts(4, 64, 96), w13_layout="gate_up")


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_any_number_of_threads_gives_the_same_bits(tokens):
    before = torch.get_num_threads()
    try:
        results = []
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            results.append(call(tokens))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert_same(result, results[0])


def test_concurrent_callers():
    expected = [call(seed=seed) for seed in range(4)]
    results: list[list[torch.Tensor]] = [[] for _ in range(4)]

    def work(seed: int) -> None:
        for _ in range(5):
            results[seed].append(call(seed=seed))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    for seed in range(4):
        assert len(results[seed]) == 5
        for result in results[seed]:
            assert_same(result, expected[seed])


FORK = """
import os, sys, torch
from tests.kernels.test_op_threads import call
torch.set_num_threads(2)
expected = call()
child = os.fork()
if child == 0:
    ok = torch.equal(call(), expected) and torch.equal(call(), expected)
    grandchild = os.fork()
    if grandchild == 0:
        os._exit(0 if torch.equal(call(), expected) else 1)
    ok = ok and os.waitpid(grandchild, 0)[1] == 0
    os._exit(0 if ok else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_after_fork():
    """OpenMP's threads are gone in a child; the op has run in the parent."""
    assert subprocess.run([sys.executable, "-c", FORK], timeout=120, cwd=os.getcwd()).returncode == 0


def test_an_unknown_instruction_set_is_refused_for_rows():
    """They are chosen once in a process."""
    code = (
        "import torch, moe_ops; moe_ops.topk_unpermute(torch.zeros(2, 32), torch.tensor([[0, 1]], dtype=torch.int32))"
    )
    environment = {**os.environ, "MOE_OPS_CPU_ISA": "mmx"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert "MOE_OPS_CPU_ISA must be one of" in result.stderr and "got 'mmx'" in result.stderr


def test_unknown_instruction_set(monkeypatch):
    monkeypatch.setenv("MOE_OPS_CPU_ISA", "mmx")
    with pytest.raises(RuntimeError, match=r"MOE_OPS_CPU_ISA must be one of .*'scalar', got 'mmx'"):
        call()


def test_instruction_sets_agree(monkeypatch):
    monkeypatch.setenv("MOE_OPS_CPU_ISA", "scalar")
    expected = call(3).float()
    for isa in ("amx", "avx512", "avx2", "neon"):
        monkeypatch.setenv("MOE_OPS_CPU_ISA", isa)
        try:
            actual = call(3).float()
        except RuntimeError:  # of another processor family
            continue
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2**-7)


def test_many_rows_of_many_experts_give_the_bits_of_few():
    """The outputs of the experts are more than one wave of the sum holds, five of them."""
    x, (ids, routing) = make_rows(1024, 4096, torch.bfloat16, 0), make_routing(1024, 8, 16, 0)
    experts = make_experts(16, 32, 4096)

    def run(tokens: slice) -> torch.Tensor:
        return moe_ops.fused_mxfp4_moe(
            x[tokens], ids[tokens], routing[tokens], **experts, w13_layout="gate_up", batch_invariant=True
        )

    assert_same(run(slice(None)), torch.cat([run(slice(t, t + 64)) for t in range(0, 1024, 64)]))
