"""Ops are called from several Python threads at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.conftest import BACKEND
from tests.samples import samples
from tests.support import assert_same

pytestmark = pytest.mark.skipif(BACKEND != "cpu", reason="about the CPU kernels")


def test_concurrent_calls_give_the_same_bits():
    cases = [s for s in samples(torch.device("cpu")) if "out" not in s.options and not s.op.startswith("cpu_moe")]

    def run(sample):
        return torch.utils._pytree.tree_leaves(getattr(torch.ops.moe_ops, sample.op)(*sample.args, **sample.options))

    expected = [run(sample) for sample in cases]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            for results, wanted in zip(pool.map(run, cases), expected, strict=True):
                for actual, value in zip(results, wanted, strict=True):
                    assert_same(actual, value)
