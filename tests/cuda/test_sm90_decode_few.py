"""The decode kernel for at most 8 tokens and 64 slots, against the reference. A few cases are beyond its limits.

Other tests of small batches draw ids with replacement. Here a token's experts differ, unless a test says otherwise."""

from __future__ import annotations

import pytest
import torch

import moe_ops
from moe_ops import reference
from moe_ops._register import MISSING
from moe_ops.cuda import LAYOUT, prepare_sm90
from tests.cuda.test_sm90_moe import HOPPER, batch, layer, relative

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not HOPPER or ("_sm90_decode", "CUDA") in MISSING, reason="needs a Hopper card and the native CUDA library"
    ),
]
TOLERANCE = 3e-4  # hidden activations are rounded to 11 bits


def routed(num_tokens, hidden, num_experts, top_k, *, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = (torch.randn(num_tokens, hidden, device="cuda", generator=generator) / 4).to(dtype)
    scores, ids = torch.randn(num_tokens, num_experts, device="cuda", generator=generator).topk(top_k, dim=1)
    return x, ids.to(torch.int32), torch.softmax(scores, 1)


def poison():
    """What is allocated next is memory full of NaN."""
    blocks = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    del blocks


def call(inputs, packed, **options):
    poison()
    options = {"w13_layout": "gate_up", "weight_layout": LAYOUT, "out_dtype": torch.float32} | options
    return moe_ops.fused_mxfp4_moe(*inputs, *packed, **options)


def check(weights, inputs, **options):
    options = {"w13_layout": "gate_up"} | options
    expected = reference.fused_mxfp4_moe(*inputs, *weights, out_dtype=torch.float32, **options)
    packed = prepare_sm90(*(tensor.clone() for tensor in weights), w13_layout=options["w13_layout"])
    actual = call(inputs, packed, **options)
    assert relative(actual, expected) < TOLERANCE
    worst = (actual - expected).abs().max() / expected.abs().max().clamp_min(1e-30)
    assert worst < 3 * TOLERANCE
    return actual


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 6, 8])
@pytest.mark.parametrize(
    "hidden, intermediate", [(160, 192), (288, 160), (576, 704), (2880, 2880), (5120, 576), (7168, 2048)]
)
def test_sizes(hidden, intermediate, num_tokens):
    weights, _ = layer(hidden, intermediate, 16)
    check(weights, routed(num_tokens, hidden, 16, 4, seed=num_tokens))


@pytest.mark.parametrize("num_tokens, top_k", [(1, 2), (1, 16), (4, 16), (7, 5), (8, 8), (6, 6), (5, 12), (8, 1)])
@pytest.mark.parametrize("num_experts", [16, 300, 1000])
def test_slots(num_tokens, top_k, num_experts):
    weights, _ = layer(640, 352, num_experts)
    check(weights, routed(num_tokens, 640, num_experts, top_k, seed=top_k))


@pytest.mark.parametrize("num_tokens, top_k", [(1, 20), (2, 32)])
def test_many_slots_of_a_token(num_tokens, top_k):
    weights, _ = layer(160, 192, 40)
    check(weights, routed(num_tokens, 160, 40, top_k))


def test_one_row_for_all_tokens():
    weights, _ = layer(640, 352, 16)
    x, ids, router = routed(6, 640, 16, 6)
    check(weights, (x[:1].expand(6, -1), ids, router))


@pytest.mark.parametrize("num_tokens", [2, 40, 300])
def test_memory_that_begins_anywhere(num_tokens):
    weights, _ = layer(640, 352, 16)
    packed = prepare_sm90(*(tensor.clone() for tensor in weights), w13_layout="gate_up")
    inputs = routed(num_tokens, 640, 16, 6)
    options = {"w13_layout": "gate_up", "weight_layout": LAYOUT}
    expected = moe_ops.fused_mxfp4_moe(*inputs, *packed, **options)
    memory = torch.full((num_tokens * 640 + 2,), float("nan"), dtype=torch.bfloat16, device="cuda")
    out = memory[1:-1].view(num_tokens, 640)
    moe_ops.fused_mxfp4_moe_out(*inputs, *packed, **options, out=out)
    assert torch.equal(out, expected)
    assert memory[[0, -1]].isnan().all()
    moved = torch.empty(packed[2].numel() + 8, dtype=torch.uint8, device="cuda")[8:].view_as(packed[2])
    moved.copy_(packed[2])
    with pytest.raises(ValueError, match="w2 must be at a multiple of 16 bytes, got an address 8 bytes past one"):
        moe_ops.fused_mxfp4_moe(*inputs, *packed[:2], moved, packed[3], **options)


