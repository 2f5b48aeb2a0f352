from __future__ import annotations

import pytest
import torch

from moe_ops import reference
from tests.support import FLOATS, assert_close, assert_same, make_routing, make_rows


def test_by_hand(ops, device):
    permuted = torch.tensor([[1.0], [10.0], [100.0], [1000.0]], device=device).repeat(1, 8)
    row_map = torch.tensor([[0, 3], [2, -1], [-1, -1], [1, 1]], dtype=torch.int32, device=device)
    weights = torch.tensor([[0.5, 2.0], [3.0, 9.0], [1.0, 1.0], [1.0, 0.25]], device=device)
    assert ops.topk_unpermute(permuted, row_map, weights)[:, 0].tolist() == [2000.5, 300.0, 0.0, 12.5]
    assert ops.topk_unpermute(permuted, row_map)[:, 0].tolist() == [1001.0, 100.0, 0.0, 20.0]


def test_inverts_permute(ops, device):
    x, (ids, _) = make_rows(41, 24, torch.float32).to(device), make_routing(41, 4, 9)
    permuted, row_map, _ = ops.topk_permute(x, ids.to(device), 9)
    quarter = torch.full((41, 4), 0.25, device=device)
    assert_same(ops.topk_unpermute(permuted, row_map, quarter), x.cpu())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("tokens", "top_k", "experts", "hidden"), [(1, 1, 1, 8), (37, 3, 5, 33), (65, 8, 64, 96)])
def test_matches_reference(ops, device, dtype, weighted, tokens, top_k, experts, hidden):
    ids, routing = make_routing(tokens, top_k, experts, invalid=0.2)
    _, row_map, _ = reference.topk_permute(make_rows(tokens, hidden, dtype), ids, experts)
    rows = make_rows(tokens * top_k, hidden, dtype, seed=1)
    weights = routing if weighted else None
    actual = ops.topk_unpermute(rows.to(device), row_map.to(device), weights.to(device) if weighted else None)
    expected = reference.topk_unpermute(rows, row_map, weights)
    step = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert actual.dtype == dtype
    assert_close(actual, expected, max_tol=step, rms_tol=step / 4)  # an fma may move a rounding by one last place


def test_sum_is_float32_and_rounded_once(ops, device):
    # In bfloat16 256 + 1 is 256: a sum kept in bfloat16 never grows.
    rows = torch.tensor([[256.0], [1.0], [1.0], [1.0], [1.0]], dtype=torch.bfloat16, device=device).repeat(1, 16)
    row_map = torch.arange(5, dtype=torch.int32, device=device)[None]
    assert ops.topk_unpermute(rows, row_map)[0, 0].item() == 260.0


def test_weights_stay_float32(ops, device):
    rows = torch.ones(1, 16, dtype=torch.float32, device=device)
    row_map = torch.zeros(1, 1, dtype=torch.int32, device=device)
    weight = torch.tensor([[1.0009765625]], device=device)  # not a bfloat16
    assert ops.topk_unpermute(rows, row_map, weight)[0, 0].item() == 1.0009765625


def test_rows_past_the_end_are_not_read(ops, device):
    rows = torch.ones(4, 16, device=device)
    row_map = torch.tensor([[0, 4], [2**31 - 1, -(2**31)], [3, -1]], dtype=torch.int32, device=device)
    assert ops.topk_unpermute(rows, row_map)[:, 0].tolist() == [1.0, 0.0, 1.0]


def test_unused_rows_and_zero_weights_are_selected_away(ops, device):
    rows = torch.ones(4, 16, dtype=torch.bfloat16, device=device)
    rows[1], rows[3] = float("nan"), float("inf")
    row_map = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device=device)
    weights = torch.tensor([[2.0, 0.0], [3.0, 0.0]], device=device)
    assert ops.topk_unpermute(rows, row_map, weights)[:, 5].tolist() == [2.0, 3.0]
    dropped = torch.tensor([[0, -1], [2, -1]], dtype=torch.int32, device=device)
    stale = torch.tensor([[2.0, float("nan")], [3.0, float("inf")]], device=device)
    assert ops.topk_unpermute(rows, dropped, stale)[:, 5].tolist() == [2.0, 3.0]


