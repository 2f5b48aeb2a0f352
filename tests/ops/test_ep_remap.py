from __future__ import annotations

import pytest
import torch

from moe_ops import reference
from tests.support import assert_same, generator

NAN = float("nan")


def remap(ops, device, ids, weights, **options):
    local, local_weights = ops.ep_remap(
        torch.tensor(ids, device=device), torch.tensor(weights, device=device), **options
    )
    assert local.dtype == torch.int32
    assert local_weights.dtype == torch.float32
    return local.tolist(), local_weights.tolist()


@pytest.mark.parametrize(
    ("ids", "weights", "offset", "count", "expected_ids", "expected_weights"),
    [
        (
            [[5, 1, 7], [0, 2, 3], [-1, -1, -1], [6, 6, 4]],
            [[0.5, 0.25, 0.125], [0.5, 0.25, 0.25], [1.0, 1.0, 1.0], [0.25, 0.25, 0.5]],
            4,
            4,
            [[1, 1, 3], [0, 0, 0], [0, 0, 0], [2, 2, 0]],
            [[0.5, 0.0, 0.125], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.25, 0.25, 0.5]],
        ),
        ([[5, 1], [0, 2]], [[0.5, 1.0], [1.0, 1.0]], 4, 4, [[1, 1], [1, 1]], [[0.5, 0.0], [0.0, 0.0]]),
        ([[0, 1], [-1, 2]], [[1.0, 1.0], [1.0, 1.0]], 4, 4, [[0, 0], [0, 0]], [[0.0, 0.0], [0.0, 0.0]]),
        ([[2, 0], [-1, -1]], [[0.75, 0.25], [1.0, 1.0]], 0, 4, [[2, 0], [0, 0]], [[0.75, 0.25], [0.0, 0.0]]),
        ([[8, 4]], [[1.0, 0.5]], 4, 4, [[0, 0]], [[0.0, 0.5]]),
    ],
)
def test_worked_examples(ops, device, ids, weights, offset, count, expected_ids, expected_weights):
    actual = remap(ops, device, ids, weights, expert_offset=offset, num_local_experts=count)
    assert actual == (expected_ids, expected_weights)


def test_skip_marks_foreign_slots(ops, device):
    ids, weights = [[5, 1, 7], [0, -1, 3]], [[0.5, 0.25, 0.125], [1.0, 1.0, 1.0]]
    actual = remap(ops, device, ids, weights, expert_offset=4, num_local_experts=4, fill="skip")
    assert actual == ([[1, -1, 3], [-1, -1, -1]], [[0.5, 0.0, 0.125], [0.0, 0.0, 0.0]])


def test_expert_map(ops, device):
    table = torch.tensor([2, -1, 0, -1, 1], dtype=torch.int32, device=device)
    ids, weights = [[0, 1], [3, 9], [4, 2]], [[0.5, 0.25], [1.0, 1.0], [0.125, 2.0]]
    assert remap(ops, device, ids, weights, expert_map=table) == (
        [[2, 2], [0, 0], [1, 0]],
        [[0.5, 0.0], [0.0, 0.0], [0.125, 2.0]],
    )
    assert remap(ops, device, ids, weights, expert_map=table, fill="skip")[0] == [[2, -1], [-1, -1], [1, 0]]


@pytest.mark.parametrize("fill", ["reuse", "skip"])
@pytest.mark.parametrize("tokens", [1, 5, 37, 130, 3000])
@pytest.mark.parametrize(("offset", "count"), [(0, 32), (16, 16), (40, 8), (0, 0)])
def test_matches_reference(ops, device, tokens, offset, count, fill):
    g = generator(tokens + offset)
    ids = torch.randint(-1, 48, (tokens, 6), generator=g)
    weights = torch.randn(tokens, 6, generator=g)
    table = torch.full((48,), -1, dtype=torch.int32)
    table[offset : offset + count] = torch.randperm(count, generator=g).to(torch.int32)
    ranged = {"expert_offset": offset, "num_local_experts": count}
    padded = torch.zeros(tokens, 9, dtype=torch.int32)
    padded[:, :6] = ids
    layouts = [
        (ids, weights),
        (ids.to(torch.int32), weights.t().contiguous().t()),
        (padded[:, :6], weights.double()),
        (ids.t().contiguous().t(), weights.to(torch.bfloat16)),
    ]
    for some_ids, some_weights in layouts:
        for options in (ranged, {"expert_map": table}):
            placed = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
            if some_weights.dtype == torch.float64 and device.type != "cpu":
                some_weights = some_weights.float()
            actual = ops.ep_remap(some_ids.to(device), some_weights.to(device), fill=fill, **placed)
            expected = reference.ep_remap(some_ids, some_weights, fill=fill, **options)
            assert_same(actual[0], expected[0], "local_ids")
            assert_same(actual[1], expected[1], "local_weights")


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "shape", [(1, 8), (64, 8), (512, 8), (513, 8), (1024, 4), (1025, 4), (300, 6), (70, 16), (128, 32), (9, 40)]
)
def test_rows_of_neighbouring_slots(ops, device, shape, id_dtype):
    """Kernels may read several slots at once, where the address allows it. Batches on both sides of 4,096 slots."""
    g = generator(shape[0])
    ids = torch.randint(-1, 64, shape, generator=g).to(id_dtype)
    weights = torch.randn(shape, generator=g)
    moved = torch.empty(ids.numel() + 1, dtype=id_dtype, device=device)[1:].view(shape)
    moved.copy_(ids)
    for fill in ("reuse", "skip"):
        options = {"expert_offset": 24, "num_local_experts": 6, "fill": fill}
        expected = reference.ep_remap(ids, weights, **options)
        for placed in (ids.to(device), moved):
            actual = ops.ep_remap(placed, weights.to(device), **options)
            assert_same(actual[0], expected[0], "local_ids")
            assert_same(actual[1], expected[1], "local_weights")


