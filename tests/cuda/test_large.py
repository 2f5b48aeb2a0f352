"""Buffers past 2^31 elements and batches of every size of the map."""

from __future__ import annotations

import pytest
import torch

from moe_ops import reference
from moe_ops.triton._permutation_map import permutation_map
from tests.support import assert_same, make_routing

CUDA = torch.device("cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.unpoisoned]


# On both sides of every change of the native map's form; 60,000 experts are for the Triton kernels.
MAPS = [
    (slots, experts)
    for slots in [(1, 1), (64, 8), (65, 8), (512, 8), (1024, 8), (1025, 8), (2048, 8), (4001, 3), (4001, 8), (40000, 8)]
    for experts in (1, 3, 128, 256, 384, 1400, 60_000)
    if experts < 60_000 or slots in [(1, 1), (1024, 8), (4001, 8)]
]


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("slots", "experts"), MAPS)
def test_map_of_every_size(slots, experts, id_dtype):
    """One block, several, several with a scan between; counters of many experts; Triton past shared memory."""
    tokens, top_k = slots
    g = torch.Generator().manual_seed(tokens + experts)
    ids = torch.randint(-2, experts + 2, (tokens, top_k), generator=g).to(id_dtype)
    x = torch.arange(tokens, dtype=torch.float32)[:, None].repeat(1, 4)
    actual = torch.ops.moe_ops.topk_permute(x.to(CUDA), ids.to(CUDA), experts)
    for value, expected in zip(actual, reference.topk_permute(x, ids, experts), strict=True):
        assert_same(value, expected)


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [65, 512, 700])
def test_map_of_ids_at_any_address(tokens, id_dtype):
    """Ids that are read in vectors elsewhere."""
    ids = torch.randint(-1, 200, (tokens, 8), generator=torch.Generator().manual_seed(tokens)).to(id_dtype)
    moved = torch.empty(tokens * 8 + 1, dtype=id_dtype, device=CUDA)[1:].view(tokens, 8)
    moved.copy_(ids)
    x = torch.zeros(tokens, 4)
    actual = torch.ops.moe_ops.topk_permute(x.to(CUDA), moved, 200)
    for value, expected in zip(actual, reference.topk_permute(x, ids, 200), strict=True):
        assert_same(value, expected)


# Bulk copies of one and of several pieces of a row, and what they leave to threads: few tokens, short rows, many slots.
ROWS = [(1023, 8, 4096), (1024, 8, 4096), (1025, 3, 5120), (1100, 4, 7168), (1500, 6, 2880), (1030, 1, 20_008)]
ROWS += [(1024, 32, 1024), (1024, 33, 1024), (1024, 8, 512), (5000, 2, 7168), (1200, 4, 4100)]


@pytest.mark.parametrize("share", [0.6, 1.0, 1.01])
@pytest.mark.parametrize(("tokens", "top_k", "hidden"), ROWS)
def test_rows_of_every_width(tokens, top_k, hidden, share):
    g = torch.Generator(device=CUDA).manual_seed(tokens + top_k)
    x = torch.randn(tokens, hidden + 24, device=CUDA, generator=g).to(torch.bfloat16)[:, 8 : hidden + 8]
    ids = torch.randint(-3, 64, (tokens, top_k), device=CUDA, generator=g)
    rows = int(tokens * top_k * share)
    for source in (x, x.contiguous()):
        actual = torch.ops.moe_ops.topk_permute(source, ids, 64, num_out_tokens=rows)
        expected = reference.topk_permute(source, ids, 64, num_out_tokens=rows)
        for value, wanted in zip(actual, expected, strict=True):
            assert torch.equal(value, wanted)


@pytest.mark.parametrize("tokens", [3, 100, 600, 1000, 1500, 8000, 20_000])
def test_map_with_weights_and_an_expert_map(tokens):
    """Slots of weight 0 and experts of others count as slots without an expert; the slot of every row."""
    ids, weights = make_routing(tokens, 8, 300, invalid=0.2)
    weights[::3, 2] = 0.0
    local = torch.arange(300, dtype=torch.int32) // 2
    local[::5] = -1
    known = (ids >= 0) & (ids < 300) & (weights != 0)
    kept = torch.where(known, local[ids.clamp(0, 299)].to(ids.dtype), -1)
    expected = reference.topk_permute(torch.zeros(tokens, 1), kept, 150)
    row_map = torch.empty(tokens, 8, dtype=torch.int32, device=CUDA)
    counts, row_slot = (torch.empty(n, dtype=torch.int32, device=CUDA) for n in (150, tokens * 8))
    permutation_map(
        ids.to(CUDA), row_map, counts, num_rows=tokens * 8, row_slot=row_slot, expert_map=local.to(CUDA),
        topk_weights=weights.to(CUDA),
    )  # fmt: skip
    assert_same(row_map, expected[1])
    assert_same(counts, expected[2])
    slots = torch.full((tokens * 8,), -1, dtype=torch.int32)
    routed = expected[1].reshape(-1) >= 0
    slots[expected[1].reshape(-1)[routed].long()] = torch.arange(tokens * 8, dtype=torch.int32)[routed]
    assert_same(row_slot, slots)


