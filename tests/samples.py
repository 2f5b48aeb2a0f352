"""Sample calls of every public op, one for each branch of its schema: for opcheck, fakes and the tests of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch

import moe_ops
from tests.support import make_experts, make_routing, make_rows


class Sample(NamedTuple):
    op: str
    id: str
    args: tuple[Any, ...]
    options: dict[str, Any]


T, K, E, H, I = 5, 2, 4, 64, 32  # noqa: E741  (the names of the documentation)


def _permute(device: torch.device) -> list[Sample]:
    x, ids = make_rows(T, H, torch.bfloat16).to(device), make_routing(T, K, E, invalid=0.2)[0].to(device)
    ticket = torch.zeros(1, dtype=torch.int64, device=device)
    out = torch.empty(T * K + 3, H, dtype=torch.bfloat16, device=device)
    empty = (x[:0], ids[:0], E)
    return [
        Sample("topk_permute", "plain", (x, ids, E), {}),
        Sample("topk_permute", "int32", (x.float(), ids.to(torch.int32), E), {}),
        Sample("topk_permute", "capacity", (x, ids, E), {"num_out_tokens": 7}),
        Sample("topk_permute", "after", (x, ids, E), {"after": ticket}),
        Sample("topk_permute", "strided", (x.t().contiguous().t(), ids.t().contiguous().t(), E), {}),
        Sample("topk_permute", "no-tokens", empty, {}),
        Sample("topk_permute_out", "plain", (x, ids, E), {"out": out}),
    ]


def _unpermute(device: torch.device) -> list[Sample]:
    rows = make_rows(T * K, H, torch.bfloat16).to(device)
    grad = make_rows(T, H, torch.bfloat16, seed=1).to(device)
    row_map = torch.randperm(T * K, generator=torch.Generator().manual_seed(0)).to(torch.int32).view(T, K).to(device)
    row_map[1, 0] = -1
    weights = make_routing(T, K, E)[1].to(device)
    return [
        Sample("topk_unpermute", "plain", (rows, row_map), {}),
        Sample("topk_unpermute", "weights", (rows, row_map, weights), {}),
        Sample("topk_unpermute", "no-tokens", (rows[:0], row_map[:0], weights[:0]), {}),
        Sample("topk_unpermute_backward", "plain", (grad, rows, row_map), {}),
        Sample("topk_unpermute_backward", "weights", (grad, rows, row_map, weights), {}),
    ]


def _metadata(device: torch.device) -> list[Sample]:
    counts = torch.tensor([[2, 1, 1, 2, 3], [1, 0, 1, 2, 0]], dtype=torch.int32, device=device)
    return [
        Sample("route_metadata", "push", (counts, 1), {}),
        Sample("route_metadata", "pull", (counts, 0), {"mode": "pull"}),
    ]


def _remap(device: torch.device) -> list[Sample]:
    ids, weights = (tensor.to(device) for tensor in make_routing(T, K, E, invalid=0.2))
    table = torch.tensor([1, -1, 0, -1], dtype=torch.int32, device=device)
    ranged = {"expert_offset": 1, "num_local_experts": 2}
    return [
        Sample("ep_remap", "range", (ids, weights), ranged),
        Sample("ep_remap", "range-skip", (ids.to(torch.int32), weights.bfloat16()), {**ranged, "fill": "skip"}),
        Sample("ep_remap", "map", (ids, weights), {"expert_map": table}),
        Sample("ep_remap", "map-skip", (ids, weights), {"expert_map": table, "fill": "skip"}),
    ]


def _moe(device: torch.device) -> list[Sample]:
    x = make_rows(T, H, torch.bfloat16).to(device)
    ids, weights = (tensor.to(device) for tensor in make_routing(T, K, E, invalid=0.2))
    experts = [tensor.to(device) for tensor in make_experts(E, I, H).values()]
    args = (x, ids, weights, *experts)
    full = {
        "w13_layout": "interleaved",
        "w13_bias": torch.randn(E, 2 * I).to(device),
        "w2_bias": torch.randn(E, H).to(device),
        "activation": "swiglu_oai",
        "swiglu_limit": 3.0,
        "swiglu_alpha": 1.5,
        "expert_map": torch.tensor([1, -1, 0, 2, 3], dtype=torch.int32, device=device),
    }
    ticket = torch.zeros(1, dtype=torch.int64, device=device)
    extra = {"batch_invariant": True, "weight_layout": "checkpoint", "after": ticket}
    out = torch.empty(T, H, dtype=torch.float32, device=device)
    grad = make_rows(T, H, torch.bfloat16, seed=3).to(device)
    return [
        Sample("fused_mxfp4_moe", "plain", args, {"w13_layout": "gate_up"}),
        Sample("fused_mxfp4_moe", "full", args, {**full, **extra, "out_dtype": torch.float32}),
        Sample("fused_mxfp4_moe", "float32", (x.float(), *args[1:]), {"w13_layout": "up_gate"}),
        Sample("fused_mxfp4_moe", "no-tokens", (x[:0], ids[:0], weights[:0], *experts), {"w13_layout": "gate_up"}),
        Sample("fused_mxfp4_moe_out", "full", args, {**full, **extra, "out": out}),
        Sample("fused_mxfp4_moe_backward", "plain", (grad, *args), {"w13_layout": "gate_up"}),
        Sample("fused_mxfp4_moe_backward", "full", (grad.float(), *args), {**full, "weight_layout": "checkpoint"}),
    ]


_engines: list[moe_ops.CpuMoeEngine] = []
_users = 0


@contextmanager
def repeatable_tickets() -> Iterator[None]:
    """Inside, tickets of the sample calls are constants, so that opcheck can call the ops several times and compare.

    Not at other times: as long as an engine of the process has such tickets, those of CUDA streams come from the host.
    """
    global _users
    _users += 1
    _set_repeatable()
    try:
        yield
    finally:
        for engine in _engines:
            if not engine.name.startswith("samples-cpu"):
                torch.accelerator.synchronize()
            engine.wait_idle()
        _users -= 1
        _set_repeatable()


def _set_repeatable() -> None:
    for engine in _engines:
        torch.ops.moe_ops._engine_set_repeatable(engine._id, _users > 0)


@cache
def _cpu_experts(device: torch.device, name: str) -> moe_ops.CpuExperts:
    engine = moe_ops.CpuMoeEngine(f"samples-{device.type}-{name}")
    experts = engine.add_experts("layer", E, H, I, w13_layout="gate_up").load(make_experts(E, I, H)).to(device)
    _engines.append(engine)
    _set_repeatable()
    return experts


def _cpu_moe(device: torch.device) -> list[Sample]:
    experts = _cpu_experts(device, "submit")
    x = make_rows(T, H, torch.bfloat16).to(device)
    ids, weights = (tensor.to(device) for tensor in make_routing(T, K, E, invalid=0.2))
    ticket, deferred_ticket = _cpu_experts(device, "sync").submit(x, ids, weights, max_deferred=1)
    device_out = make_rows(T, H, torch.bfloat16, seed=4).to(device)
    both = {"deferred_ticket": deferred_ticket, "out_dtype": torch.float32}
    args = (x, ids, weights, experts.handle)
    return [
        Sample("cpu_moe_submit", "plain", args, {"max_deferred": 0}),
        Sample(
            "cpu_moe_submit", "deferred", (x.float(), ids.int(), weights.half(), experts.handle), {"max_deferred": 1}
        ),
        Sample("cpu_moe_submit", "no-tokens", (x[:0], ids[:0], weights[:0], experts.handle), {}),
        Sample("cpu_moe_sync", "plain", (ticket, device_out), {}),
        Sample("cpu_moe_sync", "deferred", (ticket, device_out), both),
    ]


# Filled by the rooms that need more than tensors (the CPU engine).
MAKERS: list[Callable[[torch.device], list[Sample]]] = [_permute, _unpermute, _metadata, _remap, _moe, _cpu_moe]


def samples(device: torch.device) -> list[Sample]:
    with repeatable_tickets():
        return [sample for make in MAKERS for sample in make(device)]
