"""The inputs of `python -m moe_ops check`: small, with ids outside the experts, empty experts, strides, odd sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import moe_ops
from moe_ops import reference

# Largest error allowed, relative to the larger of the expected value and the RMS of all of them. A half-precision
# kernel may round the activated intermediate to the dtype of the activations, and rounds the result.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@dataclass
class Comparison:
    name: str
    actual: torch.Tensor
    expected: torch.Tensor
    exact: bool = True

    def _error(self) -> float:
        actual, expected = self.actual.detach().cpu(), self.expected.detach().cpu()
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            return float("inf")
        a, e = actual.to(torch.float64), expected.to(torch.float64)
        same = (a == e) | (a.isnan() & e.isnan())
        if bool(same.all()):
            return 0.0
        scale = e.abs().clamp(min=float(e.nan_to_num().square().mean().sqrt()))
        return float(torch.where(same, 0.0, (a - e).abs() / scale).nan_to_num(nan=float("inf")).max())

    def ratio(self) -> float:
        """Error over tolerance: at most 1 is good."""
        error = self._error()
        if self.exact:
            return 0.0 if error == 0 else float("inf")
        return error / TOLERANCE[self.expected.dtype]

    def describe(self) -> str:
        error = self._error()
        if error == float("inf"):
            return f"{self.name} differs in shape, dtype or finiteness"
        return f"{self.name} {'equal' if error == 0 else f'off by {error:.1e}'}"


def _rows(tokens: int, width: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _routing(tokens: int, top_k: int, num_experts: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of which some are -1 or too large, and one expert that nobody chooses."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, num_experts - 1, (tokens, top_k), generator=generator)
    drop = torch.rand(tokens, top_k, generator=generator)
    ids = torch.where(drop < 0.1, -1, torch.where(drop > 0.9, num_experts + 3, ids))
    return ids, torch.rand(tokens, top_k, generator=generator)


def _experts(num_experts: int, hidden: int, intermediate: int, seed: int) -> dict[str, Any]:
    """Random codes, with scales that keep the outputs near 1."""
    generator = torch.Generator().manual_seed(seed)

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    def scales(*shape: int) -> torch.Tensor:
        return torch.randint(121, 124, shape, generator=generator).to(torch.uint8)

    return {
        "w13": codes(num_experts, 2 * intermediate, hidden // 2),
        "w13_scale": scales(num_experts, 2 * intermediate, hidden // 32),
        "w2": codes(num_experts, hidden, intermediate // 2),
        "w2_scale": scales(num_experts, hidden, intermediate // 32),
    }


def _to(device: torch.device, arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


SIZES = ((0, 3, 5, 64), (1, 1, 1 + 1, 64), (37, 3, 5, 96), (130, 8, 16, 160))
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def topk_permute(device: torch.device) -> Iterator[Comparison]:
    for tokens, top_k, num_experts, hidden in SIZES:
        ids, _ = _routing(tokens, top_k, num_experts, 1)
        for dtype in FLOATS:
            for rows in (None, tokens * top_k // 2):
                x = _rows(tokens, 2 * hidden, dtype, 2)[:, ::2]
                actual = moe_ops.topk_permute(x.to(device), ids.to(device), num_experts, num_out_tokens=rows)
                expected = reference.topk_permute(x, ids, num_experts, num_out_tokens=rows)
                for name, a, e in zip(("rows", "row_map", "counts"), actual, expected, strict=True):
                    yield Comparison(f"{name} [{tokens}, {top_k}] {dtype}", a, e)


def topk_permute_out(device: torch.device) -> Iterator[Comparison]:
    for tokens, top_k, num_experts, hidden in SIZES:
        ids, _ = _routing(tokens, top_k, num_experts, 3)
        x = _rows(tokens, hidden, torch.bfloat16, 4)
        out = torch.full((tokens * top_k + 2, hidden), float("nan"), dtype=x.dtype, device=device)
        row_map, counts = moe_ops.topk_permute_out(x.to(device), ids.to(device), num_experts, out=out)
        expected_out = torch.full_like(out, float("nan"), device="cpu")
        expected_map, expected_counts = reference.topk_permute_out(x, ids, num_experts, out=expected_out)
        yield Comparison(f"row_map [{tokens}, {top_k}]", row_map, expected_map)
        yield Comparison(f"counts [{tokens}, {top_k}]", counts, expected_counts)
        yield Comparison(f"out [{tokens}, {top_k}]", out, expected_out)


def topk_unpermute(device: torch.device) -> Iterator[Comparison]:
    for tokens, top_k, num_experts, hidden in SIZES:
        ids, weights = _routing(tokens, top_k, num_experts, 5)
        for dtype in FLOATS:
            rows = _rows(tokens * top_k, hidden, dtype, 6)
            _, row_map, _ = reference.topk_permute(_rows(tokens, hidden, dtype, 7), ids, num_experts)
            for scale in (None, weights):
                actual = moe_ops.topk_unpermute(
                    rows.to(device), row_map.to(device), None if scale is None else scale.to(device)
                )
                expected = reference.topk_unpermute(rows, row_map, scale)
                yield Comparison(f"[{tokens}, {top_k}] {dtype}", actual, expected, exact=False)


def topk_unpermute_backward(device: torch.device) -> Iterator[Comparison]:
    tokens, top_k, num_experts, hidden = SIZES[2]
    ids, weights = _routing(tokens, top_k, num_experts, 8)
    for dtype in FLOATS:
        rows, grad = _rows(tokens * top_k, hidden, dtype, 9), _rows(tokens, hidden, dtype, 10)
        _, row_map, _ = reference.topk_permute(grad, ids, num_experts)
        actual = torch.ops.moe_ops.topk_unpermute_backward(*(t.to(device) for t in (grad, rows, row_map, weights)))
        expected = reference.topk_unpermute_backward(grad, rows, row_map, weights)
        for name, a, e in zip(("rows", "weights"), actual, expected, strict=True):
            yield Comparison(f"gradient of {name} {dtype}", a, e, exact=False)


def route_metadata(device: torch.device) -> Iterator[Comparison]:
    generator = torch.Generator().manual_seed(11)
    for ranks, num_experts in ((1, 4), (2, 4), (4, 10), (8, 7)):
        counts = torch.randint(0, 9, (ranks, num_experts), generator=generator, dtype=torch.int32)
        for mode in ("push", "pull"):
            for rank in range(ranks):
                actual = moe_ops.route_metadata(counts.to(device), rank, mode=mode)
                expected = reference.route_metadata(counts, rank, mode=mode)
                for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
                    yield Comparison(f"output {index}, {mode}, rank {rank} of {ranks}", a, e)


def ep_remap(device: torch.device) -> Iterator[Comparison]:
    for tokens, top_k, num_experts, _ in SIZES:
        ids, weights = _routing(tokens, top_k, num_experts, 12)
        expert_map = torch.arange(num_experts, dtype=torch.int32).flip(0) - num_experts // 2
        for fill in ("reuse", "skip"):
            first: dict[str, Any] = {
                "expert_offset": num_experts // 2,
                "num_local_experts": num_experts - num_experts // 2,
            }
            for options in (first, {"expert_map": expert_map}):
                actual = moe_ops.ep_remap(ids.to(device), weights.to(device), fill=fill, **_to(device, options))
                expected = reference.ep_remap(ids, weights, fill=fill, **options)
                for name, a, e in zip(("ids", "weights"), actual, expected, strict=True):
                    yield Comparison(f"{name} [{tokens}, {top_k}] {fill} {next(iter(options))}", a, e)


MOE_OPTIONS: tuple[dict[str, Any], ...] = (
    {"w13_layout": "gate_up"},
    {"w13_layout": "up_gate", "swiglu_limit": 1.0},
    {"w13_layout": "interleaved", "activation": "swiglu_oai"},
)


def _moe_cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, all arguments but a dtype) for every size, option set and dtype of the activations."""
    intermediate = 96
    for tokens, top_k, num_experts, hidden in SIZES[:3]:
        for index, options in enumerate(MOE_OPTIONS):
            tensors = _experts(num_experts, hidden, intermediate, 13)
            if index == 2:
                tensors["w13_bias"] = _rows(num_experts, 2 * intermediate, torch.float32, 14)
                tensors["w2_bias"] = _rows(num_experts, hidden, torch.float32, 15)
            ids, weights = _routing(tokens, top_k, num_experts, 16)
            for dtype in FLOATS:
                inputs = {
                    "hidden_states": _rows(tokens, hidden, dtype, 17),
                    "topk_ids": ids,
                    "topk_weights": weights,
                }
                yield f"[{tokens}, {top_k}] {options['w13_layout']} {dtype}", {**inputs, **tensors, **options}


