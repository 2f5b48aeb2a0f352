from __future__ import annotations

import pytest
import torch

from moe_ops import reference
from moe_ops.reference.mxfp4 import quantize_mxfp4
from tests.support import FLOATS, assert_close, assert_same, make_experts, make_routing, make_rows

# (worst element, RMS) against the float32 reference. bfloat16 and float16 kernels may round the activations between
# the two products once.
TOLERANCE = {
    torch.float32: (3e-5, 3e-6),
    torch.float16: (4e-3, 7e-4),
    torch.bfloat16: (2.5e-2, 5e-3),
}
NAN, INF = float("nan"), float("inf")


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, name: str = "result") -> None:
    max_tol, rms_tol = TOLERANCE[dtype]
    assert_close(actual, expected, max_tol=max_tol, rms_tol=rms_tol, name=name)


def on(device, *args, **options):
    def move(value):
        return value.to(device) if isinstance(value, torch.Tensor) else value

    return [move(value) for value in args], {name: move(value) for name, value in options.items()}


def check(ops, device, x, ids, routing, experts, **options):
    """The op against the float32 sum of the reference; returns the op's result."""
    args, moved = on(device, x, ids, routing, *experts.values(), **options)
    actual = ops.fused_mxfp4_moe(*args, **moved)
    assert actual.dtype == options.get("out_dtype", x.dtype)
    wanted = {name: value for name, value in options.items() if name not in ("out_dtype", "batch_invariant")}
    expected = reference.fused_mxfp4_moe(x, ids, routing, *experts.values(), out_dtype=torch.float32, **wanted)
    close(actual, expected, x.dtype)
    return actual


def one_expert(hidden: int = 32) -> dict[str, torch.Tensor]:
    """gate = up = down = identity."""
    codes, scales = quantize_mxfp4(torch.eye(hidden))
    return {
        "w13": torch.cat([codes, codes])[None],
        "w13_scale": torch.cat([scales, scales])[None],
        "w2": codes[None],
        "w2_scale": scales[None],
    }


def test_by_hand(ops, device):
    x = torch.linspace(-4, 4, 32)[None]
    args, _ = on(device, x, torch.tensor([[0]]), torch.tensor([[0.5]]), *one_expert().values())
    actual = ops.fused_mxfp4_moe(*args, w13_layout="gate_up")
    close(actual, 0.5 * x * torch.sigmoid(x) * x, torch.float32)


@pytest.mark.parametrize("layout", ["gate_up", "up_gate", "interleaved"])
def test_row_order_by_hand(ops, device, layout):
    """gate = x, up = 2 x, so that a swapped order shows."""
    gate, up = torch.eye(32), 2 * torch.eye(32)
    stacked = {
        "gate_up": torch.cat([gate, up]),
        "up_gate": torch.cat([up, gate]),
        "interleaved": torch.stack([gate, up], dim=1).flatten(0, 1),
    }[layout]
    w13, w13_scale = quantize_mxfp4(stacked)
    experts = {**one_expert(), "w13": w13[None], "w13_scale": w13_scale[None]}
    x = torch.linspace(-3, 3, 32)[None]
    args, _ = on(device, x, torch.tensor([[0]]), torch.tensor([[1.0]]), *experts.values())
    close(ops.fused_mxfp4_moe(*args, w13_layout=layout), x * torch.sigmoid(x) * 2 * x, torch.float32)


