"""torch.compile, torch.export and AOTInductor over the ops, on the CPU or (MOE_OPS_TEST_BACKEND=cuda) on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from tests.conftest import BACKEND
from tests.packages import loader_fault
from tests.support import assert_close, assert_same, make_experts, make_routing, make_rows

pytestmark = [
    pytest.mark.skipif(BACKEND not in ("cpu", "cuda"), reason="about inductor on CPU and CUDA tensors"),
    pytest.mark.unpoisoned,
]
E, K, H, I = 4, 2, 64, 32  # noqa: E741  (the names of the documentation)


class Layer(torch.nn.Module):
    """remap, permute, a dense product per row, unpermute, and the fused experts."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        for name, tensor in make_experts(E, I, H, seed).items():
            self.register_buffer(name, tensor)
        self.matrix = torch.nn.Parameter(make_rows(H, H, torch.float32, seed) / 8)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ops = torch.ops.moe_ops
        local, local_weights = ops.ep_remap(ids, weights, expert_offset=0, num_local_experts=E, fill="skip")
        permuted, row_map, _ = ops.topk_permute(x, local, E)
        dense = ops.topk_unpermute(torch.tanh(permuted @ self.matrix), row_map, local_weights)
        return dense + ops.fused_mxfp4_moe(
            x, local, local_weights, self.w13, self.w13_scale, self.w2, self.w2_scale, w13_layout="gate_up"
        )


def inputs(tokens: int, device, seed: int = 0):
    ids, weights = make_routing(tokens, K, E, seed, invalid=0.2)
    return make_rows(tokens, H, torch.float32, seed).to(device), ids.to(device), weights.to(device)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def test_one_graph_for_every_token_count(device):
    """One for T >= 2, and at most one more for T = 1."""
    layer = Layer().to(device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    with torch.no_grad():
        for tokens in (5, 2, 17, 64, 3):
            args = inputs(tokens, device, tokens)
            assert_same(compiled(*args), layer(*args).cpu())
        assert counter.frame_count == 1
        args = inputs(1, device)
        assert_same(compiled(*args), layer(*args).cpu())
        assert counter.frame_count <= 2


def test_automatic_dynamic_shapes(device):
    """Without being told, a second token count makes the sizes dynamic, and a third compiles nothing."""
    layer = Layer().to(device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    with torch.no_grad():
        for tokens in (5, 9, 31, 2):
            args = inputs(tokens, device, tokens)
            assert_same(compiled(*args), layer(*args).cpu())
    assert counter.frame_count == 2


def test_twelve_identical_layers_compile_once(device):
    layers = [Layer(seed).to(device) for seed in range(12)]
    args = inputs(6, device)
    with torch.no_grad():
        expected = [layer(*args).cpu() for layer in layers]
        for layer in layers:
            layer.compile(fullgraph=True, backend="aot_eager")
        for layer, wanted in zip(layers, expected, strict=True):
            assert_same(layer(*args), wanted)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor(device, mode):
    layer = Layer().to(device)
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    with torch.no_grad():
        for seed in range(4):
            args = inputs(6, device, seed)
            assert_close(compiled(*args), layer(*args), max_tol=1e-5, rms_tol=1e-6)
    if device.type == "cuda" and mode == "reduce-overhead":
        assert not {name: n for name, n in counters["inductor"].items() if "cudagraph_skips" in name}


def test_training(device):
    layer = Layer().to(device)
    compiled = torch.compile(layer, fullgraph=True)
    gradients = []
    for function in (layer, compiled):
        x, ids, weights = inputs(6, device)
        x.requires_grad_()
        weights.requires_grad_()
        layer.zero_grad()
        function(x, ids, weights).square().sum().backward()
        gradients.append((x.grad, weights.grad, layer.matrix.grad.clone()))
    for actual, expected in zip(gradients[1], gradients[0], strict=True):
        assert_close(actual, expected, max_tol=1e-4, rms_tol=1e-5)


def test_mutating_variants_compile(device):
    layer = Layer().to(device)

    def run(x, ids, weights):
        permuted = torch.zeros(x.shape[0] * K, H, device=x.device)
        row_map, _ = torch.ops.moe_ops.topk_permute_out(x, ids, E, out=permuted)
        out = torch.empty_like(x)
        torch.ops.moe_ops.fused_mxfp4_moe_out(
            x, ids, weights, layer.w13, layer.w13_scale, layer.w2, layer.w2_scale, w13_layout="gate_up", out=out
        )
        return out + torch.ops.moe_ops.topk_unpermute(permuted, row_map, weights)

    with torch.no_grad():
        args = inputs(6, device)
        assert_close(torch.compile(run, fullgraph=True)(*args), run(*args), max_tol=1e-5, rms_tol=1e-6)


def test_route_metadata_compiles(device):
    def run(counts):
        metadata = torch.ops.moe_ops.route_metadata(counts, 1, mode="pull")
        return metadata[0] + metadata[4], metadata[6]

    counts = torch.randint(0, 9, (4, 10), dtype=torch.int32, device=device)
    for actual, expected in zip(torch.compile(run, fullgraph=True)(counts), run(counts), strict=True):
        assert_same(actual, expected.cpu())


def test_export(device):
    layer = Layer().to(device)
    tokens = torch.export.Dim("tokens", min=2, max=1024)
    shapes = ({0: tokens}, {0: tokens}, {0: tokens})
    program = torch.export.export(layer, inputs(6, device), dynamic_shapes=shapes)
    decomposed = program.run_decompositions()
    with torch.no_grad():
        for count in (6, 19):
            args = inputs(count, device, count)
            assert_same(program.module()(*args), layer(*args).cpu())
            assert_same(decomposed.module()(*args), layer(*args).cpu())


def test_aotinductor_package(device, tmp_path):
    """A package is for a process that has imported moe_ops."""
    if fault := loader_fault(device.type):
        pytest.skip(fault)
    layer = Layer().to(device)
    tokens = torch.export.Dim("tokens", min=2, max=1024)
    with torch.no_grad():
        program = torch.export.export(layer, inputs(6, device), dynamic_shapes=({0: tokens}, {0: tokens}, {0: tokens}))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
        loaded = torch._inductor.aoti_load_package(package)
        for count in (6, 33):
            args = inputs(count, device, count)
            assert_close(loaded(*args), layer(*args), max_tol=1e-5, rms_tol=1e-6)


def test_errors_reach_the_caller(device):
    def run(x, ids):
        return torch.ops.moe_ops.topk_permute(x, ids, 0)

    x, ids, _ = inputs(4, device)
    with pytest.raises(Exception, match="topk_permute: num_experts must be a positive number of experts, got 0"):
        torch.compile(run, fullgraph=True, backend="aot_eager")(x, ids)