def fused_mxfp4_moe(device: torch.device) -> Iterator[Comparison]:
    for name, arguments in _moe_cases():
        actual = moe_ops.fused_mxfp4_moe(**_to(device, arguments))
        yield Comparison(name, actual, reference.fused_mxfp4_moe(**arguments), exact=False)


def fused_mxfp4_moe_out(device: torch.device) -> Iterator[Comparison]:
    for name, arguments in _moe_cases():
        x = arguments["hidden_states"]
        out = torch.full(x.shape, float("nan"), dtype=torch.float32, device=device)
        moe_ops.fused_mxfp4_moe_out(**_to(device, arguments), out=out)
        expected = reference.fused_mxfp4_moe(**arguments, out_dtype=torch.float32)
        # Half-precision kernels may round the intermediate to the dtype of the activations.
        yield Comparison(name, out.to(x.dtype), expected.to(x.dtype), exact=False)


def fused_mxfp4_moe_backward(device: torch.device) -> Iterator[Comparison]:
    for name, arguments in _moe_cases():
        x = arguments["hidden_states"]
        arguments = {"grad_output": _rows(x.shape[0], x.shape[1], x.dtype, 18), **arguments}
        actual = torch.ops.moe_ops.fused_mxfp4_moe_backward(**_to(device, arguments))
        expected = reference.fused_mxfp4_moe_backward(**arguments)
        for part, a, e in zip(("rows", "weights"), actual, expected, strict=True):
            # Weight gradients are float32 whatever the activations are; both follow the activations' precision.
            yield Comparison(f"gradient of {part} {name}", a.to(x.dtype), e.to(x.dtype), exact=False)