def test_ids_past_int32(ops, device):
    ids = [[2**32 + 5, 5], [2**62, -(2**62)], [2**63 - 1, -(2**63)]]
    actual = remap(ops, device, ids, [[1.0, 2.0]] * 3, expert_offset=4, num_local_experts=4, fill="skip")
    assert actual == ([[-1, 1], [-1, -1], [-1, -1]], [[0.0, 2.0], [0.0, 0.0], [0.0, 0.0]])


def test_foreign_weights_are_replaced_not_multiplied(ops, device):
    local, weights = remap(
        ops, device, [[0, 5], [5, 1]], [[NAN, 0.5], [NAN, float("inf")]], expert_offset=4, num_local_experts=4
    )
    assert local == [[1, 1], [1, 1]]
    assert weights[0] == [0.0, 0.5]
    assert weights[1][0] != weights[1][0]  # the local slot's NaN stays
    assert weights[1][1] == 0.0


def test_no_tokens(ops, device):
    ids, weights = torch.empty(0, 4, dtype=torch.int64, device=device), torch.empty(0, 4, device=device)
    local, local_weights = ops.ep_remap(ids, weights, expert_offset=0, num_local_experts=4)
    assert local.shape == local_weights.shape == (0, 4)


def test_inputs_are_not_written(ops, device):
    ids, weights = torch.tensor([[0, 9]], device=device), torch.tensor([[0.5, 0.25]], device=device)
    ops.ep_remap(ids, weights, expert_offset=4, num_local_experts=4)
    assert ids.tolist() == [[0, 9]]
    assert weights.tolist() == [[0.5, 0.25]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"expert_offset": 1},
            "expert_offset must be given together with num_local_experts, or expert_map alone, "
            "got expert_offset=1, num_local_experts=None, expert_map=None",
        ),
        ({"expert_offset": 1, "num_local_experts": -1}, "num_local_experts must be at least 0, got -1"),
        ({"expert_offset": -1, "num_local_experts": 4}, "expert_offset must be at least 0, got -1"),
        (
            {"expert_offset": 0, "num_local_experts": 2**31},
            "num_local_experts must be at most 2147483647, got 2147483648",
        ),
        ({"expert_offset": 1, "num_local_experts": 1, "fill": "x"}, "fill must be 'reuse' or 'skip', got 'x'"),
    ],
)
def test_errors(ops, device, backend, options, message):
    if backend == "reference":
        pytest.skip("the reference does not check arguments")
    ids, weights = torch.zeros(2, 2, dtype=torch.int64, device=device), torch.zeros(2, 2, device=device)
    with pytest.raises(ValueError) as raised:
        ops.ep_remap(ids, weights, **options)
    assert str(raised.value) == "ep_remap: " + message


def test_swapped_arguments_are_named(ops, device, backend):
    if backend == "reference":
        pytest.skip("the reference does not check arguments")
    ids, weights = torch.zeros(2, 2, dtype=torch.int64, device=device), torch.zeros(2, 2, device=device)
    with pytest.raises(ValueError, match="topk_ids and topk_weights are swapped"):
        ops.ep_remap(weights, ids, expert_offset=0, num_local_experts=1)


@pytest.mark.parametrize("top_k", [4, 8, 16, 32])
@pytest.mark.parametrize("tokens", [1, 9, 33, 200])
@pytest.mark.parametrize("by_map", [False, True])
def test_ids_at_the_limits_of_their_type(ops, device, top_k, tokens, by_map):
    """Dense rows of ids that wrap around in 32 bits."""
    for dtype, odd in (
        (torch.int32, [-(2**31), 2**31 - 1, -1, 5, 12]),
        (torch.int64, [2**32 + 6, -(2**63), 2**63 - 1, -(2**32) + 6, 2**31 + 6, 5, 12]),
    ):
        ids = torch.tensor(odd, dtype=dtype).repeat(tokens * top_k)[: tokens * top_k].view(tokens, top_k)
        ids[tokens // 2] = odd[0]  # a row without a local expert
        weights = torch.rand(tokens, top_k, generator=generator(3)) + 0.5
        where = {"expert_offset": 5, "num_local_experts": 2**31 - 7}
        if by_map:
            where = {"expert_map": torch.arange(13, dtype=torch.int32).flip(0) - 3}
        moved = {name: value.to(device) if by_map else value for name, value in where.items()}
        for fill in ("reuse", "skip"):
            actual = ops.ep_remap(ids.to(device), weights.to(device), **moved, fill=fill)
            for got, wanted in zip(actual, reference.ep_remap(ids, weights, **where, fill=fill), strict=True):
                assert_same(got, wanted)
