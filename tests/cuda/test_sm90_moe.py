"""fused_mxfp4_moe over weights in layout sm90_v1, on a Hopper card, against the reference."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

import moe_ops
from moe_ops import reference
from moe_ops._register import MISSING
from moe_ops.cuda import ALL_SCALES, LAYOUT, autotune, plans, prepare_sm90, sm90_reason, warm_up
from moe_ops.experts import Mxfp4Experts

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not HOPPER or ("_sm90_decode", "CUDA") in MISSING, reason="needs a Hopper card and the native CUDA library"
    ),
]
NAMES = ("w13", "w13_scale", "w2", "w2_scale")


def layer(hidden, intermediate, num_experts, *, bias=False, seed=0, scales=(119, 123)):
    generator = torch.Generator("cuda").manual_seed(seed)

    def random(*shape, low=0, high=256):
        return torch.randint(low, high, shape, dtype=torch.uint8, device="cuda", generator=generator)

    weights = [
        random(num_experts, 2 * intermediate, hidden // 2),
        random(num_experts, 2 * intermediate, hidden // 32, low=scales[0], high=scales[1]),
        random(num_experts, hidden, intermediate // 2),
        random(num_experts, hidden, intermediate // 32, low=scales[0], high=scales[1]),
    ]
    options = {}
    if bias:
        options["w13_bias"] = torch.randn(num_experts, 2 * intermediate, device="cuda", generator=generator)
        options["w2_bias"] = torch.randn(num_experts, hidden, device="cuda", generator=generator)
    return weights, options


def batch(num_tokens, hidden, num_experts, top_k, *, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(1000 + seed)
    x = (torch.randn(num_tokens, hidden, device="cuda", generator=generator) / 4).to(dtype)
    ids = torch.randint(-1, num_experts + 1, (num_tokens, top_k), device="cuda", generator=generator, dtype=torch.int32)
    weights = torch.rand(num_tokens, top_k, device="cuda", generator=generator)
    weights[weights < 0.1] = 0
    return x, ids, weights


def relative(actual, expected):
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def both(weights, inputs, **options):
    """(ours, reference) in float32."""
    expected = reference.fused_mxfp4_moe(*inputs, *weights, out_dtype=torch.float32, **options)
    packed = prepare_sm90(*(tensor.clone() for tensor in weights), w13_layout=options["w13_layout"])
    actual = moe_ops.fused_mxfp4_moe(*inputs, *packed, out_dtype=torch.float32, weight_layout=LAYOUT, **options)
    return actual, expected


# Hidden activations are rounded to 11 bits (decode) or to bfloat16 (larger batches); nothing else is.
def tolerance(num_tokens):
    return 3e-4 if num_tokens <= 64 else 4e-3


SIZES = [(32, 32), (64, 96), (96, 64), (288, 160), (576, 704), (640, 352), (2880, 2880), (5120, 576), (7168, 2048)]


@pytest.mark.parametrize("num_tokens", [1, 3, 17, 64, 65, 200])
@pytest.mark.parametrize("hidden, intermediate", SIZES)
def test_sizes(hidden, intermediate, num_tokens):
    weights, options = layer(hidden, intermediate, 8)
    actual, expected = both(weights, batch(num_tokens, hidden, 8, 4), w13_layout="gate_up", **options)
    assert relative(actual, expected) < tolerance(num_tokens)


@pytest.mark.parametrize("num_tokens", [5, 100])
@pytest.mark.parametrize("layout", ["gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
def test_rows_activations_and_biases(layout, activation, limit, num_tokens):
    weights, options = layer(288, 160, 4, bias=True)
    options |= {"w13_layout": layout, "activation": activation, "swiglu_limit": limit}
    actual, expected = both(weights, batch(num_tokens, 288, 4, 3), **options)
    assert relative(actual, expected) < tolerance(num_tokens)


@pytest.mark.parametrize("top_k", [1, 2, 6, 8, 16])
@pytest.mark.parametrize("num_tokens", [1, 40, 300])
def test_top_k(top_k, num_tokens):
    weights, options = layer(640, 352, 32)
    actual, expected = both(weights, batch(num_tokens, 640, 32, top_k), w13_layout="gate_up", **options)
    assert relative(actual, expected) < tolerance(num_tokens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [7, 150])
def test_dtypes_and_ids(dtype, num_tokens):
    weights, options = layer(640, 352, 8)
    x, ids, router = batch(num_tokens, 640, 8, 4, dtype=dtype)
    actual, expected = both(weights, (x, ids.long(), router.to(torch.bfloat16)), w13_layout="gate_up", **options)
    assert relative(actual, expected) < tolerance(num_tokens)
    rounded = moe_ops.fused_mxfp4_moe(
        x, ids, router, *prepare_sm90(*weights, w13_layout="gate_up"), w13_layout="gate_up", weight_layout=LAYOUT
    )
    assert rounded.dtype == dtype


@pytest.mark.parametrize("num_tokens", [1, 30, 500])
def test_scales_of_every_size(num_tokens):
    weights, options = layer(640, 352, 8, scales=(1, 129))
    actual, expected = both(weights, batch(num_tokens, 640, 8, 4), w13_layout="gate_up", **options)
    assert relative(actual, expected) < tolerance(num_tokens)


@pytest.mark.parametrize("num_tokens", [8, 64, 512])
def test_one_expert_for_all(num_tokens):
    weights, options = layer(640, 352, 8)
    x, ids, router = batch(num_tokens, 640, 8, 4)
    ids.fill_(3)
    actual, expected = both(weights, (x, ids, router), w13_layout="gate_up", **options)
    assert relative(actual, expected) < tolerance(num_tokens)


@pytest.mark.parametrize("num_tokens", [8, 200])
def test_no_expert_left_gives_zero_rows(num_tokens):
    weights, _ = layer(640, 352, 8)
    packed = prepare_sm90(*weights, w13_layout="gate_up")
    x, ids, router = batch(num_tokens, 640, 8, 4)
    out = torch.full((num_tokens, 640), float("nan"), device="cuda", dtype=torch.bfloat16)
    for dead in (torch.full_like(ids, -1), torch.full_like(ids, 8)):
        moe_ops.fused_mxfp4_moe_out(x, dead, router, *packed, w13_layout="gate_up", weight_layout=LAYOUT, out=out)
        assert (out == 0).all()
    empty = moe_ops.fused_mxfp4_moe(x[:0], ids[:0], router[:0], *packed, w13_layout="gate_up", weight_layout=LAYOUT)
    assert empty.shape == (0, 640)


@pytest.mark.parametrize("num_tokens", [16, 200])
def test_expert_map(num_tokens):
    weights, _ = layer(640, 352, 4)
    x, _, router = batch(num_tokens, 640, 4, 4)
    ids = torch.randint(-2, 12, (num_tokens, 4), device="cuda", dtype=torch.int32)
    expert_map = torch.tensor([-1, 3, 2, -1, 1, 0, -1, 9, -1, -1], dtype=torch.int32, device="cuda")
    actual, expected = both(weights, (x, ids, router), w13_layout="gate_up", expert_map=expert_map)
    assert relative(actual, expected) < tolerance(num_tokens)


@pytest.mark.parametrize("num_tokens", [40, 200])
def test_a_bad_row_stays_its_own(num_tokens):
    weights, _ = layer(640, 352, 8)
    packed = prepare_sm90(*weights, w13_layout="gate_up")
    x, ids, router = batch(num_tokens, 640, 8, 4)
    ids[3], router[3] = torch.arange(4, device="cuda"), 1

    def run(rows):
        return moe_ops.fused_mxfp4_moe(
            rows, ids, router, *packed, w13_layout="gate_up", weight_layout=LAYOUT, out_dtype=torch.float32
        )

    clean = run(x)
    x = x.clone()
    x[3, 7] = float("inf")
    dirty = run(x)
    others = torch.arange(num_tokens, device="cuda") != 3
    assert torch.equal(dirty[others], clean[others])
    assert not torch.isfinite(dirty[3]).all()


@pytest.mark.parametrize("num_tokens", [1, 33, 300])
def test_same_bits_again_in_replay_and_with_new_inputs(num_tokens):
    weights, _ = layer(640, 352, 8)
    packed = prepare_sm90(*weights, w13_layout="gate_up")
    first, second = batch(num_tokens, 640, 8, 4), batch(num_tokens, 640, 8, 4, seed=1)

    def run(inputs):
        return moe_ops.fused_mxfp4_moe(*inputs, *packed, w13_layout="gate_up", weight_layout=LAYOUT)

    expected = [run(first).clone(), run(second).clone()]
    assert all(torch.equal(run(first), expected[0]) for _ in range(5))
    held = [tensor.clone() for tensor in first]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [run(held) for _ in range(3)]
    for inputs, wanted in ((first, expected[0]), (second, expected[1]), (first, expected[0])):
        for target, source in zip(held, inputs, strict=True):
            target.copy_(source)
        graph.replay()
        assert all(torch.equal(out, wanted) for out in outs)


def test_batch_invariant():
    weights, _ = layer(640, 352, 8)
    packed = prepare_sm90(*weights, w13_layout="gate_up")
    x, ids, router = batch(150, 640, 8, 4)

    def run(rows):
        return moe_ops.fused_mxfp4_moe(
            x[rows], ids[rows], router[rows], *packed, w13_layout="gate_up", weight_layout=LAYOUT, batch_invariant=True
        )

    whole = run(slice(None))
    pieces = [run(slice(first, first + step)) for first, step in ((0, 1), (1, 7), (8, 64), (72, 78))]
    assert torch.equal(torch.cat(pieces), whole)


def test_two_streams_do_not_disturb_each_other():
    weights, _ = layer(640, 352, 8)
    packed = prepare_sm90(*weights, w13_layout="gate_up")
    inputs = [batch(16, 640, 8, 4, seed=seed) for seed in range(2)]

    def run(which):
        return moe_ops.fused_mxfp4_moe(*inputs[which], *packed, w13_layout="gate_up", weight_layout=LAYOUT)

    expected = [run(0).clone(), run(1).clone()]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = [[], []]
    for _ in range(20):
        for which, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[which].append(run(which))
    torch.cuda.synchronize()
    for which in range(2):
        assert all(torch.equal(out, expected[which]) for out in results[which])


def test_memory_of_preparing_is_the_weights_and_one_expert():
    weights, _ = layer(2880, 2880, 16)
    expert = sum(tensor[0].numel() for tensor in weights)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    prepare_sm90(*weights, w13_layout="gate_up")
    # A copy of the larger matrix, and what looking for scales takes.
    assert torch.cuda.max_memory_allocated() - before < expert


@pytest.mark.parametrize("num_tokens", [1, 5, 40, 300])
@pytest.mark.parametrize("low, high, power", [(0, 40, 100), (100, 200, -60), (252, 253, -120)])
def test_all_scales(low, high, power, num_tokens):
    """Values that float32 holds, through scales that bfloat16 weights do not."""
    weights, options = layer(640, 352, 8, bias=True)
    x, ids, router = batch(num_tokens, 640, 8, 2)
    x = (x.float() * 2.0**power).to(torch.bfloat16)
    generator = torch.Generator("cuda").manual_seed(3)
    scales = torch.randint(low, high, weights[1].shape, dtype=torch.uint8, device="cuda", generator=generator)
    weights[1] = scales
    scales[0, 3, 1], scales[1, 20, 2] = 254, 253
    weights[3][0, 5, 2], weights[3][1, 7, 1], weights[3][2, 9, 0] = 255, 0, 254
    expected = reference.fused_mxfp4_moe(
        *(x, ids, router), *weights, w13_layout="gate_up", out_dtype=torch.float32, **options
    )
    prepared = Mxfp4Experts(*weights, w13_layout="gate_up", **options).prepare(LAYOUT)
    assert prepared.weight_layout == ALL_SCALES
    actual = moe_ops.fused_mxfp4_moe(x, ids, router, **prepared.arguments(), out_dtype=torch.float32)
    assert torch.equal(torch.isnan(actual), torch.isnan(expected))
    assert torch.equal(torch.isinf(actual), torch.isinf(expected))
    finite = torch.isfinite(expected)
    assert relative(actual[finite], expected[finite]) < 4e-3


def test_reason():
    weights, _ = layer(96, 64, 4)
    assert sm90_reason(*weights) is None
    assert "the weights are on cpu" in sm90_reason(*(tensor.cpu() for tensor in weights))


@pytest.mark.parametrize("kernel", plans.KERNELS)
@pytest.mark.parametrize("num_tokens", [3, 100])
def test_every_kernel_serves_every_batch(kernel, num_tokens, monkeypatch):
    weights, _ = layer(640, 352, 8, bias=True)
    monkeypatch.setattr(plans, "PINS", plans.parse_pins(f"1-100000={kernel}"))
    plans.cached_plan.cache_clear()
    actual, expected = both(weights, batch(num_tokens, 640, 8, 4), w13_layout="gate_up")
    plans.cached_plan.cache_clear()
    assert relative(actual, expected) < 4e-3


def test_warm_up_and_tuning(monkeypatch, tmp_path):
    monkeypatch.setenv("MOE_OPS_CACHE_DIR", str(tmp_path))
    weights, _ = layer(640, 352, 8)
    prepared = Mxfp4Experts(*weights, w13_layout="gate_up").prepare(LAYOUT)
    warm_up(prepared.arguments(), 4, token_counts=(1, 100, 2000))
    chosen = autotune(prepared.arguments(), 4, token_counts=(8, 128))
    plans.forget_tuned()
    assert sorted(chosen) == [8, 128] and set(chosen.values()) <= set(plans.KERNELS)
    assert plans.cache_file().exists()


def test_a_large_batch_in_chunks(monkeypatch):
    weights, _ = layer(96, 64, 8)
    monkeypatch.setattr(plans, "WORKSPACE_BYTES", 300 * plans.Geometry(8, 96, 64, 4).bytes_per_token)
    plans.cached_plan.cache_clear()
    actual, expected = both(weights, batch(1000, 96, 8, 4), w13_layout="gate_up")
    plans.cached_plan.cache_clear()
    assert relative(actual, expected) < 4e-3


@pytest.mark.parametrize("num_tokens", [3, 100])
def test_compiled_with_cuda_graphs(num_tokens):
    """What the kernels keep between calls is not memory of the graphs' pool, which torch.compile would refuse."""
    weights, options = layer(640, 352, 8, bias=True)
    module = moe_ops.FusedMxfp4Experts(Mxfp4Experts(*weights, w13_layout="gate_up", **options)).prepare()
    assert module.weight_layout == LAYOUT
    compiled = torch.compile(module, fullgraph=True, mode="reduce-overhead")
    counters.clear()
    with torch.no_grad():
        for seed in range(4):
            inputs = batch(num_tokens, 640, 8, 4, seed=seed)
            assert torch.equal(compiled(*inputs), module(*inputs))
    assert not {name: n for name, n in counters["inductor"].items() if "cudagraph_skips" in name}