def _engine_cases(device: torch.device, max_deferred: int) -> Iterator[Comparison]:
    """Two layers, the second of which takes the first one's deferred part."""
    from moe_ops.engine import CpuMoeEngine
    from moe_ops.placement import select_deferred_experts

    tokens, top_k, num_experts, hidden = SIZES[2]
    intermediate = 96
    ids, weights = _routing(tokens, top_k, num_experts, 19)
    ids = torch.where(ids < num_experts, ids, -1)
    tensors = _experts(num_experts, hidden, intermediate, 20)
    now, late = select_deferred_experts(ids, weights, max_deferred)
    with CpuMoeEngine(f"check {device} {max_deferred}") as engine:
        experts = engine.add_experts("layer", num_experts, hidden, intermediate, w13_layout="gate_up").load(tensors)
        experts = experts.to(device)
        for dtype in FLOATS:
            x, base = _rows(tokens, hidden, dtype, 21), _rows(tokens, hidden, torch.float32, 22)
            inputs = [t.to(device) for t in (x, ids, weights)]
            ticket, deferred = experts.submit(*inputs, max_deferred=max_deferred)
            first = experts.sync(ticket, base.to(device), out_dtype=dtype)
            ticket, nothing = experts.submit(*inputs)
            second = experts.sync(ticket, base.to(device), deferred_ticket=deferred, out_dtype=dtype)

            def part(which: torch.Tensor, x: torch.Tensor = x) -> torch.Tensor:
                return reference.fused_mxfp4_moe(
                    x, which, weights, **tensors, w13_layout="gate_up", out_dtype=torch.float32
                )

            yield Comparison(f"layer 1 {dtype}", first, (base + part(now)).to(dtype), exact=False)
            yield Comparison(f"layer 2 {dtype}", second, (base + part(ids) + part(late)).to(dtype), exact=False)
            yield Comparison("no deferred ticket", nothing, torch.zeros(1, dtype=torch.int64))
        engine.check()


def cpu_moe_submit(device: torch.device) -> Iterator[Comparison]:
    yield from _engine_cases(device, max_deferred=0)


def cpu_moe_sync(device: torch.device) -> Iterator[Comparison]:
    yield from _engine_cases(device, max_deferred=1)


CASES: dict[str, Callable[[torch.device], Iterator[Comparison]]] = {
    function.__name__: function
    for function in (
        topk_permute,
        topk_permute_out,
        topk_unpermute,
        topk_unpermute_backward,
        route_metadata,
        ep_remap,
        fused_mxfp4_moe,
        fused_mxfp4_moe_out,
        fused_mxfp4_moe_backward,
        cpu_moe_submit,
        cpu_moe_sync,
    )
}