@pytest.mark.parametrize(
    ("options", "gate", "up", "expected"),
    [
        ({"activation": "silu"}, 12.0, 3.0, 36.000),
        ({"activation": "silu", "swiglu_limit": 10.0}, 12.0, 3.0, 29.999),
        ({"activation": "silu", "swiglu_limit": 7.0}, 3.0, -12.0, -20.004),
        ({"activation": "silu", "swiglu_limit": 7.0}, -12.0, 3.0, -2.2120e-4),
        ({"activation": "swiglu_oai"}, 12.0, 3.0, 28.000),
        ({"activation": "swiglu_oai"}, -12.0, 3.0, -6.47457e-08),
        ({"activation": "swiglu_oai"}, 3.0, -12.0, -17.892),
        ({"activation": "swiglu_oai", "swiglu_alpha": 1.0, "swiglu_limit": 100.0}, 1.0, 1.0, 1.46212),
    ],
)
def test_activation_by_hand(ops, device, options, gate, up, expected):
    bias = torch.cat([torch.full((1, 32), gate), torch.full((1, 32), up)], dim=1)
    x = torch.zeros(1, 32)
    args, moved = on(
        device, x, torch.tensor([[0]]), torch.tensor([[1.0]]), *one_expert().values(), w13_bias=bias, **options
    )
    actual = ops.fused_mxfp4_moe(*args, w13_layout="gate_up", **moved)
    assert actual.cpu().tolist()[0] == pytest.approx([expected] * 32, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_a_very_negative_gate_is_closed(ops, device, dtype, activation, tokens):
    """The factor is 0 and not merely tiny: `up` may be as large as it likes."""
    experts = one_expert()
    experts["w13"][0, :32] |= (experts["w13"][0, :32] != 0) * 0x88  # gate = -x
    x, ids = torch.full((tokens, 32), 1e36, dtype=dtype), torch.zeros(tokens, 1, dtype=torch.int64)
    args, _ = on(device, x, ids, torch.ones(tokens, 1), *experts.values())
    limit = {"swiglu_limit": 1e37} if activation == "swiglu_oai" else {}
    assert ops.fused_mxfp4_moe(*args, w13_layout="gate_up", activation=activation, **limit).eq(0).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", ["gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
@pytest.mark.parametrize("tokens", [1, 21])
def test_matches_reference(ops, device, dtype, layout, activation, tokens):
    x, experts = make_rows(tokens, 96, dtype), make_experts(6, 64, 96)
    ids, routing = make_routing(tokens, 3, 6, invalid=0.2)
    biases = {"w13_bias": torch.randn(6, 128), "w2_bias": torch.randn(6, 96)}
    check(ops, device, x, ids, routing, experts, w13_layout=layout, activation=activation, swiglu_limit=1.5, **biases)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bias_dtype", FLOATS)
def test_bias_dtypes(ops, device, dtype, bias_dtype):
    x, experts, (ids, routing) = make_rows(5, 64, dtype), make_experts(4, 32, 64), make_routing(5, 2, 4)
    b13, b2 = torch.randn(4, 64).to(bias_dtype), torch.randn(4, 64).to(bias_dtype)
    check(ops, device, x, ids, routing, experts, w13_layout="gate_up", w13_bias=b13, w2_bias=b2)


@pytest.mark.parametrize(
    ("hidden", "inter"), [(32, 32), (576, 192), (96, 576), (128, 704), (2880, 64), (64, 2880), (160, 96)]
)
def test_odd_geometries(ops, device, backend, hidden, inter):
    if backend == "triton-interpret" and hidden * inter > 2**16:
        pytest.skip("minutes in the interpreter")
    x, experts, (ids, routing) = (
        make_rows(9, hidden, torch.bfloat16),
        make_experts(3, inter, hidden),
        make_routing(9, 2, 3),
    )
    check(ops, device, x, ids, routing, experts, w13_layout="gate_up")


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8, 16, 17, 31, 32, 33, 64, 100])
@pytest.mark.parametrize("one_expert_takes_all", [True, False])
def test_every_count_of_rows(ops, device, tokens, one_expert_takes_all):
    x, experts = make_rows(tokens, 64, torch.bfloat16), make_experts(4, 32, 64)
    ids, routing = make_routing(tokens, 1 if one_expert_takes_all else 2, 4)
    if one_expert_takes_all:
        ids = torch.full_like(ids, 2)
    check(ops, device, x, ids, routing, experts, w13_layout="gate_up")