@pytest.mark.parametrize("num_tokens", [2, 5, 8])
def test_experts_of_many_tokens(num_tokens):
    weights, _ = layer(640, 352, 16)
    x, ids, router = routed(num_tokens, 640, 16, 6)
    ids[:] = ids[0].clone()  # every expert has all tokens
    check(weights, (x, ids, router))
    ids[: num_tokens // 2] = (ids[: num_tokens // 2] + 1) % 16
    check(weights, (x, ids, router))


@pytest.mark.parametrize("num_tokens, top_k", [(1, 8), (2, 4), (8, 8), (7, 3)])
def test_an_expert_twice_in_a_token(num_tokens, top_k):
    weights, _ = layer(640, 352, 16)
    x, ids, router = routed(num_tokens, 640, 16, top_k)
    ids[:, 1] = ids[:, 0]
    check(weights, (x, ids, router))
    ids.fill_(3)
    check(weights, (x, ids, router))


@pytest.mark.parametrize("layout", ["gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize("activation, limit", [("silu", None), ("swiglu_oai", 0.5)])
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_biases_activations_and_types(layout, activation, limit, num_tokens):
    weights, biases = layer(288, 160, 8, bias=True)
    x, ids, router = routed(num_tokens, 288, 8, 3, dtype=torch.float16)
    inputs = (x, ids.long(), router.to(torch.bfloat16))
    check(weights, inputs, w13_layout=layout, activation=activation, swiglu_limit=limit, **biases)


@pytest.mark.parametrize("num_tokens, top_k", [(1, 4), (6, 6), (8, 8)])
def test_slots_without_an_expert(num_tokens, top_k):
    weights, _ = layer(640, 352, 16)
    x, ids, router = routed(num_tokens, 640, 16, top_k)
    ids[:, ::3] = -1
    ids[:, 1] = 16
    router[:, 2] = 0
    check(weights, (x, ids, router))
    packed = prepare_sm90(*(tensor.clone() for tensor in weights), w13_layout="gate_up")
    assert (call((x, torch.full_like(ids, -1), router), packed) == 0).all()
    one = torch.full_like(ids, -1)
    one[-1, -1] = 7
    check(weights, (x, one, router))
    expert_map = torch.full((64,), -1, dtype=torch.int32, device="cuda")
    expert_map[40:56] = torch.arange(16, dtype=torch.int32, device="cuda").flip(0)
    mapped = torch.where(ids == 16, 70, ids + 40)
    check(weights, (x, mapped, router), expert_map=expert_map)


def test_a_bad_row_stays_its_own():
    weights, _ = layer(640, 352, 16)
    packed = prepare_sm90(*(tensor.clone() for tensor in weights), w13_layout="gate_up")
    x, ids, router = routed(6, 640, 16, 6)
    ids[:] = ids[0].clone()
    good = call((x, ids, router), packed)
    for bad in (float("nan"), float("inf")):
        spoilt = x.clone()
        spoilt[2, 17] = bad
        out = call((spoilt, ids, router), packed)
        assert out[2].isnan().any()
        rows = [0, 1, 3, 4, 5]
        assert torch.equal(out[rows], good[rows])


@pytest.mark.parametrize("num_tokens", [1, 6])
def test_same_bits_among_other_batches_and_in_a_graph(num_tokens):
    weights, _ = layer(2880, 2880, 16)
    packed = prepare_sm90(*weights, w13_layout="gate_up")
    options = {"w13_layout": "gate_up", "weight_layout": LAYOUT}
    sets = [routed(num_tokens, 2880, 16, 4, seed=seed) for seed in range(12)]
    first = [moe_ops.fused_mxfp4_moe(*inputs, *packed, **options) for inputs in sets]
    moe_ops.fused_mxfp4_moe(*batch(40, 2880, 16, 4), *packed, **options)  # the same counters, another kernel
    x, ids, router = (tensor.clone() for tensor in sets[0])
    # A kernel that makes the input and one that reads the output on each side of ours: their order must hold.
    graph = torch.cuda.CUDAGraph()
    outs = []
    with torch.cuda.graph(graph):
        for i in range(4):
            out = moe_ops.fused_mxfp4_moe(x + i, ids, router, *packed, **options)
            outs.append(out * 2)
    for inputs, expected in zip(sets, first, strict=True):
        assert torch.equal(moe_ops.fused_mxfp4_moe(*inputs, *packed, **options), expected)
        for mine, new in zip((x, ids, router), inputs, strict=True):
            mine.copy_(new)
        graph.replay()
        assert torch.equal(outs[0], expected * 2)
        shifted = moe_ops.fused_mxfp4_moe(x + 3, ids, router, *packed, **options)
        assert torch.equal(outs[3], shifted * 2)


@pytest.mark.parametrize("tokens", [(1, 4), (2, 40)])
@pytest.mark.parametrize("priorities", [(0, 0), (0, -1)])
def test_two_streams_at_once(tokens, priorities):
    weights, _ = layer(2880, 1440, 16)
    packed = prepare_sm90(*weights, w13_layout="gate_up")
    options = {"w13_layout": "gate_up", "weight_layout": LAYOUT}
    sets = [routed(count, 2880, 16, 4, seed=count) for count in tokens]
    expected = [moe_ops.fused_mxfp4_moe(*inputs, *packed, **options) for inputs in sets]
    streams = [torch.cuda.Stream(priority=priority) for priority in priorities]
    torch.cuda.synchronize()
    outs = [[], []]
    for _ in range(200):
        for stream, inputs, mine in zip(streams, sets, outs, strict=True):
            with torch.cuda.stream(stream):
                mine.append(moe_ops.fused_mxfp4_moe(*inputs, *packed, **options))
    torch.cuda.synchronize()
    for mine, right in zip(outs, expected, strict=True):
        assert all(torch.equal(out, right) for out in mine)
