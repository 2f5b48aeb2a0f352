"""On a CUDA device: hybrid layers, and what profilers see."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch

import moe_ops
from tests.engine.support import add_layer, new_engine
from tests.engine.test_cuda_engine import batch_of, run, to_cuda, warm_up

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.unpoisoned,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def engine():
    with new_engine() as engine:
        yield engine


@pytest.mark.parametrize(
    ("weight_layout", "dtype"),
    [("checkpoint", torch.float32), ("checkpoint", torch.bfloat16), ("auto", torch.bfloat16), ("auto", torch.float32)],
)
def test_residents_change_under_a_captured_graph(engine, weight_layout, dtype):
    """The device's slots keep their addresses: a graph sees the new residents, and every expert counts once."""
    stack = [
        moe_ops.HybridExperts(
            add_layer(engine, f"hybrid{i}-{weight_layout}-{dtype}", seed=i),
            2,
            device="cuda",
            weight_layout=weight_layout,
        )
        for i in range(2)
    ]
    hopper = weight_layout == "auto" and moe_ops.cuda.slots.slots_reason(torch.device("cuda")) is None
    assert stack[0].weight_layout == ("sm90_v1" if hopper else "checkpoint")
    tolerance = 2e-3 if dtype == torch.float32 else 2e-2

    def model(stack, x, ids, weights):
        for layer in stack:
            x = x + layer(x, ids, weights)[0]
        return x

    batch = batch_of(11, dtype=dtype)
    static = to_cuda(batch)
    with new_engine() as other, torch.no_grad():
        alone = [moe_ops.HybridExperts(add_layer(other, f"{i}", seed=i), 0) for i in range(2)]
        wanted = model(alone, *batch)
        warm_up(lambda: model(stack, *static))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(stack, *static)
        for residents in ([], [0, 1], [3], [4, 0], [5, 2], []):
            for layer in stack:
                layer.place(residents)
            graph.replay()
            torch.testing.assert_close(out.cpu(), wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))
            assert [layer.residents() for layer in stack] == [residents] * 2


def test_the_profiler_shows_ops_and_copies(engine):
    layers = [add_layer(engine, f"profiled{i}", seed=i).cuda() for i in range(2)]
    static = to_cuda(batch_of(3))
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run(layers, *static)
        torch.cuda.synchronize()
    names = {event.name for event in profile.events()}
    assert {"moe_ops::cpu_moe_submit", "moe_ops::cpu_moe_sync"} <= names
    for kernel in ("copy_inputs_kernel", "ask_for_rows_kernel", "add_staged_kernel"):
        assert any(kernel in name for name in names), (kernel, names)


# What Nsight Systems does: a library that NVTX loads, and that is told of every range.
INJECTION = r"""
#include <stddef.h>
#include <stdio.h>
#include <stdint.h>
typedef void (*Function)(void);
typedef struct { size_t size; int (*table)(uint32_t module, Function*** functions, unsigned* count); } Callbacks;
static int push(const char* name) { fprintf(stderr, "range %s\n", name); return 0; }
int InitializeInjectionNvtx2(const void* (*export_table)(uint32_t)) {
  Function** functions;
  unsigned count;
  const Callbacks* callbacks = export_table(1);
  if (!callbacks || !callbacks->table(1, &functions, &count)) return 0;
  *functions[9] = (Function)push;  // nvtxRangePushA
  return 1;
}
"""


def test_jobs_are_nvtx_ranges(tmp_path):
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "injection.c").write_text(INJECTION)
    library = tmp_path / "injection.so"
    subprocess.run([compiler, "-shared", "-fPIC", str(tmp_path / "injection.c"), "-o", str(library)], check=True)
    code = (
        "import torch, moe_ops\nfrom tests.engine.support import *\n"
        "with moe_ops.CpuMoeEngine('ranges', threads=1) as engine:\n"
        "    layer = add_layer(engine, 'first')\n"
        "    layer.sync(layer.submit(*make_batch(4))[0], torch.zeros(4, H))\n"
    )
    environment = {**os.environ, "NVTX_INJECTION64_PATH": str(library)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "range ranges/first" in done.stderr
