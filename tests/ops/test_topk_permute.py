from __future__ import annotations

import pytest
import torch

from moe_ops import reference
from tests.support import FLOATS, assert_same, make_routing, make_rows


def test_by_hand(ops, device):
    x = torch.arange(3, dtype=torch.float32, device=device)[:, None].repeat(1, 4)
    ids = torch.tensor([[0, 3], [2, 0], [1, 3]], device=device)
    permuted, row_map, counts = ops.topk_permute(x, ids, 4)
    assert permuted[:, 0].tolist() == [0, 1, 2, 1, 0, 2]
    assert row_map.tolist() == [[0, 4], [3, 1], [2, 5]]
    assert counts.tolist() == [2, 1, 1, 2]
    assert row_map.dtype == counts.dtype == torch.int32


@pytest.mark.parametrize(
    ("ids", "rows", "expected_map", "expected_counts"),
    [
        ([[-1], [1], [0]], [2, 1, None], [[-1], [1], [0]], [1, 1]),  # first slot dropped
        ([[0], [1], [-1]], [0, 1, None], [[0], [1], [-1]], [1, 1]),  # last slot dropped
        ([[-1], [-1], [2]], [None, None, None], [[-1], [-1], [-1]], [0, 0]),  # none left; an id equal to E
        ([[1, 1], [-1, 0], [7, 1]], [1, 0, 0, 2, None, None], [[1, 2], [-1, 0], [-1, 3]], [1, 3]),
    ],
)
def test_ids_outside_the_experts_by_hand(ops, device, ids, rows, expected_map, expected_counts):
    x = torch.arange(1, 4, dtype=torch.float32, device=device)[:, None].repeat(1, 8)
    topk_ids = torch.tensor(ids, device=device)
    permuted, row_map, counts = ops.topk_permute(x, topk_ids, 2)
    assert row_map.tolist() == expected_map
    assert counts.tolist() == expected_counts
    assert permuted[:, 0].tolist() == [0.0 if token is None else token + 1.0 for token in rows]
    assert topk_ids.tolist() == ids


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("tokens", "top_k", "experts", "hidden"), [(1, 1, 1, 8), (37, 3, 5, 33), (130, 8, 64, 96)])
def test_matches_reference(ops, device, dtype, id_dtype, tokens, top_k, experts, hidden):
    x = make_rows(tokens, hidden, dtype).to(device)
    ids = make_routing(tokens, top_k, experts, invalid=0.2)[0].to(id_dtype).to(device)
    for actual, expected in zip(
        ops.topk_permute(x, ids, experts), reference.topk_permute(x.cpu(), ids.cpu(), experts), strict=True
    ):
        assert_same(actual, expected)


@pytest.mark.parametrize("rows", [0, 1, 50, 111, 150])
def test_capacity(ops, device, rows):
    x, (ids, _) = make_rows(37, 16, torch.float32).to(device), make_routing(37, 3, 5)
    permuted, row_map, counts = ops.topk_permute(x, ids.to(device), 5, num_out_tokens=rows)
    for actual, expected in zip(
        (permuted, row_map, counts), reference.topk_permute(x.cpu(), ids, 5, num_out_tokens=rows), strict=True
    ):
        assert_same(actual, expected)
    assert permuted.shape[0] == rows
    assert int(counts.sum()) == 111  # counted before dropping
    assert int((row_map < 0).sum()) == max(0, 111 - rows)


def test_no_tokens(ops, device):
    permuted, row_map, counts = ops.topk_permute(
        torch.empty(0, 16, device=device), torch.empty(0, 4, dtype=torch.int32, device=device), 3
    )
    assert permuted.shape == (0, 16)
    assert row_map.shape == (0, 4)
    assert counts.tolist() == [0, 0, 0]


def test_strided_inputs(ops, device):
    wide = make_rows(20, 64, torch.float32).to(device)
    ids = make_routing(20, 4, 6)[0].to(device)
    expected = reference.topk_permute(wide[:, ::2].cpu(), ids.cpu(), 6)
    for strided in (wide[:, ::2], wide[:, ::2].t().contiguous().t()):
        for actual, wanted in zip(ops.topk_permute(strided, ids.t().contiguous().t(), 6), expected, strict=True):
            assert_same(actual, wanted)


