"""The experts implementation and MXFP4 experts in small models of several families, against their own eager experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("needs transformers 5", allow_module_level=True)

from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: E402

import moe_ops.integrations.transformers as integration  # noqa: E402
from moe_ops._register import MISSING  # noqa: E402
from moe_ops.integrations.checkpoints import CheckpointWriter  # noqa: E402
from moe_ops.reference.mxfp4 import dequantize_mxfp4  # noqa: E402

needs_fused = pytest.mark.skipif(
    ("fused_mxfp4_moe", "CPU") in MISSING, reason=MISSING.get(("fused_mxfp4_moe", "CPU"), "")
)


def qwen3_moe() -> Any:
    return transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig(
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        vocab_size=64,
    )


def mixtral() -> Any:
    return transformers.MixtralForCausalLM, transformers.MixtralConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=64,
    )


def gpt_oss() -> Any:
    return transformers.GptOssForCausalLM, transformers.GptOssConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=64,
        layer_types=["full_attention", "sliding_attention"],
    )


FAMILIES = [qwen3_moe, mixtral, gpt_oss]


def make(family: Any, implementation: str = "eager") -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    kind, config = family()
    model = kind._from_config(config, experts_implementation=implementation).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name:  # the default initialisation is so small that a wrong expert would hardly show
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model, torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(1))


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_implementation_against_eager(family: Any, dtype: torch.dtype) -> None:
    model, ids = make(family)
    model = model.to(dtype)
    expected = logits(model, ids)
    model.set_experts_implementation("moe_ops")
    actual = logits(model, ids)
    tolerance = 2e-5 if dtype == torch.float32 else 3e-2
    assert (actual - expected).float().norm() / expected.float().norm() < tolerance


def test_gradients_against_eager() -> None:
    gradients = {}
    for implementation in ("eager", "moe_ops"):
        model, ids = make(qwen3_moe, implementation)
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients[implementation] = {name: p.grad for name, p in model.named_parameters()}
    for name, expected in gradients["eager"].items():
        actual = gradients["moe_ops"][name]
        assert (expected is None) == (actual is None), name
        if expected is not None:
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("family", FAMILIES)
def test_sentinels_are_skipped(family: Any) -> None:
    """Under expert parallelism transformers gives ids >= num_experts for other ranks' experts, with whatever weight."""
    model, _ = make(family)
    experts = next(module for _, module in integration.experts_modules(model))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    number = experts.num_experts
    ids = torch.tensor([[0, number], [number, number], [1, 2], [number + 3, 3], [2, 2]])
    weights = torch.rand(5, 2, generator=torch.Generator().manual_seed(3))
    one_by_one = torch.zeros_like(x)
    for slot in range(2):
        valid = ids[:, slot] < number
        part = integration.moe_ops_experts(
            experts, x[valid], ids[valid, slot : slot + 1], weights[valid, slot : slot + 1]
        )
        one_by_one[valid] += part.detach()
    poisoned = torch.where(ids < number, weights, torch.nan)
    actual = integration.moe_ops_experts(experts, x, ids, poisoned).detach()
    torch.testing.assert_close(actual, one_by_one, rtol=1e-4, atol=1e-4)
    assert actual[1].count_nonzero() == 0


