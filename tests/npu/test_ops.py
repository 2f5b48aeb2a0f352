"""What is the NPU's own about the ops: capture and replay, no wait of the host, the paths by size and by device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_ops import reference
from tests.npu.device import slow_device
from tests.support import assert_close, assert_same, make_experts, make_routing, make_rows

pytest.importorskip("torch_npu")
from moe_ops.npu import _device, _experts, _weights, mx
from moe_ops.npu._grouped import mx_product
from moe_ops.npu.prepare import LAYOUT, WeightBudget, prepare

OPS = torch.ops.moe_ops
E, K, H, I = 6, 3, 64, 96  # noqa: E741  (the names of the documentation)
BFLOAT16 = {"max_tol": 2.5e-2, "rms_tol": 5e-3}
FLOAT32 = {"max_tol": 3e-5, "rms_tol": 3e-6}
EXPERTS = make_experts(E, I, H)


def routed(tokens: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    return make_rows(tokens, H, dtype, seed=seed), *make_routing(tokens, K, E, seed=seed, invalid=0.3)


def on_npu(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.npu() for tensor in tensors]


def counts(seed: int) -> torch.Tensor:
    return torch.randint(0, 9, (3, 7), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))


def moe(x, ids, weights, *experts, op=OPS.fused_mxfp4_moe, **options):
    return op(x, ids, weights, *experts, w13_layout="interleaved", activation="swiglu_oai", **options)


def moe_reference(x, ids, weights, **options):
    return moe(x, ids, weights, *EXPERTS.values(), op=reference.fused_mxfp4_moe, out_dtype=torch.float32, **options)


# name -> (function of the inputs, the same on the CPU, inputs for a seed, exact)
CALLS: dict[str, tuple[Any, Any, Any, bool]] = {
    "topk_permute": (
        lambda x, ids, w: OPS.topk_permute(x, ids, E),
        lambda x, ids, w: reference.topk_permute(x, ids, E),
        lambda seed: routed(9, seed),
        True,
    ),
    "topk_permute of fewer rows": (
        lambda x, ids, w: OPS.topk_permute(x, ids, E, num_out_tokens=10),
        lambda x, ids, w: reference.topk_permute(x, ids, E, num_out_tokens=10),
        lambda seed: routed(9, seed),
        True,
    ),
    "topk_unpermute": (
        lambda x, ids, w: (OPS.topk_unpermute(OPS.topk_permute(x, ids, E)[0], OPS.topk_permute(x, ids, E)[1], w),),
        lambda x, ids, w: (
            reference.topk_unpermute(reference.topk_permute(x, ids, E)[0], reference.topk_permute(x, ids, E)[1], w),
        ),
        lambda seed: routed(9, seed),
        True,
    ),
    "ep_remap": (
        lambda x, ids, w: OPS.ep_remap(ids, w, expert_offset=2, num_local_experts=3),
        lambda x, ids, w: reference.ep_remap(ids, w, expert_offset=2, num_local_experts=3),
        lambda seed: routed(9, seed),
        True,
    ),
    "route_metadata": (
        lambda table: OPS.route_metadata(table, 1, mode="pull"),
        lambda table: reference.route_metadata(table, 1, mode="pull"),
        lambda seed: (counts(seed),),
        True,
    ),
    "fused_mxfp4_moe, all experts": (
        lambda x, ids, w: (moe(x, ids, w, *EXPERTS_NPU),),
        lambda x, ids, w: (moe_reference(x, ids, w),),
        lambda seed: routed(9, seed),
        False,
    ),
    "fused_mxfp4_moe, the experts of the slots": (
        lambda x, ids, w: (moe(x, ids, w, *EXPERTS_NPU),),
        lambda x, ids, w: (moe_reference(x, ids, w),),
        lambda seed: routed(1, seed),
        False,
    ),
    "fused_mxfp4_moe_backward": (
        lambda x, ids, w: OPS.fused_mxfp4_moe_backward(x, x, ids, w, *EXPERTS_NPU, w13_layout="gate_up"),
        lambda x, ids, w: reference.fused_mxfp4_moe_backward(x, x, ids, w, *EXPERTS.values(), w13_layout="gate_up"),
        lambda seed: routed(9, seed),
        False,
    ),
}
EXPERTS_NPU = on_npu(*EXPERTS.values())


def compare(actual: Any, expected: Any, exact: bool) -> None:
    for got, want in zip(actual, expected, strict=True):
        if exact:
            assert_same(got, want)
        else:
            assert_close(got, want, **BFLOAT16)


@pytest.mark.parametrize("name", CALLS)
def test_capture_and_replay_with_new_routing(name, stream):
    function, on_cpu, inputs, exact = CALLS[name]
    static = on_npu(*inputs(0))
    compare(function(*static), on_cpu(*inputs(0)), exact)
    graph = torch.npu.NPUGraph()
    torch.npu.synchronize()
    with torch.npu.graph(graph, stream=stream):
        results = function(*static)
    for seed in (1, 2, 3):
        for tensor, value in zip(static, inputs(seed), strict=True):
            tensor.copy_(value)
        with slow_device():
            graph.replay()
            torch.npu.synchronize()
        compare(results, on_cpu(*inputs(seed)), exact)


def test_first_use_inside_a_capture(stream, monkeypatch):
    """The table of weight values is then built by the graph, and not kept: it holds nothing before the replay."""
    monkeypatch.setattr(_weights, "_tables", {})
    host = routed(9)
    static = on_npu(*host)
    graph = torch.npu.NPUGraph()
    torch.npu.synchronize()
    with torch.npu.graph(graph, stream=stream):
        result = moe(*static, *EXPERTS_NPU)
    assert not _weights._tables
    graph.replay()
    assert_close(result, moe_reference(*host), **BFLOAT16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_first_use_on_several_streams(dtype, monkeypatch, stream):
    """The table of weight values is built on the first stream; the others, and a capture, must not read it before."""
    monkeypatch.setattr(_weights, "_tables", {})
    host = routed(9, dtype=dtype)
    static = on_npu(*host)
    torch.npu.synchronize()
    results = []
    graph = torch.npu.NPUGraph()
    with slow_device():
        for side in [torch.npu.Stream() for _ in range(3)]:
            with torch.npu.stream(side):
                results.append(moe(*static, *EXPERTS_NPU))
        with torch.npu.graph(graph, stream=stream):
            results.append(moe(*static, *EXPERTS_NPU))
        graph.replay()
        torch.npu.synchronize()
    for result in results:
        assert_close(result, moe_reference(*host), **BFLOAT16)


@pytest.mark.simulation
@pytest.mark.parametrize("name", CALLS)
def test_the_host_waits_for_nothing(name):
    from tests.npu.sim import loader

    function, _, inputs, _ = CALLS[name]
    static = on_npu(*inputs(0))
    function(*static)
    torch.npu.synchronize()
    with loader.trace() as trace:
        results = function(*static)
        before = list(results)
        torch.npu.current_stream().npu_stream  # noqa: B018  (issues what is queued)
    assert before and trace.names("HOST") == []


@pytest.mark.simulation
@pytest.mark.parametrize(
    ("name", "operators"),
    [
        ("topk_permute", {"aclnnMoeInitRoutingV3"}),
        ("fused_mxfp4_moe, all experts", {"aclnnMoeInitRoutingV3", "aclnnClippedSwiglu"}),
        ("fused_mxfp4_moe, the experts of the slots", {"aclnnMoeInitRoutingV3", "aclnnClippedSwiglu"}),
    ],
)
def test_fused_operators_are_used(name, operators):
    from tests.npu.sim import loader

    function, _, inputs, _ = CALLS[name]
    static = on_npu(*inputs(0))
    torch.npu.synchronize()
    with loader.trace() as trace:
        function(*static)
        torch.npu.synchronize()
    ran = set(trace.names("RUN"))
    assert operators <= ran
    assert name == "topk_permute" or any(operator.startswith("aclnnGroupedMatmul") for operator in ran)


@pytest.mark.parametrize("name", CALLS)
def test_device_of_unknown_operators_gets_plain_compositions(name, monkeypatch):
    monkeypatch.setattr(_device, "_family", lambda index: "")
    function, on_cpu, inputs, exact = CALLS[name]
    compare(function(*on_npu(*inputs(5))), on_cpu(*inputs(5)), exact)


@pytest.mark.parametrize(
    ("device", "family"),
    [
        ("Ascend910B1", "A2"),
        ("Ascend910B4-1", "A2"),
        ("Ascend910_9391", "A3"),
        ("Ascend910_9362", "A3"),
        ("Ascend950PR_9579", "A5"),
        ("Ascend950DT_9591", "A5"),
        ("Ascend310P3", ""),
    ],
)
def test_families(device, family, monkeypatch):
    monkeypatch.setattr(torch.npu, "get_device_name", lambda index: device)
    assert _device._family.__wrapped__(0) == family


def test_another_backend_on_privateuse1_is_refused(monkeypatch):
    x, ids, _ = on_npu(*routed(3))
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "other")
    with pytest.raises(RuntimeError, match=r"topk_permute: .* this backend is 'other'"):
        OPS.topk_permute(x, ids, E)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_weight_value_is_exact(dtype):
    """All 256 scales times all 256 code bytes, the subnormal, the largest and NaN included."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)  # [scale, byte]
    codes = codes.view(256, 16, 16)
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1, 1).expand(256, 16, 1).contiguous()
    expected = reference.mxfp4.dequantize_mxfp4(codes, scales)
    actual = _weights.dequantize(codes.npu(), scales.npu(), dtype).cpu()
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.float(), expected, rtol=0, atol=0, equal_nan=True)
    finite = ~expected.isnan()
    assert torch.equal(torch.signbit(actual)[finite], torch.signbit(expected)[finite])