@pytest.mark.parametrize("top_k", [1, 2, 3, 6, 7, 16])
def test_top_k(ops, device, top_k):
    x, experts, (ids, routing) = make_rows(5, 64, torch.float32), make_experts(16, 32, 64), make_routing(5, top_k, 16)
    check(ops, device, x, ids, routing, experts, w13_layout="gate_up")


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("weight_dtype", FLOATS)
def test_id_and_weight_dtypes(ops, device, id_dtype, weight_dtype):
    x, experts, (ids, routing) = make_rows(7, 64, torch.float32), make_experts(5, 32, 64), make_routing(7, 2, 5)
    check(ops, device, x, ids.to(id_dtype), routing.to(weight_dtype), experts, w13_layout="gate_up")


@pytest.mark.parametrize("byte", [0, 1, 64, 120, 127, 128, 129, 134, 200, 253, 254])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scale_bytes(ops, device, byte, dtype):
    """One block of w13 has the given scale, and the activations there undo it."""
    experts = make_experts(2, 32, 96)
    experts["w13"] &= 0x33  # codes up to 1.5: 1.5 * 2^127 is still a float32
    experts["w13_scale"][:, :, 1] = byte
    x = make_rows(6, 96, torch.float32)
    x[:, 32:64] *= 2.0 ** max(-120, min(120, 127 - byte - 3))
    ids, routing = make_routing(6, 2, 2)
    check(ops, device, x.to(dtype), ids, routing, experts, w13_layout="gate_up")


@pytest.mark.parametrize("byte", [0, 1, 128, 140, 254])
def test_scale_bytes_of_w2(ops, device, byte):
    experts = make_experts(2, 64, 32)
    experts["w2"] &= 0x33
    experts["w2_scale"][:, :, 0] = byte
    x, (ids, routing) = make_rows(4, 32, torch.float32), make_routing(4, 1, 2)
    if byte > 200:
        x *= 2.0**-8  # else single products leave float32, and the sign of the infinity depends on the order of the sum
    scale = 2.0 ** max(-100, min(100, 127 - byte))
    check(ops, device, x, ids, routing * scale, experts, w13_layout="gate_up")


@pytest.mark.parametrize("byte", [230, 231, 232, 233])
@pytest.mark.parametrize("tokens", [1, 40])
def test_largest_sums_of_a_block(ops, device, byte, tokens):
    """32 codes of 6 times the largest 16-bit activations: the integer sum of a block is nearly 2^24."""
    experts = {
        "w13": torch.full((1, 64, 64), 0x22, dtype=torch.uint8),  # 1
        "w13_scale": torch.full((1, 64, 4), 97, dtype=torch.uint8),
        "w2": torch.full((1, 128, 16), 0x77, dtype=torch.uint8),  # 6
        "w2_scale": torch.full((1, 128, 1), byte, dtype=torch.uint8),
    }
    x, ids = torch.full((tokens, 128), 1.9921875).bfloat16(), torch.zeros(tokens, 1, dtype=torch.int64)
    check(ops, device, x, ids, torch.ones(tokens, 1), experts, w13_layout="gate_up")


def test_scale_byte_255_is_nan_in_its_outputs_only(ops, device):
    experts = make_experts(3, 32, 64)
    experts["w2_scale"][1, 5, 0] = 255
    x, ids = make_rows(3, 64, torch.bfloat16), torch.tensor([[0], [1], [2]])
    actual = check(ops, device, x, ids, torch.ones(3, 1), experts, w13_layout="gate_up")
    expected = torch.zeros(3, 64, dtype=torch.bool)
    expected[1, 5] = True
    assert torch.equal(torch.isnan(actual).cpu(), expected)


def test_ids_outside_the_experts(ops, device):
    x, experts = make_rows(6, 64, torch.bfloat16), make_experts(4, 32, 64)
    ids = torch.tensor([[-1, -1], [4, 2**40], [0, -5], [3, 9], [-(2**62), 1], [-1, 2]])
    routing = torch.tensor([[NAN, INF], [1.0, 1.0], [0.5, NAN], [0.5, INF], [NAN, 0.25], [NAN, 2.0]])
    before = ids.clone()
    actual = check(ops, device, x, ids, routing, experts, w13_layout="gate_up")
    assert actual[:2].eq(0).all()
    assert torch.equal(ids, before)


