"""submit and sync under torch.compile, export and AOTInductor: neither dropped, merged nor reordered."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

import moe_ops
from tests.engine.support import E, H, I, add_layer, make_batch, new_engine
from tests.packages import loader_fault
from tests.support import assert_close, make_experts

pytestmark = pytest.mark.unpoisoned
ops = torch.ops.moe_ops


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    # The cache's key lacks the effect registration, so that an entry of another build could be used.
    with torch._functorch.config.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def engine():
    with new_engine() as engine:
        yield engine


class Layer(torch.nn.Module):
    """A shared expert, device experts, CPU experts, a residual."""

    def __init__(self, experts: moe_ops.CpuExperts, seed: int) -> None:
        super().__init__()
        self.experts = experts
        for name, tensor in make_experts(E, I, H, seed).items():
            self.register_buffer(name, tensor)
        self.shared = torch.nn.Parameter(torch.randn(H, H, generator=torch.Generator().manual_seed(seed)) / 16)

    def forward(self, x, ids, weights):
        ticket, _ = ops.cpu_moe_submit(x.detach(), ids, weights, self.experts.handle)
        shared = torch.tanh(x @ self.shared)
        y = ops.fused_mxfp4_moe(
            x, ids, weights, self.w13, self.w13_scale, self.w2, self.w2_scale, w13_layout="gate_up", after=ticket
        )
        return x + ops.cpu_moe_sync(ticket, y + shared) * 0.5


def make_model(engine, name: str, count: int) -> torch.nn.Sequential:
    return torch.nn.ModuleList([Layer(add_layer(engine, f"{name}{i}", seed=i), 20 + i) for i in range(count)])


def run_layers(layers, x, ids, weights):
    for layer in layers:
        x = layer(x, ids, weights)
    return x


def order_of_calls(function) -> list[str]:
    """The ops of moe_ops in the order in which they ran."""
    short = {"moe_ops::cpu_moe_submit": "submit", "moe_ops::fused_mxfp4_moe": "device", "moe_ops::cpu_moe_sync": "sync"}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    events = sorted((e for e in profile.events() if e.name in short), key=lambda e: e.time_range.start)
    return [short[e.name] for e in events]


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "grad"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_overlap_survives_the_compiler(engine, mode, grad, request):
    """In every layer: submit, then the device experts, then sync."""
    layers = make_model(engine, request.node.name, 2)
    x, ids, weights = make_batch(5)
    x.requires_grad_(grad)
    compiled = torch.compile(run_layers, fullgraph=True, mode=mode)
    with torch.set_grad_enabled(grad):
        wanted = run_layers(layers, x, ids, weights)
        assert_close(compiled(layers, x, ids, weights), wanted, max_tol=1e-4, rms_tol=1e-5)
        submitted = engine.stats()["submitted"]
        order = order_of_calls(lambda: compiled(layers, x, ids, weights))
    assert order == ["submit", "device", "sync"] * 2
    assert engine.stats()["submitted"] == submitted + 2
    assert engine.stats()["outstanding"] == 0


def test_gradients_of_the_device_side(engine):
    layers = make_model(engine, "gradients", 2)
    results = []
    for function in (run_layers, torch.compile(run_layers, fullgraph=True)):
        x, ids, weights = make_batch(5)
        x.requires_grad_()
        layers.zero_grad()
        submitted = engine.stats()["submitted"]
        out = function(layers, x, ids, weights)
        out.square().sum().backward()
        assert engine.stats()["submitted"] == submitted + 2  # the backward recomputes no submit
        results.append([out.detach(), x.grad, *(layer.shared.grad.clone() for layer in layers)])
    for actual, wanted in zip(results[1], results[0], strict=True):
        assert_close(actual, wanted, max_tol=1e-4, rms_tol=1e-5)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "grad"])
def test_equal_submits_are_not_merged_and_unused_ones_not_dropped(engine, grad, request):
    layer = add_layer(engine, request.node.name)

    def run(x, ids, weights):
        first, _ = ops.cpu_moe_submit(x.detach(), ids, weights, layer.handle)
        second, _ = ops.cpu_moe_submit(x.detach(), ids, weights, layer.handle)
        ops.cpu_moe_submit(x.detach(), ids, weights, layer.handle)  # its ticket is not used
        return ops.cpu_moe_sync(second, ops.cpu_moe_sync(first, x))

    x, ids, weights = make_batch(5)
    x.requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        wanted = run(x, ids, weights)
        compiled = torch.compile(run, fullgraph=True)
        assert_close(compiled(x, ids, weights), wanted, max_tol=1e-5, rms_tol=1e-6)
        engine.discard_unsynced()
        submitted = engine.stats()["submitted"]
        compiled(x, ids, weights)
    assert engine.stats()["submitted"] == submitted + 3
    assert engine.discard_unsynced() == 1


def test_twelve_identical_layers_compile_once(engine):
    layers = make_model(engine, "twelve", 12)
    x, ids, weights = make_batch(5)
    with torch.no_grad():
        wanted = run_layers(layers, x, ids, weights)
        for layer in layers:
            layer.compile(fullgraph=True, backend="aot_eager")
        assert_close(run_layers(layers, x, ids, weights), wanted, max_tol=1e-5, rms_tol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1


def test_deferral_through_compiled_layers_takes_two_graphs(engine):
    from tests.engine.test_hybrid import make_hybrid, run_hybrid

    layers = [make_hybrid(engine, f"two-graphs{i}", slots=2, max_deferred=0 if i == 3 else 1, seed=i) for i in range(4)]
    batch = make_batch(5)
    with torch.no_grad():
        wanted = run_hybrid(layers, *batch)
        for layer in layers:
            layer.compile(fullgraph=True, backend="aot_eager")
        for _ in range(2):
            assert_close(run_hybrid(layers, *batch), wanted, max_tol=1e-5, rms_tol=1e-6)
    assert counters["stats"]["unique_graphs"] == 2
    assert engine.stats()["deferred_untaken"] == 0


def test_one_graph_for_every_token_count(engine):
    layer = Layer(add_layer(engine, "dynamic"), 3)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for tokens in (5, 2, 17, 64):
            batch = make_batch(tokens, seed=tokens)
            assert_close(compiled(*batch), layer(*batch), max_tol=1e-5, rms_tol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1


def test_export_and_package(engine, tmp_path):
    """The handle is baked in; it is a function of the names, so the artefact works wherever the engine exists."""
    if fault := loader_fault("cpu"):
        pytest.skip(fault)
    layer = Layer(add_layer(engine, "exported"), 4)
    batch = make_batch(6)
    tokens = torch.export.Dim("tokens", min=2, max=512)
    with torch.no_grad():
        program = torch.export.export(layer, batch, dynamic_shapes=({0: tokens}, {0: tokens}, {0: tokens}))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
        loaded = torch._inductor.aoti_load_package(package)
        for count in (6, 19):
            batch = make_batch(count, seed=count)
            wanted = layer(*batch)
            assert_close(program.module()(*batch), wanted, max_tol=1e-5, rms_tol=1e-6)
            assert_close(program.run_decompositions().module()(*batch), wanted, max_tol=1e-5, rms_tol=1e-6)
            assert_close(loaded(*batch), wanted, max_tol=1e-4, rms_tol=1e-5)
    assert engine.stats()["outstanding"] == 0


def test_a_gradient_into_submit_is_refused_by_the_compiler_too(engine):
    layer = add_layer(engine, "refused")

    def run(x, ids, weights):
        return ops.cpu_moe_sync(ops.cpu_moe_submit(x, ids, weights, layer.handle)[0], x)

    x, ids, weights = make_batch(3)
    submitted = engine.stats()["submitted"]
    with pytest.raises(Exception, match="hidden_states must be detached"):
        torch.compile(run, fullgraph=True, backend="aot_eager")(x.requires_grad_(), ids, weights)
    assert engine.stats()["submitted"] == submitted
