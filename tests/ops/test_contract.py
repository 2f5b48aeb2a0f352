"""What holds for every op: opcheck, and fakes that agree with the kernels in shape, dtype and stride."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.conftest import BACKEND
from tests.samples import Sample, repeatable_tickets, samples

pytestmark = pytest.mark.skipif(BACKEND in ("reference", "triton-interpret"), reason="about registered ops")
DEVICE = torch.device(BACKEND if BACKEND in ("cuda", "npu") else "cpu")
SAMPLES = samples(DEVICE) if BACKEND in ("cpu", "cuda", "npu") else []


@pytest.fixture(scope="module", autouse=True)
def constant_tickets():
    with repeatable_tickets():
        yield


def call(sample: Sample):
    return getattr(torch.ops.moe_ops, sample.op).default


@pytest.mark.unpoisoned  # opcheck compares two runs of the whole output storage
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: f"{s.op}-{s.id}")
def test_opcheck(sample: Sample):
    torch.library.opcheck(call(sample), sample.args, sample.options)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: f"{s.op}-{s.id}")
def test_fake_agrees_with_kernel(sample: Sample):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake_args, fake_options = torch.utils._pytree.tree_map(
            lambda value: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value,
            (sample.args, sample.options),
        )
        fake = call(sample)(*fake_args, **fake_options)
    real = call(sample)(*sample.args, **sample.options)
    fakes, reals = torch.utils._pytree.tree_leaves(fake), torch.utils._pytree.tree_leaves(real)
    assert len(fakes) == len(reals)
    for left, right in zip(fakes, reals, strict=True):
        if right is None:
            assert left is None
            continue
        assert left.shape == right.shape
        assert left.dtype == right.dtype
        assert left.stride() == right.stride()
        assert left.device == right.device


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: f"{s.op}-{s.id}")
def test_results_are_fresh(sample: Sample):
    """No output shares memory with an input or with the output of an earlier call, and inputs are not written."""
    tensors = [v for v in (*sample.args, *sample.options.values()) if isinstance(v, torch.Tensor)]
    written = sample.options.get("out")
    before = [tensor.clone() for tensor in tensors]
    outputs = []
    for _ in range(2):
        result = call(sample)(*sample.args, **sample.options)
        outputs += [value for value in torch.utils._pytree.tree_leaves(result) if value is not None]
    for tensor, copy in zip(tensors, before, strict=True):
        if tensor is not written:
            assert torch.equal(tensor, copy)
    pointers = [value.data_ptr() for value in outputs if value.numel()]
    inputs = [tensor.data_ptr() for tensor in tensors if tensor.numel()]
    assert len(set(pointers)) == len(pointers)
    assert not set(pointers) & set(inputs)