def test_all_minus_one(ops, device):
    x, experts = torch.full((3, 64), NAN), make_experts(2, 32, 64)
    args, _ = on(device, x, torch.full((3, 2), -1), torch.full((3, 2), NAN), *experts.values())
    assert ops.fused_mxfp4_moe(*args, w13_layout="gate_up").eq(0).all()


def test_zero_weight_is_selected_away(ops, device):
    experts = make_experts(2, 32, 64)
    experts["w2_scale"][1] = 255  # expert 1 gives NaN
    x = make_rows(3, 64, torch.float32)
    ids, routing = torch.tensor([[0, 1]] * 3), torch.tensor([[0.5, 0.0]] * 3)
    args, _ = on(device, x, ids, routing, *experts.values())
    actual = ops.fused_mxfp4_moe(*args, w13_layout="gate_up")
    expected = reference.fused_mxfp4_moe(x, ids[:, :1], routing[:, :1], *experts.values(), w13_layout="gate_up")
    close(actual, expected, torch.float32)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("tokens", [3, 40])
def test_non_finite_rows_stay_in_their_rows(ops, device, dtype, tokens):
    x, experts, (ids, routing) = make_rows(tokens, 64, dtype), make_experts(3, 32, 64), make_routing(tokens, 2, 3)
    args, _ = on(device, x, ids, routing, *experts.values())
    clean = ops.fused_mxfp4_moe(*args, w13_layout="gate_up").cpu()
    dirty = x.clone()
    dirty[1, 7], dirty[2, 40] = NAN, INF
    actual = ops.fused_mxfp4_moe(dirty.to(device), *args[1:], w13_layout="gate_up").cpu()
    assert torch.isnan(actual[1]).all()
    assert not torch.isfinite(actual[2]).any()
    others = [t for t in range(tokens) if t not in (1, 2)]
    assert_same(actual[others], clean[others])


def test_large_activations_are_not_lost(ops, device):
    x, experts, (ids, routing) = make_rows(4, 64, torch.float32), make_experts(2, 32, 64), make_routing(4, 1, 2)
    x[1] *= 2.0**60
    x[2] *= 2.0**-60
    x[3, 0] = 3e4  # one outlier beside elements of order one
    check(ops, device, x[:, :], ids, routing, experts, w13_layout="gate_up", activation="silu", swiglu_limit=3.0)


def test_same_expert_twice_counts_twice(ops, device):
    x, experts = make_rows(3, 64, torch.float32), make_experts(2, 32, 64)
    ids, routing = torch.ones(3, 2, dtype=torch.int64), torch.tensor([[0.25, 0.5]] * 3)
    twice = check(ops, device, x, ids, routing, experts, w13_layout="gate_up")
    args, _ = on(device, x, ids[:, :1], routing.sum(1, keepdim=True), *experts.values())
    close(twice, ops.fused_mxfp4_moe(*args, w13_layout="gate_up").cpu(), torch.float32)


def test_expert_map(ops, device):
    x, experts, (ids, routing) = make_rows(11, 64, torch.bfloat16), make_experts(3, 32, 64), make_routing(11, 4, 8)
    table = torch.tensor([-1, 2, -1, 0, 1, -1, 7, -2], dtype=torch.int32)  # 7 is no local expert either
    ids[0, 0] = 99
    check(ops, device, x, ids, routing, experts, w13_layout="gate_up", expert_map=table)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("out_dtype", FLOATS)
def test_out_dtype(ops, device, dtype, out_dtype):
    x, experts, (ids, routing) = make_rows(5, 64, dtype), make_experts(4, 32, 64), make_routing(5, 2, 4)
    args, _ = on(device, x, ids, routing, *experts.values())
    actual = ops.fused_mxfp4_moe(*args, w13_layout="gate_up", out_dtype=out_dtype)
    assert actual.dtype == out_dtype
    exact = ops.fused_mxfp4_moe(*args, w13_layout="gate_up", out_dtype=torch.float32)
    assert_same(actual, exact.to(out_dtype).cpu())  # the float32 sum, rounded once


