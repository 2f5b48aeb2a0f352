"""Which implementation the tests in tests/ops run: MOE_OPS_TEST_BACKEND.

cpu (default), cuda, npu   the registered ops on tensors of that device
reference                  the oracle itself, against the hand-computed cases
triton-interpret           the Triton kernels on CPU tensors, in Triton's interpreter
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

BACKEND = os.environ.get("MOE_OPS_TEST_BACKEND", "cpu")
BACKENDS = ("cpu", "cuda", "npu", "reference", "triton-interpret")
if BACKEND not in BACKENDS:
    raise pytest.UsageError(f"MOE_OPS_TEST_BACKEND must be one of {', '.join(BACKENDS)}, got {BACKEND}")
if BACKEND == "triton-interpret":
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined
if BACKEND == "npu":
    importlib.import_module("tests.npu.device").load()

import torch  # noqa: E402

import moe_ops  # noqa: E402
from moe_ops.schema import OPS  # noqa: E402


def _sum_products_exactly() -> None:
    """The interpreter multiplies with numpy, whose order of a sum depends on the shape and the processor. In float64
    the sums of the tests' products are exact or nearly so, which makes the order of a kernel's own steps the only one.
    """
    from triton.runtime import interpreter

    numpy = interpreter.np

    def matmul(a: Any, b: Any, dtype: Any) -> Any:
        return numpy.matmul(a, b, dtype=numpy.float64 if dtype == numpy.float32 else dtype).astype(dtype)

    interpreter.np = ModuleType("numpy")
    interpreter.np.__dict__.update(numpy.__dict__, matmul=matmul)


if BACKEND == "triton-interpret":
    _sum_products_exactly()


def _namespace() -> SimpleNamespace:
    if BACKEND == "reference":
        return SimpleNamespace(**{op.name: getattr(moe_ops.reference, op.name, None) for op in OPS})
    if BACKEND == "triton-interpret":
        functions = {}
        for op in OPS:
            file = op.kernels.get("CUDA", "")
            if file.startswith("triton/"):
                module = importlib.import_module("moe_ops." + file.removesuffix(".py").replace("/", "."))
                functions[op.name] = getattr(module, op.name)
        return SimpleNamespace(**functions)
    return SimpleNamespace(**{op.name: getattr(torch.ops.moe_ops, op.name) for op in OPS})


@pytest.fixture(scope="session")
def backend() -> str:
    return BACKEND


@pytest.fixture(scope="session")
def ops() -> SimpleNamespace:
    return _namespace()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device(BACKEND if BACKEND in ("cuda", "npu") else "cpu")


@pytest.fixture(autouse=True)
def same_numbers_every_run():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_memory(request: pytest.FixtureRequest):
    """Fill everything that torch.empty returns, also to C++, with NaN or the largest integer: an element that a kernel
    does not write cannot pass."""
    if request.node.get_closest_marker("unpoisoned"):
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