def test_graphs_come_and_go():
    weights, _ = layer(96, 64, 4)
    packed = prepare_sm90(*weights, w13_layout="gate_up")
    inputs = batch(3, 96, 4, 2)

    def run():
        return moe_ops.fused_mxfp4_moe(*inputs, *packed, w13_layout="gate_up", weight_layout=LAYOUT)

    expected = run()
    for _ in range(3):  # more graphs at a time than sets of counters are made at once
        graphs = [torch.cuda.CUDAGraph() for _ in range(70)]
        outs = []
        for graph in graphs:
            with torch.cuda.graph(graph):
                outs.append(run())
        for graph in graphs:
            graph.replay()
            graph.replay()
        assert all(torch.equal(out, expected) for out in outs)
        del graph, graphs, outs


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("num_tokens", [3, 100])
def test_a_second_device(num_tokens):
    weights, _ = layer(640, 352, 8)
    inputs = batch(num_tokens, 640, 8, 4)
    packed = prepare_sm90(*(tensor.clone() for tensor in weights), w13_layout="gate_up")
    expected = moe_ops.fused_mxfp4_moe(*inputs, *packed, w13_layout="gate_up", weight_layout=LAYOUT)
    there = prepare_sm90(*(tensor.to("cuda:1") for tensor in weights), w13_layout="gate_up")
    moved = [tensor.to("cuda:1") for tensor in inputs]  # the first device stays the current one
    actual = moe_ops.fused_mxfp4_moe(*moved, *there, w13_layout="gate_up", weight_layout=LAYOUT)
    assert torch.equal(actual.to("cuda:0"), expected)