@pytest.mark.parametrize(("tokens", "experts"), [(1, 3), (9, E)])
def test_only_what_the_slots_can_name_is_dequantised(tokens, experts, monkeypatch):
    shapes, block = [], _weights.Matrix.block

    def recorded(self, *args):
        result = block(self, *args)
        shapes.append(tuple(result.shape))
        return result

    monkeypatch.setattr(_weights.Matrix, "block", recorded)
    moe(*on_npu(*routed(tokens)), *EXPERTS_NPU)
    assert shapes == [(experts, 2 * I, H), (experts, H, I)]


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", ["gate_up", "up_gate", "interleaved"])
def test_blocks_do_not_change_a_bit(tokens, dtype, layout, monkeypatch):
    arguments = on_npu(*routed(tokens, dtype=dtype))
    biases = {"w13_bias": torch.randn(E, 2 * I).npu(), "w2_bias": torch.randn(E, H).npu()}
    options = {"w13_layout": layout, "swiglu_limit": 2.0, **biases}

    def results():
        gradients = OPS.fused_mxfp4_moe_backward(arguments[0], *arguments, *EXPERTS_NPU, **options)
        return OPS.fused_mxfp4_moe(*arguments, *EXPERTS_NPU, **options).cpu(), *(g.cpu() for g in gradients)

    whole = results()
    monkeypatch.setenv("MOE_OPS_NPU_BLOCK_MIB", "0")
    assert _experts.block_bytes() == 0
    for got, want in zip(results(), whole, strict=True):
        assert_same(got, want)


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (1, 3), (E, 1)])
def test_one_group(experts, top_k):
    """One expert, or one slot: CANN takes no list of counts of length 1."""
    weights = make_experts(experts, I, H)
    tokens = 1 if experts > 1 else 5
    x, ids = make_rows(tokens, H, torch.bfloat16), torch.arange(tokens * top_k).view(tokens, top_k) % 2
    host = x, ids, torch.rand(tokens, top_k)
    arguments = on_npu(*host, *weights.values())
    wanted = reference.fused_mxfp4_moe(*host, *weights.values(), w13_layout="gate_up", out_dtype=torch.float32)
    assert_close(OPS.fused_mxfp4_moe(*arguments, w13_layout="gate_up"), wanted, **BFLOAT16)
    compare(
        OPS.fused_mxfp4_moe_backward(arguments[0], *arguments, w13_layout="gate_up"),
        reference.fused_mxfp4_moe_backward(x, *host, *weights.values(), w13_layout="gate_up"),
        exact=False,
    )


