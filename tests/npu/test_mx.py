"""MXFP4 weights in Ascend950's own byte order: the same values, in place, and never where they do not belong."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import moe_ops
from moe_ops import reference
from tests.npu.device import slow_device
from tests.support import assert_close, assert_same, make_experts, make_routing, make_rows

torch_npu = pytest.importorskip("torch_npu")
from moe_ops.npu import mx  # noqa: E402
from moe_ops.npu._device import family  # noqa: E402

if family(torch.device("npu", 0)) != "A5":
    pytest.skip("this device has no product for MXFP4 weights", allow_module_level=True)

OPS = torch.ops.moe_ops
E, K, H, I = 6, 3, 64, 128  # noqa: E741  (the names of the documentation)
BFLOAT16 = {"max_tol": 5e-2, "rms_tol": 1e-2}  # gate and up rounded between the products, as docs/npu.md says
EXPERTS = make_experts(E, I, H)
BIASES = {"w13_bias": torch.randn(E, 2 * I), "w2_bias": torch.randn(E, H)}


def on_npu(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.npu() for tensor in tensors]


def routed(tokens: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    return make_rows(tokens, H, dtype, seed=seed), *make_routing(tokens, K, E, seed=seed, invalid=0.3)


def prepared(layout: str = "gate_up", experts: dict[str, torch.Tensor] = EXPERTS):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="moe_ops")
        weights, tag = mx.prepare_mx(*on_npu(*experts.values()), w13_layout=layout)
    assert tag == mx.LAYOUT
    return weights


def native(host, weights, layout: str = "gate_up", **options):
    moved = {name: value.npu() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    return OPS.fused_mxfp4_moe(*on_npu(*host), *weights, w13_layout=layout, weight_layout=mx.LAYOUT, **moved)


def expected(host, layout: str = "gate_up", experts: dict[str, torch.Tensor] = EXPERTS, **options):
    options["out_dtype"] = torch.float32
    return reference.fused_mxfp4_moe(*host, *experts.values(), w13_layout=layout, **options)


@pytest.mark.parametrize("layout", ["gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize("tokens", [0, 1, 9, 33])
@pytest.mark.parametrize(
    "options",
    [{}, {"swiglu_limit": 2.0, **BIASES}, {"activation": "swiglu_oai", **BIASES}],
    ids=["silu", "limit", "oai"],
)
def test_values(layout, tokens, options):
    host = routed(tokens)
    actual = native(host, prepared(layout), layout, **options)
    assert actual.dtype == torch.bfloat16
    assert_close(actual, expected(host, layout, **options), **BFLOAT16)


def test_products_are_as_good_as_those_of_bfloat16_weights():
    """The weights are exact: what differs from prepared bfloat16 weights is nothing."""
    from moe_ops.npu.prepare import LAYOUT, WeightBudget, prepare

    host = routed(33)
    wide, tag = prepare(*on_npu(*EXPERTS.values()), w13_layout="gate_up", budget=WeightBudget(1 << 20))
    assert tag == LAYOUT
    same = OPS.fused_mxfp4_moe(*on_npu(*host), *wide, w13_layout="gate_up", weight_layout=tag)
    assert_same(native(host, prepared()), same.cpu())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("layout", ["up_gate", "interleaved"])
def test_other_rows_unpack_the_weights(dtype, layout):
    host = routed(9, dtype=dtype)
    raw = OPS.fused_mxfp4_moe(*on_npu(*host), *on_npu(*EXPERTS.values()), w13_layout=layout)
    assert_same(native(host, prepared(layout), layout), raw.cpu())


@pytest.mark.parametrize("layout", ["gate_up", "interleaved"])
def test_gradients(layout):
    x, ids, weights = routed(9)
    arguments = on_npu(x, x, ids, weights)
    raw = OPS.fused_mxfp4_moe_backward(*arguments, *on_npu(*EXPERTS.values()), w13_layout=layout)
    packed = OPS.fused_mxfp4_moe_backward(*arguments, *prepared(layout), w13_layout=layout, weight_layout=mx.LAYOUT)
    for got, want in zip(packed, raw, strict=True):
        assert_same(got, want.cpu())


def test_expert_map_float32_result_and_given_output():
    x, ids, weights = routed(9)
    expert_map = torch.tensor([3, -1, 0, 5, -1, 1, 2, 4], dtype=torch.int32)
    options = {"expert_map": expert_map, "out_dtype": torch.float32}
    actual = native((x, ids, weights), prepared(), **options)
    wanted = expected((x, ids, weights), expert_map=expert_map)
    assert actual.dtype == torch.float32
    assert_close(actual, wanted, **BFLOAT16)
    out = torch.empty(9, H, device="npu")
    OPS.fused_mxfp4_moe_out(
        *on_npu(x, ids, weights), *prepared(), w13_layout="gate_up", weight_layout=mx.LAYOUT, out=out,
        expert_map=expert_map.npu(),
    )  # fmt: skip
    assert_same(out, actual.cpu())


@pytest.mark.parametrize("ids", [-1, 2])
def test_no_expert_and_one_expert_for_all(ids):
    x, _, weights = routed(7)
    host = x, torch.full((7, K), ids), weights
    assert_close(native(host, prepared()), expected(host), **BFLOAT16)


def test_one_expert():
    """One group: CANN takes no list of counts of length 1."""
    experts = make_experts(1, I, H)
    host = make_rows(5, H, torch.bfloat16), torch.tensor([[0], [-1], [0], [1], [0]]), torch.rand(5, 1)
    assert_close(native(host, prepared(experts=experts)), expected(host, experts=experts), **BFLOAT16)


@pytest.mark.parametrize(("code", "exponent"), [(mx.LEAST_SCALE, 119), (mx.MOST_SCALE, -119)])
def test_scales_at_the_ends(code, exponent):
    """The smallest and the largest scale, with rows that bring the sums back among the usual numbers."""
    experts = {name: tensor.clone() for name, tensor in EXPERTS.items()}
    experts["w13_scale"].fill_(code)
    experts["w2_scale"].fill_(127)
    host = make_rows(5, H, torch.bfloat16) * 2.0**exponent, *routed(5)[1:]
    assert_close(native(host, prepared(experts=experts)), expected(host, experts=experts), **BFLOAT16)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_shows_nowhere_else(value):
    x, ids, weights = routed(9)
    clean = native((x, ids, weights), prepared()).cpu()
    x[3, 5] = value
    ids[4], weights[4, :] = -1, value  # weights of slots without an expert
    dirty = native((x, ids, weights), prepared()).cpu()
    others = [row for row in range(9) if row not in (3, 4)]
    assert_same(dirty[others], clean[others])
    assert not dirty[3].isfinite().all() and dirty[4].eq(0).all()


@pytest.mark.parametrize("code", [0, 1, 253, 255])
def test_scales_that_the_product_does_not_hold(code):
    experts = on_npu(*EXPERTS.values())
    experts[3][2, 5, 1] = code
    with pytest.warns(UserWarning, match=r"generic composition serves these experts: 1 codes of w2_scale are outside"):
        weights, tag = mx.prepare_mx(*experts, w13_layout="gate_up")
    assert tag == "checkpoint" and weights[0] is experts[0]


@pytest.mark.parametrize(("hidden", "inter"), [(96, 64), (64, 96)])
def test_shapes_that_the_product_does_not_hold(hidden, inter):
    experts = on_npu(*make_experts(2, inter, hidden).values())
    with pytest.warns(UserWarning, match=f"hidden_size {hidden} and intermediate_size {inter} are not both multiples"):
        assert mx.prepare_mx(*experts, w13_layout="gate_up")[1] == "checkpoint"


def test_packed_bytes_are_those_of_torch_npu():
    """Unpacked to float32, converted and packed by torch_npu itself: the same storage."""
    codes = EXPERTS["w13"]
    values = reference.mxfp4.dequantize_mxfp4(codes, torch.full_like(EXPERTS["w13_scale"], 127))
    plain = values.transpose(1, 2).contiguous().npu()
    converted = torch_npu.npu_format_cast(plain, 29, customize_dtype=torch.bfloat16)
    theirs = torch_npu.npu_convert_weight_to_int4pack(converted)
    ours = mx._pack(codes.npu(), (slice(0, 2 * I),), 2 * I, H)
    assert torch_npu.get_npu_format(theirs) == torch_npu.get_npu_format(ours) == mx._FORMAT
    assert theirs.shape == ours.shape[1:]
    for tensor in (theirs, ours.view(theirs.shape)):
        matrix = mx.unpacked(tensor.view(1, *tensor.shape), torch.zeros(E, H // 32, 2 * I, dtype=torch.uint8).npu())
        assert_same(matrix.codes, codes)


def test_capture_and_replay_with_new_routing(stream):
    weights, static = prepared(), on_npu(*routed(9))
    call = {"w13_layout": "gate_up", "weight_layout": mx.LAYOUT}
    OPS.fused_mxfp4_moe(*static, *weights, **call)
    graph = torch.npu.NPUGraph()
    torch.npu.synchronize()
    with torch.npu.graph(graph, stream=stream):
        result = OPS.fused_mxfp4_moe(*static, *weights, **call)
        wide = OPS.fused_mxfp4_moe(static[0].float(), *static[1:], *weights, **call)
    for seed in (1, 2, 3):
        host = routed(9, seed)
        for tensor, value in zip(static, host, strict=True):
            tensor.copy_(value)
        with slow_device():
            graph.replay()
            torch.npu.synchronize()
        assert_close(result, expected(host), **BFLOAT16)
        assert_close(wide, expected((host[0].float(), *host[1:])), max_tol=3e-5, rms_tol=3e-6)


def module(layout: str = "gate_up") -> moe_ops.FusedMxfp4Experts:
    """Packed weights as buffers: npugraph_ex leaves those where they are, and copies other tensors."""
    names = ("w13", "w13_scale", "w2", "w2_scale")
    packed = dict(zip(names, prepared(layout), strict=True))
    return moe_ops.FusedMxfp4Experts(
        moe_ops.PreparedExperts(**packed, weight_layout=mx.LAYOUT, w13_layout=layout, hidden_size=H)
    )


@pytest.mark.parametrize("backend", ["aot_eager", "npugraph_ex"])
@pytest.mark.unpoisoned
def test_compiled(backend):
    torch._dynamo.reset()
    compiled = torch.compile(module(), backend=backend, dynamic=False, fullgraph=True)
    with torch.no_grad():
        for seed in range(4):
            host = routed(7, seed)
            assert_close(compiled(*on_npu(*host)), expected(host), **BFLOAT16)
    torch._dynamo.reset()


@pytest.mark.simulation
def test_nothing_is_dequantised_and_the_host_does_not_wait():
    from tests.npu.sim import loader

    weights, static = prepared(), on_npu(*routed(9))
    OPS.fused_mxfp4_moe(*static, *weights, w13_layout="gate_up", weight_layout=mx.LAYOUT)
    torch.npu.synchronize()
    with loader.trace() as trace:
        OPS.fused_mxfp4_moe(*static, *weights, w13_layout="gate_up", weight_layout=mx.LAYOUT)
        torch.npu.current_stream().npu_stream  # noqa: B018  (issues what is queued)
        assert trace.names("HOST") == []
        torch.npu.synchronize()
    assert trace.names("RUN").count("aclnnGroupedMatmulWeightNz") == 2
    assert "aclnnNpuFormatCast" not in trace.names("RUN")


def test_packed_weights_are_told_from_raw_ones_and_from_copies():
    host, weights = routed(3), prepared()
    with pytest.raises(ValueError, match=r"^fused_mxfp4_moe: w13 must be .* for weight_layout 'checkpoint', got "):
        OPS.fused_mxfp4_moe(*on_npu(*host), *weights, w13_layout="gate_up")
    with pytest.raises(ValueError, match=rf"^fused_mxfp4_moe: w13 must be .* for weight_layout '{mx.LAYOUT}', got "):
        native(host, on_npu(*EXPERTS.values()))
    plain = torch.zeros(weights[0].shape, device="npu")
    with pytest.raises(
        ValueError, match=r"^fused_mxfp4_moe: w13 must be a tensor that prepare_mx has made, not a copy"
    ):
        native(host, (plain, *weights[1:]))
    with pytest.raises(ValueError, match=r"^fused_mxfp4_moe_backward: w2 must be a tensor that prepare_mx has made"):
        OPS.fused_mxfp4_moe_backward(
            host[0].npu(), *on_npu(*host), *weights[:2], torch.zeros(weights[2].shape, device="npu"), weights[3],
            w13_layout="gate_up", weight_layout=mx.LAYOUT,
        )  # fmt: skip


def operator(**changed):
    """The operator itself, in the form that Ascend950 takes, with some arguments changed."""
    weight = torch.ops.npu.empty_with_format([E, H, I // 8], dtype=torch.float32, device="npu", acl_format=52)
    arguments = {
        "x": [torch.ones(5, H, dtype=torch.bfloat16, device="npu")],
        "weight": [weight],
        "antiquant_scale": [torch.full((E, H // 32, I), 127, dtype=torch.uint8, device="npu")],
        "group_list": torch.ones(E, dtype=torch.int64, device="npu") // 2,
        "split_item": 3,
        "group_type": 0,
        "group_list_type": 1,
    }
    result = torch.ops.npu.npu_grouped_matmul(**{**arguments, **changed})[0]
    torch.npu.synchronize()
    return result


@pytest.mark.simulation
@pytest.mark.parametrize(
    "changed",
    [
        lambda: {"x": [torch.ones(5, H, device="npu")]},
        lambda: {"antiquant_scale": [torch.full((E, I, H // 32), 127, dtype=torch.uint8, device="npu")]},
        lambda: {"antiquant_scale": [torch.ones(E, H // 32, I, dtype=torch.bfloat16, device="npu")]},
        lambda: {"antiquant_scale": None},
        lambda: {"weight": [torch.ops.npu.empty_with_format([E, H, I // 8], device="npu", acl_format=53)]},
        lambda: {"weight": [torch.ops.npu.empty_with_format([E, H, 4], device="npu", acl_format=52)]},
        lambda: {"bias": [torch.ones(E, I, dtype=torch.float16, device="npu")]},
        lambda: {"bias": [torch.ones(I, device="npu")]},
        lambda: {"group_list": torch.ones(E, dtype=torch.int32, device="npu")},
        lambda: {"act_type": 1},
        lambda: {"group_list_type": 2},
    ],
    ids=[
        "float32 rows", "transposed scales", "bfloat16 scales", "no scales", "another format", "unaligned columns",
        "bias of another dtype", "bias of another shape", "int32 counts", "activation", "pairs of counts",
    ],
)  # fmt: skip
def test_simulated_operator_checks_its_arguments(changed):
    assert operator().shape == (5, I)
    with pytest.raises(RuntimeError):
        operator(**changed())
        torch.npu.synchronize()


@pytest.mark.simulation
def test_simulated_scales_are_decoded_as_the_kernel_does():
    """Shifted to an exponent: the code 0 gives 0 and 255 infinity. Not E8M0, hence the range of prepare_mx."""
    codes = torch.full((1, I, H // 2), 0x22, dtype=torch.uint8).expand(E, I, H // 2).contiguous()  # 1.0
    weight = mx._pack(codes.npu(), (slice(0, I),), I, H).view(E, H, I // 8)
    scales = torch.full((E, H // 32, I), 127, dtype=torch.uint8)
    scales[:, :, 0], scales[:, :, 1], scales[:, :, 2] = 0, 255, 128
    counts = torch.tensor([5, 0, 0, 0, 0, 0]).npu()
    y = operator(weight=[weight], antiquant_scale=[scales.npu()], group_list=counts).cpu()
    assert y[:, 0].unique().tolist() == [0] and y[:, 1].isinf().all()
    assert y[:, 2].unique().tolist() == [2 * H] and y[:, 3].unique().tolist() == [H]


@pytest.mark.simulation
def test_simulated_plain_operators_take_no_private_format():
    packed = prepared()[0]
    with pytest.raises(RuntimeError):
        (packed + 1).cpu()


@pytest.mark.parametrize("how", [copy.deepcopy, lambda layer: layer.cpu().npu()], ids=["deepcopy", "there and back"])
def test_copies_are_right_or_refused(how):
    host, layer = routed(5), module("interleaved")
    wanted = layer(*on_npu(*host)).cpu()
    try:
        copied = how(layer)
        result = copied(*on_npu(*host))
    except (RuntimeError, ValueError) as error:
        assert "format" in str(error) or "not a copy" in str(error), error
    else:
        assert_same(result, wanted)


@pytest.mark.simulation
@pytest.mark.parametrize("customize", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(2, 20, 24), (33, 16), (1, 64, 128)])
def test_simulated_format_cast_there_and_back(shape, customize):
    """Sizes that do not fill the blocks as well."""
    x = torch.randn(shape)
    there = torch_npu.npu_format_cast(x.npu(), 29, customize_dtype=customize)
    assert int(torch_npu.get_npu_format(there)) == (50 if customize == torch.bfloat16 else 51)
    assert_same(torch_npu.npu_format_cast(there, 2), x)