def test_no_tokens(ops, device):
    args, _ = on(
        device, torch.empty(0, 64), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2),
        *make_experts(2, 32, 64).values(),
    )  # fmt: skip
    assert ops.fused_mxfp4_moe(*args, w13_layout="gate_up").shape == (0, 64)


def test_strided_activations(ops, device):
    wide, experts, (ids, routing) = make_rows(6, 128, torch.bfloat16), make_experts(3, 32, 64), make_routing(6, 2, 3)
    args, _ = on(device, ids.t().contiguous().t(), routing.t().contiguous().t(), *experts.values())
    for x in (wide[:, :64], wide[:, ::2], wide[:, 64:].t().contiguous().t()):
        expected = reference.fused_mxfp4_moe(
            x, ids, routing, *experts.values(), w13_layout="gate_up", out_dtype=torch.float32
        )
        close(ops.fused_mxfp4_moe(x.to(device), *args, w13_layout="gate_up"), expected, torch.bfloat16)


@pytest.mark.parametrize("tokens", [1, 40])
def test_same_bits_every_time(ops, device, tokens):
    x, experts, (ids, routing) = (
        make_rows(tokens, 96, torch.bfloat16),
        make_experts(5, 64, 96),
        make_routing(tokens, 3, 5),
    )
    args, _ = on(device, x, ids, routing, *experts.values())
    first = ops.fused_mxfp4_moe(*args, w13_layout="gate_up").cpu()
    for _ in range(3):
        assert_same(ops.fused_mxfp4_moe(*args, w13_layout="gate_up"), first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_batch_invariant(ops, device, backend, dtype):
    if backend == "reference":
        pytest.skip("the reference does not promise it")
    tokens = 45
    x, experts, (ids, routing) = make_rows(tokens, 96, dtype), make_experts(3, 64, 96), make_routing(tokens, 2, 3)
    args, _ = on(device, x, ids, routing)
    weights, _ = on(device, *experts.values())
    options = {"w13_layout": "gate_up", "batch_invariant": True}
    whole = ops.fused_mxfp4_moe(*args, *weights, **options)
    close(whole, reference.fused_mxfp4_moe(x, ids, routing, *experts.values(), w13_layout="gate_up"), dtype)
    for rows in (slice(0, 1), slice(7, 9), slice(20, 41)):
        part = ops.fused_mxfp4_moe(*(arg[rows] for arg in args), *weights, **options)
        assert_same(part, whole[rows].cpu())


def test_padding_rows_do_not_change_the_others(ops, device):
    """The kernel is chosen by the rows that have experts."""
    x, experts, (ids, routing) = make_rows(48, 64, torch.bfloat16), make_experts(2, 32, 64), make_routing(48, 1, 2)
    ids[3:] = -1
    args, _ = on(device, x, ids, routing)
    weights, _ = on(device, *experts.values())
    padded = ops.fused_mxfp4_moe(*args, *weights, w13_layout="gate_up")
    alone = ops.fused_mxfp4_moe(*(arg[:3] for arg in args), *weights, w13_layout="gate_up")
    assert_same(padded[:3], alone.cpu())


@pytest.mark.parametrize("out_dtype", FLOATS)
def test_out_variant(ops, device, out_dtype):
    x, experts, (ids, routing) = make_rows(5, 64, torch.bfloat16), make_experts(4, 32, 64), make_routing(5, 2, 4)
    args, _ = on(device, x, ids, routing, *experts.values())
    out = torch.full((5, 64), NAN, dtype=out_dtype, device=device)
    assert ops.fused_mxfp4_moe_out(*args, w13_layout="gate_up", out=out) is None
    assert_same(out, ops.fused_mxfp4_moe(*args, w13_layout="gate_up", out_dtype=out_dtype).cpu())


def test_out_variant_shares_no_memory(ops, device, backend):
    if backend == "reference":
        pytest.skip("the reference does not check arguments")
    x, experts, (ids, routing) = make_rows(5, 64, torch.bfloat16), make_experts(4, 32, 64), make_routing(5, 2, 4)
    args, _ = on(device, x, ids, routing, *experts.values())
    out = torch.zeros(5, 64, device=device)
    shared = out.view(torch.uint8).reshape(-1)[:256].view(4, 64, 1)
    with pytest.raises(ValueError, match="out must be memory of its own, apart from w2_scale, got an overlapping"):
        ops.fused_mxfp4_moe_out(*args[:6], shared, w13_layout="gate_up", out=out)
    with pytest.raises(ValueError, match="out must be memory of its own, apart from w2_bias, got an overlapping"):
        ops.fused_mxfp4_moe_out(*args, w13_layout="gate_up", w2_bias=out[:4], out=out)
    assert out.eq(0).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", ["gate_up", "interleaved"])
@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
def test_backward_matches_reference(ops, device, dtype, layout, activation):
    x, experts, (ids, routing) = make_rows(13, 64, dtype), make_experts(5, 96, 64), make_routing(13, 3, 5, invalid=0.2)
    routing[0, 0] = 0.0  # has a gradient of its own
    grad = make_rows(13, 64, dtype, seed=9)
    options = {
        "w13_layout": layout,
        "activation": activation,
        "swiglu_limit": 2.0,
        "w13_bias": torch.randn(5, 192),
        "w2_bias": torch.randn(5, 64),
    }
    args, moved = on(device, grad, x, ids, routing, *experts.values(), **options)
    actual = ops.fused_mxfp4_moe_backward(*args, **moved)
    expected = reference.fused_mxfp4_moe_backward(grad, x, ids, routing, *experts.values(), **options)
    close(actual[0], expected[0], dtype, "grad_hidden_states")
    close(actual[1], expected[1], dtype, "grad_topk_weights")
    assert actual[1][ids < 0].eq(0).all()


def test_backward_selects_experts_of_no_weight_away(ops, device):
    """Expert 1 overflows, and so does what its gradient would be multiplied by."""
    x, experts, (ids, routing) = make_rows(6, 64, torch.float32), make_experts(3, 32, 64), make_routing(6, 2, 3)
    experts["w13_scale"][1] = 254
    routing[ids == 1] = 0.0
    options = {"w13_layout": "gate_up"}
    args, _ = on(device, torch.ones(6, 64), x, ids, routing, *experts.values(), **options)
    actual = ops.fused_mxfp4_moe_backward(*args, **options)[0]
    without = torch.where(ids == 1, -1, ids)
    expected = reference.fused_mxfp4_moe_backward(torch.ones(6, 64), x, without, routing, *experts.values(), **options)
    assert (ids == 1).any()
    close(actual, expected[0], torch.float32, "grad_hidden_states")


GOOD = {"hidden": 64, "inter": 32, "experts": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, o: a.update(x=a["x"].double()),
         "hidden_states must be [num_tokens, hidden_size] bfloat16, float16 or float32, got [3, 64] float64"),
        (lambda a, o: a.update(x=a["x"][:, :48].contiguous()), "hidden_size must be a multiple of 32, got 48"),
        (lambda a, o: a.update(ids=a["ids"][:2]), "topk_ids must be [3, top_k] int32 or int64, got [2, 2] int64"),
        (lambda a, o: a.update(routing=a["routing"][:, :1]), "topk_weights must be [3, 2] float, got [3, 1] float32"),
        (lambda a, o: a.update(ids=a["routing"], routing=a["ids"]),
         "topk_ids must be [3, top_k] int32 or int64, got [3, 2] float32: topk_ids and topk_weights are swapped"),
        (lambda a, o: a.update(w13=a["w13"].to(torch.int8)),
         "w13 must be [num_experts, 2 * intermediate_size, hidden_size / 2] uint8 for weight_layout 'checkpoint', "
         "got [2, 64, 32] int8"),
        (lambda a, o: a.update(w13_scale=a["w13_scale"][:, :, :1].contiguous()),
         "w13_scale must be a contiguous [2, 64, 2] uint8, got [2, 64, 1] uint8"),
        (lambda a, o: a.update(w2=a["w2"].transpose(1, 2)),
         "w2 must be a contiguous [2, 64, 16] uint8, got a tensor that is not contiguous"),
        (lambda a, o: a.update(w2_scale=a["w2_scale"].view(torch.float8_e8m0fnu)),
         "w2_scale must be a contiguous [2, 64, 1] uint8, got [2, 64, 1] float8_e8m0fnu"),
        (lambda a, o: o.update(w13_layout="gateup"),
         "w13_layout must be 'gate_up', 'up_gate' or 'interleaved', got 'gateup'"),
        (lambda a, o: o.update(activation="gelu"), "activation must be 'silu' or 'swiglu_oai', got 'gelu'"),
        (lambda a, o: o.update(swiglu_limit=0.0), "swiglu_limit must be None or a finite number above 0, got 0.0"),
        (lambda a, o: o.update(swiglu_limit=-1.0), "swiglu_limit must be None or a finite number above 0, got -1.0"),
        (lambda a, o: o.update(swiglu_limit=INF), "swiglu_limit must be None or a finite number above 0, got inf"),
        (lambda a, o: o.update(swiglu_limit=NAN), "swiglu_limit must be None or a finite number above 0, got nan"),
        (lambda a, o: o.update(swiglu_alpha=1.5), "swiglu_alpha must be None for activation 'silu', got 1.5"),
        (lambda a, o: o.update(w13_bias=torch.zeros(2, 32)),
         "w13_bias must be [2, 64] bfloat16, float16 or float32, got [2, 32] float32"),
        (lambda a, o: o.update(w2_bias=torch.zeros(2, 64, dtype=torch.int32)),
         "w2_bias must be [2, 64] bfloat16, float16 or float32, got [2, 64] int32"),
        (lambda a, o: o.update(expert_map=torch.zeros(2, dtype=torch.int64)),
         "expert_map must be [num_experts] int32, got [2] int64"),
        (lambda a, o: o.update(out_dtype=torch.float64),
         "out_dtype must be None, bfloat16, float16 or float32, got float64"),
        (lambda a, o: o.update(after=torch.zeros(1)), "after must be [1] int64, got [1] float32"),
    ],
)  # fmt: skip
def test_errors(ops, device, backend, change, message):
    if backend == "reference":
        pytest.skip("the reference does not check arguments")
    if backend == "npu" and ("float64" in message or "e8m0" in message):
        pytest.skip("the device has no such dtype")
    ids, routing = make_routing(3, 2, 2)
    args = {"x": make_rows(3, 64, torch.float32), "ids": ids, "routing": routing, **make_experts(2, 32, 64)}
    options = {"w13_layout": "gate_up"}
    change(args, options)
    moved, moved_options = on(device, *args.values(), **options)
    if "not contiguous" in message and device.type != "cpu":
        moved[5] = args["w2"].transpose(1, 2).contiguous().to(device).transpose(1, 2)
    with pytest.raises(ValueError) as raised:
        ops.fused_mxfp4_moe(*moved, **moved_options)
    assert str(raised.value) == "fused_mxfp4_moe: " + message


def test_intermediate_size_must_be_a_multiple_of_32(ops, device, backend):
    if backend == "reference":
        pytest.skip("the reference does not check arguments")
    ids, routing = make_routing(3, 2, 2)
    args, _ = on(device, make_rows(3, 64, torch.float32), ids, routing, *make_experts(2, 48, 64).values())
    with pytest.raises(ValueError, match=r"^fused_mxfp4_moe: intermediate_size must be a multiple of 32, got 48$"):
        ops.fused_mxfp4_moe(*args, w13_layout="gate_up")


def test_unknown_weight_layout(ops, device, backend):
    if backend == "reference":
        pytest.skip("the reference does not check arguments")
    ids, routing = make_routing(3, 2, 2)
    args, _ = on(device, make_rows(3, 64, torch.float32), ids, routing, *make_experts(2, 32, 64).values())
    with pytest.raises(ValueError, match=r"^fused_mxfp4_moe: weight_layout must be .*, got 'tiles'$"):
        ops.fused_mxfp4_moe(*args, w13_layout="gate_up", weight_layout="tiles")