def test_rows_without_an_expert_do_not_touch_the_others(ops, device):
    x = make_rows(12, 32, torch.bfloat16)
    ids = make_routing(12, 2, 4)[0]
    ids[3] = ids[7] = -1
    dirty = x.clone()
    dirty[3], dirty[7] = float("nan"), float("inf")
    clean, _, _ = ops.topk_permute(x.to(device), ids.to(device), 4)
    permuted, _, _ = ops.topk_permute(dirty.to(device), ids.to(device), 4)
    assert_same(permuted, clean.cpu())


def test_extreme_ids(ops, device):
    ids = torch.tensor([[2**62, -(2**62)], [2**32, 1], [2**32 + 1, 0]], device=device)
    _, row_map, counts = ops.topk_permute(torch.ones(3, 8, device=device), ids, 2)
    assert row_map.tolist() == [[-1, -1], [-1, 1], [-1, 0]]
    assert counts.tolist() == [1, 1]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("extra", [0, 5])
def test_out_variant(ops, device, dtype, extra):
    x, (ids, _) = make_rows(19, 40, dtype).to(device), make_routing(19, 3, 7, invalid=0.3)
    out = torch.full((19 * 3 + extra, 40), float("nan"), dtype=dtype, device=device)
    address = out.data_ptr()
    row_map, counts = ops.topk_permute_out(x, ids.to(device), 7, out=out)
    expected = reference.topk_permute(x.cpu(), ids, 7, num_out_tokens=out.shape[0])
    for actual, wanted in zip((out, row_map, counts), expected, strict=True):
        assert_same(actual, wanted)
    assert out.data_ptr() == address


def test_out_variant_errors(ops, device, backend):
    if backend == "reference":
        pytest.skip("the reference does not check arguments")
    x, ids = torch.randn(4, 8, device=device), torch.zeros(4, 2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"out must be a contiguous \[at least 8, 8\] float32, got \[7, 8\] float32"):
        ops.topk_permute_out(x, ids, 3, out=torch.empty(7, 8, device=device))
    shared = torch.randn(8, 8, device=device)
    with pytest.raises(ValueError, match="out must be memory of its own, apart from hidden_states"):
        ops.topk_permute_out(shared[:4], ids, 3, out=shared)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: (torch.zeros(2, 3, 4, device=d), torch.zeros(2, 1, dtype=torch.int32, device=d), 2),
         r"topk_permute: hidden_states must be \[num_tokens, hidden_size\] bfloat16, float16 or float32, "
         r"got \[2, 3, 4\] float32"),
        (lambda d: (torch.zeros(2, 4, device=d), torch.zeros(3, 1, dtype=torch.int32, device=d), 2),
         r"topk_permute: topk_ids must be \[2, top_k\] int32 or int64, got \[3, 1\] int32"),
        (lambda d: (torch.zeros(2, 4, device=d), torch.zeros(2, dtype=torch.int64, device=d), 2),
         r"topk_permute: topk_ids must be \[2, top_k\] int32 or int64, got \[2\] int64"),
        (lambda d: (torch.zeros(2, 4, device=d), torch.zeros(2, 1, dtype=torch.int16, device=d), 2),
         r"topk_permute: topk_ids must be \[2, top_k\] int32 or int64, got \[2, 1\] int16"),
        (lambda d: (torch.zeros(2, 4, device=d), torch.zeros(2, 1, dtype=torch.int32, device=d), 0),
         r"topk_permute: num_experts must be a positive number of experts, got 0"),
    ],
)  # fmt: skip
def test_errors(ops, device, backend, make, message):
    if backend == "reference":
        pytest.skip("the reference does not check arguments")
    with pytest.raises(ValueError, match="^" + message + "$"):
        ops.topk_permute(*make(device))


def test_refuses_unsigned_ids(ops, device, backend):
    if backend in ("reference", "npu"):
        pytest.skip("needs uint32 tensors and argument checks")
    ids = torch.zeros(2, 1, dtype=torch.uint32, device=device)
    with pytest.raises(ValueError, match=r"topk_ids must be \[2, top_k\] int32 or int64, got \[2, 1\] uint32"):
        ops.topk_permute(torch.zeros(2, 4, device=device), ids, 2)
