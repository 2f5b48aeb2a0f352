"""fused_mxfp4_moe over weights in layout sm90_v1_e4m3: preparing anywhere, the kernels on a Hopper card."""

from __future__ import annotations

import pytest
import torch

import moe_ops
from moe_ops.cuda import E4M3, LAYOUT, autotune, prepare_sm90, warm_up
from moe_ops.cuda.layout import unpack_scales
from moe_ops.cuda.prepare import e4m3_outside
from moe_ops.experts import Mxfp4Experts
from moe_ops.reference.e4m3 import quantize_e4m3, round_e4m3
from moe_ops.reference.fused_mxfp4_moe import moe_float32
from tests.cuda.test_sm90_moe import batch, layer, pytestmark, relative

hopper = pytestmark
pytestmark = []


def on_hopper(function):
    for mark in hopper:
        function = mark(function)
    return function


def checkpoint(num_experts=2, hidden=96, intermediate=64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape, low=0, high=256):
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)

    return [
        random(num_experts, 2 * intermediate, hidden // 2),
        random(num_experts, 2 * intermediate, hidden // 32, low=119, high=123),
        random(num_experts, hidden, intermediate // 2),
        random(num_experts, hidden, intermediate // 32, low=119, high=123),
    ]


def test_scales_near_the_first_of_their_row_are_taken_and_others_refused():
    weights = checkpoint()
    weights[1][:, :, 0], weights[1][:, :, 1], weights[1][:, :, 2] = 120, 126, 112
    assert e4m3_outside(*weights[:2]) == 0
    packed = prepare_sm90(*(tensor.clone() for tensor in weights), w13_layout="gate_up", weight_layout=E4M3)
    usual = prepare_sm90(*(tensor.clone() for tensor in weights), w13_layout="gate_up", weight_layout=LAYOUT)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(packed, usual, strict=True))
    for code in (127, 111):
        weights[1][1, 5, 2] = code
        assert e4m3_outside(*weights[:2]) == 1
        with pytest.raises(ValueError, match="w13_scale must be of codes at most 8 under and 6 over the first of"):
            prepare_sm90(*(tensor.clone() for tensor in weights), w13_layout="gate_up", weight_layout=E4M3)


def test_blocks_of_zeros_take_the_scale_of_their_row():
    weights = checkpoint()
    weights[2][0, 3, :16] &= 0x88
    weights[3][0, 3] = torch.tensor([0, 121])
    weights[2][1, 4] &= 0x88
    weights[3][1, 4] = 0
    assert e4m3_outside(*weights[2:]) == 0
    packed = prepare_sm90(*weights, w13_layout="gate_up", weight_layout=E4M3)
    scales = unpack_scales(packed[3][0].flatten(1), 64)
    assert scales[3].tolist() == [121, 121]
    assert unpack_scales(packed[3][1].flatten(1), 64)[4].tolist() == [127, 127]


def test_experts_that_do_not_fit_are_packed_for_exact_activations_with_a_warning():
    weights = checkpoint()
    weights[3][0, 3, 0] = 100
    with pytest.warns(UserWarning, match="activations stay exact: e4m3 does not hold 1 blocks"):
        prepared = Mxfp4Experts(*weights, w13_layout="gate_up").prepare(E4M3)
    assert prepared.weight_layout == LAYOUT
    assert Mxfp4Experts(*checkpoint(), w13_layout="gate_up").prepare(E4M3).weight_layout == E4M3


@on_hopper
@pytest.mark.parametrize("width", [32, 288, 2880, 7168])
def test_quantiser_is_the_reference_bit_for_bit(width):
    generator = torch.Generator("cuda").manual_seed(width)
    powers = torch.linspace(-130, 120, 301, device="cuda").round()
    rows = torch.randn(301, width, device="cuda", generator=generator)
    rows = (rows.double() * 2.0 ** powers.double().unsqueeze(1)).to(torch.bfloat16)
    rows[0], rows[1, 5], rows[2, 7] = 0, float("inf"), float("nan")
    rows[3], rows[4] = 448, 450
    quantized = torch.empty(rows.shape, dtype=torch.uint8, device="cuda")
    scale = torch.empty(301, device="cuda")
    torch.ops.moe_ops._sm90_quantize_rows(rows, quantized, scale)
    codes, scales = quantize_e4m3(rows)
    assert torch.equal(scale.nan_to_num(nan=-1.0), scales.nan_to_num(nan=-1.0))
    finite = torch.isfinite(scales)
    # In a group of 32 elements 24 to 31 and 16 to 23 alternate, then 8 to 15 and 0 to 7.
    order = torch.stack([torch.arange(24, 32), torch.arange(16, 24)], 1).reshape(-1)
    order = torch.cat([order, order - 16]).to("cuda")
    expected = codes.view(torch.uint8).view(301, -1, 32)[:, :, order].reshape(301, width)
    assert torch.equal(quantized[finite], expected[finite])


def e4m3(weights, inputs, **options):
    """(ours, with activations rounded as ours, with exact activations) in float32."""
    tensors = [tensor.clone() for tensor in weights]
    packed = prepare_sm90(*tensors, w13_layout=options["w13_layout"], weight_layout=E4M3)
    actual = moe_ops.fused_mxfp4_moe(*inputs, *packed, out_dtype=torch.float32, weight_layout=E4M3, **options)

    def rounded(rows):
        return round_e4m3(rows.to(torch.bfloat16))

    return actual, moe_float32(*inputs, *weights, rounded=rounded, **options), moe_float32(*inputs, *weights, **options)


@on_hopper
@pytest.mark.parametrize("num_tokens", [600, 1000])
@pytest.mark.parametrize(
    "hidden, intermediate", [(32, 32), (96, 64), (288, 160), (576, 704), (640, 352), (2880, 2880), (7168, 2048)]
)
def test_sizes(hidden, intermediate, num_tokens):
    weights, options = layer(hidden, intermediate, 8)
    actual, rounded, exact = e4m3(weights, batch(num_tokens, hidden, 8, 4), w13_layout="gate_up", **options)
    # Sums of other orders put a few hidden activations on the other side of a rounding.
    assert relative(actual, rounded) < 2e-2
    assert 2e-2 < relative(actual, exact) < 6e-2


@on_hopper
@pytest.mark.parametrize("scales", [(112, 119), (118, 125)])
@pytest.mark.parametrize("layout", ["gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
def test_rows_activations_biases_and_scales(layout, activation, scales):
    weights, options = layer(288, 160, 4, bias=True, scales=scales)
    for scale in (weights[1], weights[3]):
        scale[:, :, 0] = scales[0] + 1
    options |= {"w13_layout": layout, "activation": activation, "swiglu_limit": 4.0}
    actual, rounded, _ = e4m3(weights, batch(500, 288, 4, 3), **options)
    assert relative(actual, rounded) < 2e-2


@on_hopper
def test_the_whole_range_of_scales_is_exact():
    """Rows and hidden activations that e4m3 holds: what is left is the tensor cores' sums and results in bfloat16."""
    weights, _ = layer(256, 128, 2)
    generator = torch.Generator("cuda").manual_seed(5)
    for scale in (weights[1], weights[3]):
        scale.copy_(torch.randint(112, 127, scale.shape, device="cuda", generator=generator, dtype=torch.uint8))
        scale[:, :, 0] = 120
    x, ids, router = batch(400, 256, 2, 2)
    x = torch.zeros_like(x)
    x[torch.arange(400), torch.randint(0, 256, (400,), device="cuda", generator=generator)] = 1
    actual, rounded, _ = e4m3(weights, (x, ids, router), w13_layout="gate_up")
    assert relative(actual, rounded) < 4e-3


@on_hopper
def test_few_rows_of_an_expert_and_other_rows_stay_exact():
    weights, _ = layer(640, 352, 8)
    packed = [
        prepare_sm90(*map(torch.clone, weights), w13_layout="gate_up", weight_layout=tag) for tag in (E4M3, LAYOUT)
    ]
    for num_tokens, options in ((7, {}), (100, {}), (600, {"batch_invariant": True})):
        ours, theirs = (
            moe_ops.fused_mxfp4_moe(
                *batch(num_tokens, 640, 8, 4), *tensors, w13_layout="gate_up", weight_layout=tag, **options
            )
            for tensors, tag in zip(packed, (E4M3, LAYOUT), strict=True)
        )
        assert torch.equal(ours, theirs)


@on_hopper
def test_a_bad_row_stays_its_own():
    weights, _ = layer(640, 352, 8)
    packed = prepare_sm90(*weights, w13_layout="gate_up", weight_layout=E4M3)
    x, ids, router = batch(600, 640, 8, 4)
    ids[3], router[3] = torch.arange(4, device="cuda"), 1

    def run(rows):
        return moe_ops.fused_mxfp4_moe(rows, ids, router, *packed, w13_layout="gate_up", weight_layout=E4M3)

    clean = run(x)
    x = x.clone()
    x[3, 7] = float("inf")
    dirty = run(x)
    others = torch.arange(600, device="cuda") != 3
    assert torch.equal(dirty[others], clean[others])
    assert not torch.isfinite(dirty[3]).all()


@on_hopper
def test_same_bits_again_in_replay_and_with_new_inputs():
    weights, _ = layer(640, 352, 8)
    prepared = Mxfp4Experts(*weights, w13_layout="gate_up").prepare(E4M3)
    warm_up(prepared.arguments(), 4, token_counts=(600,))
    first, second = batch(600, 640, 8, 4), batch(600, 640, 8, 4, seed=1)

    def run(inputs):
        return moe_ops.fused_mxfp4_moe(*inputs, **prepared.arguments())

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
    with pytest.raises(ValueError, match="autotune: weight_layout must be 'sm90_v1'"):
        autotune(prepared.arguments(), 4, token_counts=(600,))


@on_hopper
def test_no_expert_left_gives_zero_rows():
    weights, _ = layer(640, 352, 8)
    packed = prepare_sm90(*weights, w13_layout="gate_up", weight_layout=E4M3)
    x, ids, router = batch(600, 640, 8, 4)
    out = torch.full((600, 640), float("nan"), device="cuda", dtype=torch.bfloat16)
    dead = torch.full_like(ids, -1)
    moe_ops.fused_mxfp4_moe_out(x, dead, router, *packed, w13_layout="gate_up", weight_layout=E4M3, out=out)
    assert (out == 0).all()