def test_no_tokens_and_no_rows(ops, device):
    empty = ops.topk_unpermute(torch.empty(0, 16, device=device), torch.empty(0, 2, dtype=torch.int32, device=device))
    assert empty.shape == (0, 16)
    zeros = ops.topk_unpermute(
        torch.empty(0, 16, device=device), torch.full((3, 2), -1, dtype=torch.int32, device=device)
    )
    assert zeros.tolist() == [[0.0] * 16] * 3


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("weighted", [True, False])
def test_backward_matches_reference(ops, device, dtype, weighted):
    ids, routing = make_routing(29, 3, 6, invalid=0.3)
    _, row_map, _ = reference.topk_permute(make_rows(29, 40, dtype), ids, 6)
    rows, grad = make_rows(87, 40, dtype, seed=1), make_rows(29, 40, dtype, seed=2)
    routing[4, 0] = 0.0
    weights = routing if weighted else None
    actual = ops.topk_unpermute_backward(
        grad.to(device), rows.to(device), row_map.to(device), weights.to(device) if weighted else None
    )
    expected = reference.topk_unpermute_backward(grad, rows, row_map, weights)
    assert_same(actual[0], expected[0], "grad_permuted_hidden_states")
    assert actual[1].shape == ((29, 3) if weighted else (0,))
    assert_close(actual[1], expected[1], max_tol=1e-5, rms_tol=1e-6, name="grad_topk_weights")


def test_backward_of_rows_without_a_slot_is_zero(ops, device):
    row_map = torch.tensor([[0, -1]], dtype=torch.int32, device=device)
    rows = torch.full((3, 16), float("nan"), device=device)
    rows[0] = 1.0
    grad_rows, grad_weights = ops.topk_unpermute_backward(
        torch.ones(1, 16, device=device), rows, row_map, torch.tensor([[2.0, float("nan")]], device=device)
    )
    assert grad_rows[:, 0].tolist() == [2.0, 0.0, 0.0]
    assert grad_weights.tolist() == [[16.0, 0.0]]


def test_backward_refuses_a_row_that_is_named_twice(ops, device, backend):
    """Two slots would write its gradient. Devices do not read the map on the host."""
    if backend not in ("cpu", "reference"):
        pytest.skip("the host reads the map on the CPU")
    rows, grad = make_rows(3, 4, torch.float32), make_rows(2, 4, torch.float32)
    row_map = torch.tensor([[0, 1], [-1, 1]], dtype=torch.int32)
    with pytest.raises(
        ValueError, match="topk_unpermute_backward: row_map must be a map to different rows, got row 1 twice"
    ):
        ops.topk_unpermute_backward(grad, rows, row_map, None)


def test_errors(ops, device, backend):
    if backend == "reference":
        pytest.skip("the reference does not check arguments")
    rows, row_map = torch.zeros(4, 8, device=device), torch.zeros(2, 2, dtype=torch.int32, device=device)
    with pytest.raises(
        ValueError, match=r"^topk_unpermute: row_map must be \[num_tokens, top_k\] int32, got \[2, 2\] int64$"
    ):
        ops.topk_unpermute(rows, row_map.to(torch.int64))
    with pytest.raises(
        ValueError, match=r"^topk_unpermute: topk_weights must be \[2, 2\] float, got \[2, 3\] float32$"
    ):
        ops.topk_unpermute(rows, row_map, torch.zeros(2, 3, device=device))
    with pytest.raises(
        ValueError, match=r"topk_unpermute_backward: grad_output must be \[2, 8\] float32, got \[2, 8\] float16"
    ):
        ops.topk_unpermute_backward(torch.zeros(2, 8, device=device).half(), rows, row_map)
