"""A fake raises the same error, word for word, as the kernel."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.conftest import BACKEND
from tests.samples import Sample, repeatable_tickets, samples

pytestmark = pytest.mark.skipif(BACKEND in ("reference", "triton-interpret"), reason="about registered ops")
DEVICE = torch.device(BACKEND if BACKEND in ("cuda", "npu") else "cpu")


@pytest.fixture(scope="module", autouse=True)
def constant_tickets():
    with repeatable_tickets():
        yield


def damaged(tensor: torch.Tensor) -> list[torch.Tensor | None]:
    """Wrong dtypes, wrong rank, wrong size, nothing."""
    wrong = [torch.empty_like(tensor, dtype=dtype) for dtype in (torch.int16, torch.complex64)]
    return [*wrong, tensor.unsqueeze(0), torch.cat([tensor, tensor[:1]]), None]


def broken(sample: Sample) -> list[tuple[str, tuple, dict]]:
    """The sample with one tensor damaged at a time, and with wrong words and numbers."""
    cases = []
    for index, value in enumerate(sample.args):
        if isinstance(value, torch.Tensor):
            for n, bad in enumerate(damaged(value)):
                args = (*sample.args[:index], bad, *sample.args[index + 1 :])
                cases.append((f"arg{index}-{n}", args, sample.options))
    for name, value in sample.options.items():
        if isinstance(value, torch.Tensor):
            cases += [
                (f"{name}-{n}", sample.args, {**sample.options, name: bad}) for n, bad in enumerate(damaged(value))
            ]
        elif isinstance(value, str):
            cases.append((name, sample.args, {**sample.options, name: "nonsense"}))
        elif isinstance(value, float):
            cases.append((name, sample.args, {**sample.options, name: float("inf")}))
        elif isinstance(value, int) and not isinstance(value, bool):
            cases.append((name, sample.args, {**sample.options, name: -3}))
    return cases


def outcome(op, args, options) -> str:
    try:
        op(*args, **options)
    except ValueError as error:
        return str(error)
    return "no error"


SAMPLES = [s for s in samples(DEVICE) if "no-tokens" not in s.id] if BACKEND in ("cpu", "cuda", "npu") else []


# Errors that depend on values, which a fake does not have: the size of device_out is that of the ticket's job.
UNKNOWN_TO_FAKES = {("cpu_moe_sync", "arg1-3")}


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: f"{s.op}-{s.id}")
def test_same_words(sample: Sample):
    op = getattr(torch.ops.moe_ops, sample.op).default
    raised = 0
    for name, args, options in broken(sample):
        if (sample.op, name) in UNKNOWN_TO_FAKES:
            continue
        if not any(isinstance(value, torch.Tensor) for value in (*args, *options.values())):
            continue  # without a tensor torch finds no kernel
        real = outcome(op, args, options)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake_args, fake_options = torch.utils._pytree.tree_map(
                lambda value, mode=mode: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value,
                (args, options),
            )
            fake = outcome(op, fake_args, fake_options)
        assert fake == real, name
        if real != "no error":
            raised += 1
            assert real.startswith(f"{sample.op}: "), name
            assert " must be " in real and ", got " in real, name
    assert raised >= 2


def test_sizes_read_from_data_are_checked_at_run_time():
    """A capacity that a graph computes: traced without a guard, refused when it comes out wrong."""

    def permute(x, ids, sizes):
        capacity, experts = sizes.tolist()
        return torch.ops.moe_ops.topk_permute(x, ids, experts, num_out_tokens=capacity)

    def remap(x, ids, sizes):
        first, count = sizes.tolist()
        return torch.ops.moe_ops.ep_remap(ids, x, expert_offset=first, num_local_experts=count)

    x = torch.ones(3, 2, device=DEVICE)
    ids = torch.zeros(3, 2, dtype=torch.int64, device=DEVICE)
    for function in (permute, remap):
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
            for sizes in ([5, 4], [2, 7]):
                for actual, expected in zip(
                    compiled(x, ids, torch.tensor(sizes)), function(x, ids, torch.tensor(sizes)), strict=True
                ):
                    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
            with pytest.raises((ValueError, RuntimeError)):
                compiled(x, ids, torch.tensor([-1, 4]))
