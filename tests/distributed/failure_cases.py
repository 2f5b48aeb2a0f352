"""Ranks that die, hang or make another call, in the middle of the others' work."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from route_cases import make_spec, prepare

from moe_ops.distributed import ExpertParallelMoE, combine, dispatch, prepare_static_route

BAD_RANK = 1


def fails(how: str, where: str) -> float:
    """Does the whole exchange, except that BAD_RANK fails in the given way; returns seconds until this rank ended."""
    bad = dist.get_rank() == BAD_RANK
    begin = time.monotonic()

    def perhaps_fail(here: str) -> None:
        if bad and here == where:
            if how == "dies":
                os._exit(1)
            if how == "hangs":
                time.sleep(8)
            raise KeyboardInterrupt("left")

    ids = torch.tensor([[0, 3], [1, 2]])
    spec = make_spec(6 if bad and how == "other_experts" else 4, 2)
    with torch.no_grad():
        prepare(ids, spec)
        perhaps_fail("gather")
        route = prepare(ids, spec)
        perhaps_fail("dispatch")
        received = dispatch(route)
        perhaps_fail("combine")
        combine(route, received, received.hidden_states)
    return time.monotonic() - begin


def other_capacity() -> None:
    capacity = 4 + (dist.get_rank() == BAD_RANK)
    prepare_static_route(torch.zeros(2, 4), torch.tensor([[0, 3], [1, 2]]), make_spec(4, 2), capacity)


def other_dtypes(what: str, capacity: int | None) -> None:
    """Ranks whose rows have other sizes, on the way to the experts or back."""
    narrow = torch.bfloat16 if dist.get_rank() == BAD_RANK else torch.float32
    rows = torch.zeros(20, 4, dtype=narrow if what == "hidden_states" else torch.float32)
    layer = ExpertParallelMoE(
        lambda rows, ids, weights: rows,
        4,
        2,
        4,
        group=dist.group.WORLD,
        capacity=capacity,
        combine_dtype=narrow if what == "combine_dtype" else torch.float32,
    )
    layer(rows, torch.tensor([[0, 3]] * 20), torch.ones(20, 2))


def raises_inside_the_experts() -> None:
    """An error of one rank's experts: that rank raises it, and its workspace is free again."""
    bad = dist.get_rank() == BAD_RANK

    def experts(rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if bad:
            raise ZeroDivisionError("in the experts")
        return rows

    layer = ExpertParallelMoE(experts, 4, 2, 4, group=dist.group.WORLD)
    try:
        with torch.no_grad():
            layer(torch.zeros(1, 4), torch.tensor([[0, 3]]), torch.ones(1, 2))
    finally:
        assert not layer._workspace(torch.device("cpu")).claimed
