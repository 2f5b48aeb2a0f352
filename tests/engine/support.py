"""Makers of the engine's tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import moe_ops
from moe_ops import reference
from tests.support import make_experts, make_routing, make_rows

E, K, H, I = 6, 3, 64, 32  # noqa: E741  (the names of the documentation)
_numbers = itertools.count()


def unused_name() -> str:
    return f"test-{next(_numbers)}"


@contextmanager
def new_engine(**options) -> Iterator[moe_ops.CpuMoeEngine]:
    with moe_ops.CpuMoeEngine(unused_name(), **{"threads": 2, **options}) as engine:
        yield engine


def add_layer(
    engine: moe_ops.CpuMoeEngine,
    name: str = "layer",
    *,
    experts: int = E,
    hidden: int = H,
    inter: int = I,
    seed: int = 0,
) -> moe_ops.CpuExperts:
    layer = engine.add_experts(name, experts, hidden, inter, w13_layout="gate_up")
    return layer.load(make_experts(experts, inter, hidden, seed))


def make_batch(tokens: int, *, hidden: int = H, experts: int = E, top_k: int = K, seed: int = 0, dtype=torch.float32):
    """(hidden_states, topk_ids, topk_weights) with some ids that name no expert."""
    ids, weights = make_routing(tokens, top_k, experts, seed, invalid=0.2)
    return make_rows(tokens, hidden, dtype, seed), ids, weights


def expected(layer: moe_ops.CpuExperts, batch, device_out: torch.Tensor | None = None) -> torch.Tensor:
    """device_out + all experts, by the reference, in float32."""
    out = torch.zeros(batch[0].shape) if device_out is None else device_out
    ticket, _ = reference.cpu_moe_submit(*batch, layer.handle.cpu())
    return reference.cpu_moe_sync(ticket, out, out_dtype=torch.float32)