def test_products_in_bfloat16_are_a_choice(monkeypatch):
    host = routed(33)
    arguments = on_npu(*host)
    exact = moe(*arguments, *EXPERTS_NPU).cpu()
    monkeypatch.setenv("MOE_OPS_NPU_PRODUCTS", "bfloat16")
    fast = moe(*arguments, *EXPERTS_NPU).cpu()
    assert not torch.equal(exact, fast)
    assert_close(fast, moe_reference(*host), max_tol=5e-2, rms_tol=1e-2)


@pytest.mark.parametrize("layout", ["gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize("tokens", [1, 21])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_prepared_weights(layout, tokens, dtype):
    host = routed(tokens, dtype=dtype)
    biases = {"w13_bias": torch.randn(E, 2 * I), "w2_bias": torch.randn(E, H)}
    budget = WeightBudget(1 << 20)
    weights, weight_layout = prepare(*EXPERTS_NPU, w13_layout=layout, budget=budget)
    assert weight_layout == LAYOUT and budget.used_bytes == E * 3 * I * H * 2
    options = {"w13_layout": layout, "swiglu_limit": 2.0}
    moved = {name: bias.npu() for name, bias in biases.items()}
    actual = OPS.fused_mxfp4_moe(*on_npu(*host), *weights, weight_layout=weight_layout, **options, **moved)
    expected = reference.fused_mxfp4_moe(*host, *EXPERTS.values(), out_dtype=torch.float32, **options, **biases)
    bounds = {torch.bfloat16: (5e-2, 1e-2), torch.float16: (4e-3, 7e-4), torch.float32: (3e-5, 3e-6)}
    max_tol, rms_tol = bounds[dtype]
    assert_close(actual, expected, max_tol=max_tol, rms_tol=rms_tol)
    grads = OPS.fused_mxfp4_moe_backward(
        host[0].npu(), *on_npu(*host), *weights, weight_layout=weight_layout, **options, **moved
    )
    wanted = reference.fused_mxfp4_moe_backward(host[0], *host, *EXPERTS.values(), **options, **biases)
    compare(grads, wanted, exact=False)


def test_budget():
    budget = WeightBudget(E * 3 * I * H * 2)
    first, layout = prepare(*EXPERTS_NPU, w13_layout="gate_up", budget=budget)
    assert layout == LAYOUT
    second, layout = prepare(*EXPERTS_NPU, w13_layout="gate_up", budget=budget)
    assert layout == "checkpoint" and second[0] is EXPERTS_NPU[0]
    del first
    assert budget.used_bytes == 0
    assert prepare(*EXPERTS_NPU, w13_layout="gate_up", budget=budget)[1] == LAYOUT


def test_prepared_weights_are_rejected_as_raw_ones_and_the_other_way_round():
    x, ids, weights = on_npu(*routed(3))
    prepared, layout = prepare(*EXPERTS_NPU, w13_layout="gate_up", budget=WeightBudget(1 << 20))
    with pytest.raises(ValueError, match=r"^fused_mxfp4_moe: w13 must be .* for weight_layout 'checkpoint', got "):
        OPS.fused_mxfp4_moe(x, ids, weights, *prepared, w13_layout="gate_up")
    with pytest.raises(ValueError, match=rf"^fused_mxfp4_moe: w13 must be .* for weight_layout '{layout}', got "):
        OPS.fused_mxfp4_moe(x, ids, weights, *EXPERTS_NPU, w13_layout="gate_up", weight_layout=layout)


@pytest.mark.skipif(_device.family(torch.device("npu", 0)) == "A5", reason="this device has the product")
def test_other_devices_keep_their_weights_and_refuse_the_layout():
    experts = EXPERTS_NPU
    with pytest.warns(UserWarning, match=r"generic composition serves these experts: Ascend910.* has no product for"):
        weights, tag = mx.prepare_mx(*experts, w13_layout="gate_up")
    assert tag == "checkpoint" and all(a is b for a, b in zip(weights, experts, strict=True))
    packed = (
        torch.zeros(1, E, H, 2 * H // 8, device="npu"), torch.zeros(E, H // 32, 2 * H, dtype=torch.uint8).npu(),
        torch.zeros(1, E, H, H // 8, device="npu"), torch.zeros(E, H // 32, H, dtype=torch.uint8).npu(),
    )  # fmt: skip
    with pytest.raises(
        ValueError, match=r"^fused_mxfp4_moe: weight_layout must be 'checkpoint' or .* of Ascend910.*, got 'npu_mx_v1'"
    ):
        OPS.fused_mxfp4_moe(*on_npu(*routed(3)), *packed, w13_layout="gate_up", weight_layout=mx.LAYOUT)
    with pytest.raises(RuntimeError, match=r"161002|aclnnGroupedMatmulWeightNz"):
        mx_product(
            torch.ones(5, H, dtype=torch.bfloat16, device="npu"),
            torch.ops.npu.empty_with_format([1, E, H, 8], dtype=torch.float32, device="npu", acl_format=52),
            torch.ones(E, H // 32, 64, dtype=torch.uint8, device="npu"),
            None,
            torch.ones(E, dtype=torch.int64, device="npu"),
        )
        torch.npu.synchronize()


def test_info_says_what_is_used():
    from moe_ops.npu import support

    lines = support.lines()
    assert lines[0].startswith(f"npu:0 {torch.npu.get_device_name(0)}, A") and "grouped matmul" in lines[0]
    assert lines[-1].startswith("CPU experts: aclrtLaunchHostFunc")


def test_info_of_a_device_that_is_not_known(monkeypatch):
    from moe_ops.npu import support

    monkeypatch.setattr(_device, "_family", lambda index: "")
    assert "plain ATen compositions" in support.describe_device(0)
