"""Over weights packed for Hopper, what the portable kernels compute: float32 rows, gradients, large batches of float16
rows or of all scale codes. Results have the bits that the same kernels give over the checkpoint's tensors."""

from __future__ import annotations

import pytest
import torch

import moe_ops
from moe_ops import reference
from moe_ops.cuda import ALL_SCALES, LAYOUT, plans, prepare_sm90, unpacked, warm_up
from moe_ops.experts import Mxfp4Experts
from tests.cuda.test_sm90_moe import batch, layer, pytestmark, relative  # noqa: F401  (the marks are this file's too)
from tests.support import assert_same

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 8, 288, 160, 4
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def copies_of(options):
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in options.items()}


def packed_and_raw(w13_layout, *, all_scales=False, bias=True):
    """Options with packed weights, and the same with the checkpoint's."""
    weights, biases = layer(HIDDEN, INTERMEDIATE, EXPERTS, bias=bias)
    if all_scales:
        weights[1][0, 3, 1], weights[3][1, 7, 1] = 0, 130
    raw = dict(zip(("w13", "w13_scale", "w2", "w2_scale"), weights, strict=True), w13_layout=w13_layout, **biases)
    prepared = Mxfp4Experts(**copies_of(raw)).prepare(LAYOUT)
    assert prepared.weight_layout == (ALL_SCALES if all_scales else LAYOUT)
    return prepared.arguments(), raw