class Unwritten(torch.autograd.Function):
    """What a grouped product may leave past the last end: any number in the rows (one that the gate does not clamp, and
    with it its gradient), or NaN in their gradient."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, offs: torch.Tensor, forward: bool) -> torch.Tensor:
        ctx.end, ctx.forward = int(offs[-1]), forward
        rows = rows.clone()
        if forward:
            rows[ctx.end :] = 0.5
        return rows

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        grad = grad.clone()
        if not ctx.forward:
            grad[ctx.end :] = torch.nan
        return grad, None, None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("none", [-1, 4])
@pytest.mark.parametrize("all_none", [False, True])
def test_rows_of_no_expert_have_no_part_in_gradients(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, none: int, all_none: bool
) -> None:
    grouped_mm = torch.nn.functional.grouped_mm

    def leaves_rows_unwritten(rows: torch.Tensor, weight: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        out = grouped_mm(Unwritten.apply(rows, offs, False), weight, offs=offs)
        return Unwritten.apply(out, offs, True)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", leaves_rows_unwritten)
    model, _ = make(gpt_oss, "moe_ops")
    experts = next(module for _, module in integration.experts_modules(model)).to(dtype)
    assert experts.num_experts == 4
    ids = torch.tensor([[0, 1], [none, 2], [none, none], [1, 0], [none, none], [2, none]])
    ids = torch.full_like(ids, none) if all_none else ids
    x = torch.randn(6, 64, dtype=dtype, requires_grad=True)
    out = integration.moe_ops_experts(experts, x, ids, torch.rand(6, 2).to(dtype))
    assert bool(out.isfinite().all())
    out.sum().backward()
    assert x.grad is not None and bool(x.grad.isfinite().all())
    for name, parameter in experts.named_parameters():
        if name.endswith("bias"):
            assert bool(parameter.grad.isfinite().all()), name
            assert parameter.grad[0 if all_none else 3 :].count_nonzero() == 0, name


def dequantised(model: Any) -> Any:
    """The model with every expert weight rounded to MXFP4, still in its own experts modules."""
    for _, module in integration.experts_modules(model):
        layout = integration.resolve_activation(module)[1]
        tensors = integration._quantize(module, layout)
        with torch.no_grad():
            for parameter, codes, scales in (
                (module.gate_up_proj, tensors.w13, tensors.w13_scale),
                (module.down_proj, tensors.w2, tensors.w2_scale),
            ):
                value = dequantize_mxfp4(codes, scales)
                parameter.copy_(value.transpose(1, 2) if module.is_transposed else value)
    return model


@needs_fused
@pytest.mark.parametrize("family", FAMILIES)
def test_quantised_experts(family: Any) -> None:
    model, ids = make(family)
    expected = logits(dequantised(model), ids)
    again, _ = make(family)
    assert integration.quantize_experts(again) == 2
    assert not list(integration.experts_modules(again))
    torch.testing.assert_close(logits(again, ids), expected, rtol=1e-3, atol=1e-4)


@needs_fused
@pytest.mark.parametrize("meta", [False, True])
def test_gpt_oss_checkpoint(tmp_path: Path, meta: bool) -> None:
    model, ids = make(gpt_oss)
    with CheckpointWriter(tmp_path) as writer:
        for name, module in integration.experts_modules(model):
            writer.add_experts(name, integration._quantize(module, "interleaved"))
    expected = logits(dequantised(model), ids)
    again, _ = make(gpt_oss)
    if meta:
        for _, module in integration.experts_modules(again):
            module.to("meta")
    done: list[int] = []
    assert integration.load_experts(again, tmp_path, progress=done.append) == 2
    assert done == [1, 2]
    torch.testing.assert_close(logits(again, ids), expected, rtol=1e-3, atol=1e-4)


def test_activation_is_found_by_trying() -> None:
    assert integration.resolve_activation(next(integration.experts_modules(make(qwen3_moe)[0]))[1]) == (
        {"activation": "silu", "swiglu_limit": None, "swiglu_alpha": None},
        "gate_up",
    )
    assert integration.resolve_activation(next(integration.experts_modules(make(gpt_oss)[0]))[1]) == (
        {"activation": "swiglu_oai", "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
        "interleaved",
    )
    model, _ = make(qwen3_moe)
    module = next(integration.experts_modules(model))[1]
    module.act_fn = torch.nn.GELU()
    with pytest.raises(ValueError, match="quantize_experts: experts must be gated by SiLU"):
        integration.resolve_activation(module)


def test_registered_under_its_name() -> None:
    assert ALL_EXPERTS_FUNCTIONS["moe_ops"] is integration.moe_ops_experts


def test_one_graph_for_all_layers() -> None:
    from torch._dynamo.utils import counters

    model, ids = make(qwen3_moe, "moe_ops")
    expected = logits(model, ids)
    torch._dynamo.reset()
    counters.clear()
    for layer in model.model.layers:
        layer.mlp.compile(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(logits(model, ids), expected, rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1
