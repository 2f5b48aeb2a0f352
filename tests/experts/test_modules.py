"""FusedMxfp4Experts: the op's result from a module that models can hold, move, copy, compile and save."""

from __future__ import annotations

import copy
import platform

import pytest
import torch

import moe_ops
from moe_ops import FusedMxfp4Experts, Mxfp4Experts
from moe_ops.distributed import ExpertParallelMoE
from tests.support import assert_same, make_experts, make_routing, make_rows

E, I, H, K = 3, 64, 96, 2  # noqa: E741
on_x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86_v1 is for x86 processors")


def make(seed: int = 0) -> tuple[Mxfp4Experts, FusedMxfp4Experts]:
    biases = {"w13_bias": torch.randn(E, 2 * I), "w2_bias": torch.randn(E, H)}
    raw = Mxfp4Experts(**make_experts(E, I, H, seed), w13_layout="interleaved", **biases)
    return raw, FusedMxfp4Experts(raw, activation="swiglu_oai", swiglu_limit=5.0)


def batch(tokens: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return make_rows(tokens, H, torch.bfloat16), *make_routing(tokens, K, E)


def expected(raw: Mxfp4Experts, inputs, **options) -> torch.Tensor:
    arguments = {**raw.arguments(), "activation": "swiglu_oai", "swiglu_limit": 5.0, **options}
    return moe_ops.fused_mxfp4_moe(*inputs, **arguments)


def test_the_module_is_the_op():
    raw, module = make()
    inputs = batch()
    assert_same(module(*inputs), expected(raw, inputs))
    wide = module(*inputs, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert_same(wide, expected(raw, inputs, out_dtype=torch.float32))
    assert "3 experts, hidden_size=96, intermediate_size=64, checkpoint, swiglu_oai" in repr(module)
    assert not list(module.parameters()) and len(module.state_dict()) == 6


@on_x86
def test_prepare_keeps_the_bits_and_happens_once():
    raw, module = make()
    inputs = batch()
    before = expected(raw, inputs)
    assert module.prepare() is module and module.weight_layout == "x86_v1"
    assert_same(module(*inputs), before)
    with pytest.raises(ValueError, match="prepare: the weights must be in 'checkpoint', got x86_v1"):
        module.prepare()
    with pytest.raises(RuntimeError, match="weight_layout must be 'x86_v1', got 'checkpoint'"):
        module.load_state_dict(make(1)[1].state_dict())


def test_state_dict_and_copies():
    _, module = make()
    raw_other, other = make(1)
    inputs = batch()
    assert not torch.equal(module(*inputs), other(*inputs))
    module.load_state_dict(other.state_dict())
    twin = copy.deepcopy(module)
    assert_same(module(*inputs), expected(raw_other, inputs))
    assert_same(twin(*inputs), module(*inputs))
    assert twin.w13.data_ptr() != module.w13.data_ptr()


def test_a_state_dict_of_another_row_order_is_refused():
    module = torch.nn.Sequential(make()[1])
    state = module.state_dict()
    tensors = make_experts(E, I, H, 1)
    other = FusedMxfp4Experts(Mxfp4Experts(**tensors, w13_layout="gate_up"))
    saved = torch.nn.Sequential(other).state_dict()
    assert list(state) == [f"0.{name}" for name in ("w13", "w2", "w13_scale", "w2_scale", "w13_bias", "w2_bias")]
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"0\.w13_layout must be 'interleaved', got 'gate_up'"):
            module.load_state_dict(saved, strict=strict)
    module.load_state_dict(dict(state))  # without metadata nothing can be compared


def test_options_are_checked_when_it_is_made():
    raw, _ = make()
    for options, text in (
        ({"activation": "gelu"}, "activation must be 'silu' or 'swiglu_oai', got 'gelu'"),
        ({"swiglu_limit": 0.0}, "swiglu_limit must be None or a finite number above 0, got 0.0"),
        ({"swiglu_alpha": 2.0}, "swiglu_alpha must be None for activation 'silu', got 2.0"),
    ):
        with pytest.raises(ValueError, match=f"FusedMxfp4Experts: {text}"):
            FusedMxfp4Experts(raw, **options)


def test_gradients_and_compile():
    raw, module = make()
    found = []
    for function in (module, torch.compile(module, fullgraph=True, backend="aot_eager"), None):
        x, ids, weights = batch()
        x.requires_grad_(), weights.requires_grad_()
        out = expected(raw, (x, ids, weights)) if function is None else function(x, ids, weights)
        out.float().square().sum().backward()
        found.append((out.detach(), x.grad, weights.grad))
    for results in found[:2]:
        for actual, wanted in zip(results, found[2], strict=True):
            assert_same(actual, wanted)


def test_inside_an_expert_parallel_layer():
    raw, module = make()
    module.options["batch_invariant"] = True
    inputs = batch()
    layer = ExpertParallelMoE(module, E, K, H)
    with torch.inference_mode():
        rows = layer(*inputs)
    torch.testing.assert_close(rows, expected(raw, inputs), rtol=2e-2, atol=2e-2)
    with torch.inference_mode():
        assert_same(copy.deepcopy(layer)(*inputs), rows)


def test_state_dicts_with_scales_of_other_dtypes():
    """Checkpoints have E8M0 scales as bytes, as float8_e8m0fnu or as values."""
    raw, _ = make()
    inputs = batch()
    tensors = {name: tensor.clone() for name, tensor in raw.tensors().items()}
    for dtype in (torch.float8_e8m0fnu, torch.float32):
        _, module = make(seed=1)
        scales = {name: tensors[name].view(torch.float8_e8m0fnu).to(dtype) for name in ("w13_scale", "w2_scale")}
        module.load_state_dict(tensors | scales)
        assert_same(module(*inputs), expected(raw, inputs))
    _, module = make(seed=1)
    before = module.w13_scale.clone()
    for name, value, message in (
        ("w13_scale", tensors["w13_scale"].float() + 0.5, "w13_scale must be powers of two"),
        ("w2_scale", tensors["w2_scale"].int(), "w2_scale must be uint8, .* got int32"),
        ("w13", tensors["w13"].float(), "w13 must be torch.uint8, got torch.float32"),
    ):
        with pytest.raises(RuntimeError, match=message):
            module.load_state_dict(tensors | {name: value})
        assert_same(module.w13_scale, before)


@on_x86
def test_modules_over_repacked_memory():
    raw, first = make()
    second = FusedMxfp4Experts(raw)
    saved = second.state_dict()
    first.prepare()
    _, other = make(seed=1)
    for use in (lambda: second(*batch()), lambda: copy.deepcopy(second)):
        with pytest.raises(ValueError, match="w13 must be checkpoint bytes, got memory that prepare"):
            use()
    with pytest.raises(RuntimeError, match="w13 must be checkpoint bytes"):
        other.load_state_dict(saved)