@pytest.fixture(params=[1, 3, EXPERTS])
def experts_at_a_time(request, monkeypatch):
    bytes_per_expert = 2 * INTERMEDIATE * (HIDDEN // 2 + HIDDEN // 32)
    monkeypatch.setattr(unpacked, "BUFFER_BYTES", request.param * bytes_per_expert)


@pytest.mark.parametrize("num_tokens", [1, 20, 700])
@pytest.mark.parametrize("w13_layout", ["gate_up", "up_gate", "interleaved"])
def test_float32_rows(w13_layout, num_tokens, experts_at_a_time):
    packed, raw = packed_and_raw(w13_layout)
    options = {"activation": "swiglu_oai", "swiglu_limit": 2.0}
    x, ids, router = batch(num_tokens, HIDDEN, EXPERTS, TOP_K, dtype=torch.float32)
    ids[0] = -1
    expected = reference.fused_mxfp4_moe(x, ids, router, **raw, **options)
    for batch_invariant in (False, True):
        plain = moe_ops.fused_mxfp4_moe(x, ids, router, **raw, **options, batch_invariant=batch_invariant)
        actual = moe_ops.fused_mxfp4_moe(x, ids, router, **packed, **options, batch_invariant=batch_invariant)
        assert_same(actual, plain)
        assert (actual[0] == 0).all() and (num_tokens == 1 or relative(actual, expected) < 1e-5)
    out = torch.full_like(x, float("nan"))
    moe_ops.fused_mxfp4_moe_out(x, ids, router, **packed, **options, out=out)
    assert_same(out, moe_ops.fused_mxfp4_moe(x, ids, router, **packed, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 300])
@pytest.mark.parametrize("all_scales", [False, True])
def test_gradients(dtype, num_tokens, all_scales, experts_at_a_time):
    packed, raw = packed_and_raw("interleaved", all_scales=all_scales)
    x, _, router = batch(num_tokens, HIDDEN, EXPERTS, TOP_K, dtype=dtype)
    ids = torch.randint(-1, 11, (num_tokens, TOP_K), device="cuda", dtype=torch.int32)
    expert_map = torch.tensor([-1, 3, 2, 7, 1, 0, -1, 5, 4, 6], dtype=torch.int32, device="cuda")
    grad = torch.randn(num_tokens, HIDDEN, device="cuda").to(dtype)
    options = {"expert_map": expert_map}
    args = (grad, x, ids, router)
    expected = reference.fused_mxfp4_moe_backward(grad.float(), x.float(), ids, router, **raw, **options)
    plain = torch.ops.moe_ops.fused_mxfp4_moe_backward(*args, **raw, **options)
    actual = torch.ops.moe_ops.fused_mxfp4_moe_backward(*args, **packed, **options)
    for found, same, wanted in zip(actual, plain, expected, strict=True):
        assert_same(found, same)
        assert relative(found, wanted) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_batches_that_the_grouped_kernels_do_not_serve(dtype, experts_at_a_time):
    packed, raw = packed_and_raw("up_gate", all_scales=dtype == torch.bfloat16)
    for num_tokens in (plans.DECODE_TOKENS_ALONE, plans.DECODE_TOKENS_ALONE + 257):
        inputs = batch(num_tokens, HIDDEN, EXPERTS, TOP_K, dtype=dtype)
        actual = moe_ops.fused_mxfp4_moe(*inputs, **packed)
        expected = reference.fused_mxfp4_moe(*inputs, **raw, out_dtype=torch.float32)
        assert relative(actual, expected) < TOLERANCE[dtype]
        if num_tokens > plans.DECODE_TOKENS_ALONE:
            assert_same(actual, moe_ops.fused_mxfp4_moe(*inputs, **raw))


def test_experts_without_rows_are_not_unpacked():
    packed, _ = packed_and_raw("gate_up", bias=False)
    w13, w2 = unpacked.matrices_of(*[packed[name] for name in ("w13", "w13_scale", "w2", "w2_scale")], "gate_up")
    from moe_ops.triton._schedule import make_schedule

    ids = torch.tensor([[2, 5]], dtype=torch.int32, device="cuda")
    schedule = make_schedule(ids, EXPERTS, expert_map=None, topk_weights=None, batch_invariant=False)
    for matrix in (w13, w2):
        matrix.buffer.fill_(77)
        (part,) = matrix.parts(schedule)
        untouched = [bool((part.codes[expert] == 77).all()) for expert in range(EXPERTS)]
        assert untouched == [expert not in (2, 5) for expert in range(EXPERTS)]


def test_memory_beside_the_weights_is_the_buffer():
    weights, _ = layer(2880, 2880, 16)
    packed = prepare_sm90(*weights, w13_layout="gate_up")
    inputs = batch(8, 2880, 16, 4, dtype=torch.float32)
    unpacked_bytes, unpacked.BUFFER_BYTES = unpacked.BUFFER_BYTES, 40 << 20
    try:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        moe_ops.fused_mxfp4_moe(*inputs, *packed, w13_layout="gate_up", weight_layout=LAYOUT)
        assert torch.cuda.max_memory_allocated() - before < 44 << 20
    finally:
        unpacked.BUFFER_BYTES = unpacked_bytes


def train(experts, inputs, grad):
    x, router = (inputs[i].detach().clone().requires_grad_() for i in (0, 2))
    out = experts(x, inputs[1], router)
    out.backward(grad)
    return out.detach(), x.grad, router.grad


def test_the_module_trains_compiled_and_in_a_graph():
    _, raw = packed_and_raw("gate_up")
    plain = moe_ops.FusedMxfp4Experts(Mxfp4Experts(**raw))
    packed = moe_ops.FusedMxfp4Experts(Mxfp4Experts(**copies_of(raw))).prepare()
    assert packed.weight_layout == LAYOUT
    inputs = batch(20, HIDDEN, EXPERTS, TOP_K, dtype=torch.float32)
    grad = torch.randn(20, HIDDEN, device="cuda")
    expected = train(plain, inputs, grad)
    for actual, wanted in zip(train(packed, inputs, grad), expected, strict=True):
        assert_same(actual, wanted)
    compiled = torch.compile(packed, fullgraph=True)
    for actual, wanted in zip(train(compiled, inputs, grad), expected, strict=True):
        assert_same(actual, wanted)
    held = [tensor.clone() for tensor in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = train(packed, held, grad)
    for step in range(2):
        again = batch(20, HIDDEN, EXPERTS, TOP_K, dtype=torch.float32, seed=step)
        for target, source in zip(held, again, strict=True):
            target.copy_(source)
        graph.replay()
        for actual, wanted in zip(found, train(plain, again, grad), strict=True):
            assert_same(actual, wanted)


def test_warm_up_for_float32_rows_leaves_nothing_to_compile():
    packed, _ = packed_and_raw("gate_up")
    inputs = batch(48, HIDDEN, EXPERTS, TOP_K, dtype=torch.float32)
    warm_up(packed, TOP_K, token_counts=(48,), dtype=torch.float32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe_ops.fused_mxfp4_moe(*inputs, **packed)
    graph.replay()
    assert_same(out, moe_ops.fused_mxfp4_moe(*inputs, **packed))


def test_rows_too_long_for_the_decode_kernel():
    weights, _ = layer(plans.DECODE_WIDTH + 64, 64, 2)
    packed = prepare_sm90(*(tensor.clone() for tensor in weights), w13_layout="gate_up")
    inputs = batch(5, plans.DECODE_WIDTH + 64, 2, 2)
    for options in ({}, {"batch_invariant": True}):
        actual = moe_ops.fused_mxfp4_moe(*inputs, *packed, w13_layout="gate_up", weight_layout=LAYOUT, **options)
        assert relative(actual, reference.fused_mxfp4_moe(*inputs, *weights, w13_layout="gate_up")) < 1e-2


def test_the_longest_rows_of_the_decode_kernel():
    weights, _ = layer(plans.DECODE_WIDTH, 64, 2)
    packed = prepare_sm90(*(tensor.clone() for tensor in weights), w13_layout="gate_up")
    inputs = batch(5, plans.DECODE_WIDTH, 2, 2)
    actual = moe_ops.fused_mxfp4_moe(*inputs, *packed, w13_layout="gate_up", weight_layout=LAYOUT)
    assert relative(actual, reference.fused_mxfp4_moe(*inputs, *weights, w13_layout="gate_up")) < 1e-2