def test_map_of_two_million_slots_with_one_hot_expert():
    ids = torch.randint(0, 256, (262_144, 8), generator=torch.Generator().manual_seed(1))
    ids[torch.rand(262_144, 8, generator=torch.Generator().manual_seed(2)) < 0.9] = 7
    ids = ids.to(CUDA)
    x = torch.zeros(262_144, 1, dtype=torch.bfloat16, device=CUDA)
    _, row_map, counts = torch.ops.moe_ops.topk_permute(x, ids, 256)
    order = torch.argsort(ids.reshape(-1), stable=True)
    expected = torch.empty_like(order)
    expected[order] = torch.arange(order.numel(), device=CUDA)
    assert torch.equal(row_map.reshape(-1).to(torch.int64), expected)
    assert torch.equal(counts.to(torch.int64), torch.bincount(ids.reshape(-1), minlength=256))


@pytest.mark.parametrize("hidden", [7168, 7164, 7167])  # whole vectors, 8 bytes, single elements
def test_rows_past_int32(hidden):
    tokens, top_k = 37_500, 8
    ids = make_routing(tokens, top_k, 64, invalid=0.1)[0].to(CUDA)
    x = torch.randn(tokens, hidden, device=CUDA, dtype=torch.bfloat16)
    permuted, row_map, counts = torch.ops.moe_ops.topk_permute(x, ids, 64)
    assert permuted.numel() > 2**31
    routed = int(counts.sum())
    assert permuted[routed:].eq(0).all()
    slots = torch.nonzero(row_map.reshape(-1) >= 0).reshape(-1)
    assert slots.numel() == routed
    for part in slots.split(40_000):
        assert torch.equal(permuted[row_map.reshape(-1)[part].to(torch.int64)], x[part // top_k])
    assert torch.equal(row_map, reference.topk_permute(x[:, :1], ids, 64)[1])

    weights = torch.rand(tokens, top_k, device=CUDA)
    out = torch.ops.moe_ops.topk_unpermute(permuted, row_map, weights)
    last = slice(tokens - 50, tokens)
    assert_same(out[last], reference.topk_unpermute(permuted, row_map[last], weights[last]).cpu())

    grad_rows, grad_weights = torch.ops.moe_ops.topk_unpermute_backward(out, permuted, row_map, weights)
    assert grad_rows[routed:].eq(0).all()
    rows = row_map[last].to(torch.int64)
    used = rows >= 0
    expected = (out[last].float()[:, None] * weights[last][..., None]).to(torch.bfloat16)
    assert torch.equal(grad_rows[rows[used]], expected[used])
    dots = (permuted[rows.clamp(min=0)].float() * out[last].float()[:, None]).sum(-1)
    torch.testing.assert_close(grad_weights[last], torch.where(used, dots, 0.0), rtol=1e-4, atol=1e-2)


def test_weights_past_int32():
    """256 experts of 4096 x 7168: 3.8e9 bytes of codes; the last expert is at the end."""
    experts, inter, hidden = 256, 2048, 7168

    def packed(rows, columns):
        codes = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, device=CUDA)
        scales = torch.randint(119, 123, (experts, rows, columns // 32), dtype=torch.uint8, device=CUDA)
        return codes, scales

    weights = (*packed(2 * inter, hidden), *packed(hidden, inter))
    assert weights[0].numel() > 2**31
    x = torch.randn(3, hidden, device=CUDA, dtype=torch.bfloat16)
    ids = torch.tensor([[255, 254], [0, 255], [200, 180]], device=CUDA)
    routing = torch.rand(3, 2, device=CUDA)
    options = {"w13_layout": "gate_up"}
    actual = torch.ops.moe_ops.fused_mxfp4_moe(x, ids, routing, *weights, **options)
    expected = reference.fused_mxfp4_moe(x, ids, routing, *weights, out_dtype=torch.float32, **options)
    assert float((actual.float() - expected).norm() / expected.norm()) < 5e-3
    grad = torch.randn(3, hidden, device=CUDA, dtype=torch.bfloat16)
    actual = torch.ops.moe_ops.fused_mxfp4_moe_backward(grad, x, ids, routing, *weights, **options)
    expected = reference.fused_mxfp4_moe_backward(grad.float(), x.float(), ids, routing, *weights, **options)
    for value, wanted in zip(actual, expected, strict=True):
        assert float((value.float() - wanted).norm() / wanted.norm()) < 1e-2


@pytest.mark.parametrize("tokens", [100, 700, 3000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_class_of_tiles(tokens, dtype):
    """Experts with few, some and many rows in one batch."""
    experts, inter, hidden = 8, 320, 288
    g = torch.Generator(device=CUDA).manual_seed(tokens)

    def packed(rows, columns):
        codes = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, device=CUDA, generator=g)
        return codes, torch.randint(
            120, 124, (experts, rows, columns // 32), dtype=torch.uint8, device=CUDA, generator=g
        )

    weights = (*packed(2 * inter, hidden), *packed(hidden, inter))
    share = torch.tensor([0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.32], device=CUDA)
    ids = torch.multinomial(share.expand(tokens, -1), 3, generator=g)
    x = torch.randn(tokens, hidden, device=CUDA, generator=g).to(dtype)
    routing = torch.rand(tokens, 3, device=CUDA, generator=g)
    options = {"w13_layout": "interleaved", "activation": "swiglu_oai"}
    actual = torch.ops.moe_ops.fused_mxfp4_moe(x, ids, routing, *weights, out_dtype=torch.float32, **options)
    expected = reference.fused_mxfp4_moe(x.double().float(), ids, routing, *weights, out_dtype=torch.float32, **options)
    limit = {torch.bfloat16: 5e-3, torch.float16: 7e-4, torch.float32: 5e-6}[dtype]
    assert float((actual - expected).norm() / expected.norm()) < limit
