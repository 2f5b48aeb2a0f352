from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from moe_ops import reference
from moe_ops.reference.mxfp4 import dequantize_mxfp4
from moe_ops.triton import _expert_words
from moe_ops.triton._expert_words import in_word_order
from moe_ops.triton._launch import as_bits, rounded, vector_width
from moe_ops.triton._mxfp4 import decode, operand
from moe_ops.triton._permutation_map import permutation_map
from moe_ops.triton._schedule import MOST_ROWS, TILE_ROWS, make_schedule
from moe_ops.triton.fused_mxfp4_moe import fused_mxfp4_moe
from tests.support import assert_close, make_experts, make_routing, make_rows


@triton.jit
def decode_all(codes, scales, out, ROWS: tl.constexpr):
    row, byte = tl.arange(0, ROWS), tl.arange(0, 16)
    packed = tl.load(codes + row[:, None] * 16 + byte[None, :])
    scale = tl.load(scales + row[:, None] + tl.arange(0, 1)[None, :])
    low, high = decode(packed, scale, ROWS, 16, tl.float32)
    tl.store(out + row[:, None] * 32 + byte[None, :] * 2, low)
    tl.store(out + row[:, None] * 32 + byte[None, :] * 2 + 1, high)


def test_every_code_with_every_scale():
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(256, 1)  # all pairs of codes for each scale
    scales = torch.arange(256, dtype=torch.uint8).repeat_interleave(16)[:, None].contiguous()
    out = torch.empty(4096, 32)
    decode_all[(1,)](codes, scales, out, ROWS=4096)
    expected = dequantize_mxfp4(codes, scales)
    finite = torch.isfinite(expected)
    assert torch.equal(out[finite].view(torch.int32), expected[finite].view(torch.int32))  # subnormals and -0 too
    assert torch.equal(torch.isnan(out), torch.isnan(expected))
    assert torch.equal(torch.isposinf(out), torch.isposinf(expected))


@triton.jit
def round_all(values, tf32, bf16, N: tl.constexpr):
    at = tl.arange(0, N)
    value = tl.load(values + at)
    tl.store(tf32 + at, operand(value, tl.float32, True))
    tl.store(bf16 + at, rounded(value, tl.bfloat16, True))


def test_rounding():
    special = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 3.4e38, 1e-40, 1 + 2**-11, 1 + 3 * 2**-11]
    values = torch.cat([torch.tensor(special), torch.randn(1015, generator=torch.Generator().manual_seed(0))])
    tf32, bf16 = torch.empty_like(values), torch.empty_like(values, dtype=torch.bfloat16)
    round_all[(1,)](values, tf32, bf16, N=1024)
    normal = values.abs() > 1e-37
    assert torch.equal(bf16[normal], values.to(torch.bfloat16)[normal])
    in_range = (values.abs() > 1e-3) & (values.abs() < 6e4)  # where float16 has the same 11 bits
    assert torch.equal(tf32[in_range], values.to(torch.float16).float()[in_range])
    bits = tf32[~torch.isnan(tf32)].view(torch.int32)
    assert int((bits & 0x1FFF).abs().sum()) == 0
    assert float(((tf32 - values)[in_range] / values[in_range]).abs().max()) <= 2**-11
    assert float(tf32[7]) == 1.0 and float(tf32[8]) == 1 + 2**-9  # ties go to even
    assert torch.isnan(tf32[4]) and torch.isnan(bf16[4])


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 1, 1), (50, 3, 7), (129, 4, 200)])
def test_map_names_every_row(tokens, top_k, experts):
    ids, weights = make_routing(tokens, top_k, experts, invalid=0.3)
    weights[0, 0] = 0.0
    row_map = torch.empty(tokens, top_k, dtype=torch.int32)
    counts = torch.empty(experts, dtype=torch.int32)
    placement, row_slot = torch.empty_like(row_map), torch.empty(tokens * top_k, dtype=torch.int32)
    permutation_map(
        ids, row_map, counts, num_rows=tokens * top_k, placement=placement, row_slot=row_slot, topk_weights=weights
    )
    kept = torch.where(weights == 0, -1, ids)
    expected = reference.topk_permute(torch.zeros(tokens, 1), kept, experts)
    assert torch.equal(row_map, expected[1])
    assert torch.equal(counts, expected[2])
    rows = torch.where(placement < 0, ~placement, placement).reshape(-1)
    assert rows.sort().values.tolist() == list(range(tokens * top_k))  # every slot has a place
    assert torch.equal(placement.clamp(min=-1), row_map.clamp(min=-1))
    slots = torch.arange(tokens * top_k, dtype=torch.int32)
    routed = row_map.reshape(-1) >= 0
    assert torch.equal(row_slot[row_map.reshape(-1)[routed].long()], slots[routed])
    assert row_slot[int(counts.sum()) :].eq(-1).all()


@pytest.mark.parametrize("tokens", [1, 30, 700])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_tiles_cover_every_routed_row_once(tokens, batch_invariant):
    experts = 9
    share = torch.tensor([0.0, 0.001, 0.02, 0.05, 0.1, 0.15, 0.2, 0.2, 0.279])
    ids = torch.multinomial(share.expand(tokens, -1), 3, generator=torch.Generator().manual_seed(tokens))
    schedule = make_schedule(ids, experts, expert_map=None, topk_weights=None, batch_invariant=batch_invariant)
    assert schedule.counts.tolist() == torch.bincount(ids.reshape(-1), minlength=experts).tolist()
    covered = torch.zeros(tokens * 3, dtype=torch.int64)
    for number, tiles in enumerate(schedule.classes):
        count = int(tiles.count)
        assert count <= tiles.tiles.shape[0]
        for expert, first in tiles.tiles[:count].tolist():
            rows = int(schedule.counts[expert])
            start = int(schedule.starts[expert])
            tallest = schedule.classes[-1].rows if batch_invariant else TILE_ROWS[-1]
            assert (first - start) % tallest == 0
            left = start + rows - first
            if not batch_invariant:
                assert tiles.rows == TILE_ROWS[number]
                assert left > (MOST_ROWS[number - 1] if number else 0)
                assert left <= MOST_ROWS[number]
            covered[first : min(first + tiles.rows, start + rows)] += 1
    assert covered.eq(1).all()


def test_vector_width():
    rows = torch.empty(4, 64, dtype=torch.bfloat16)
    assert vector_width(rows) == 8
    assert vector_width(rows.float()) == 4
    assert vector_width(rows, torch.empty(4, 64)) == 8
    assert vector_width(rows[:, :60]) == 1  # rows of 120 bytes
    assert vector_width(rows.reshape(-1)[1:-63].view(3, 64)) == 1  # not aligned
    assert vector_width(torch.empty(4, 66, dtype=torch.bfloat16)[:, :64]) == 1  # rows 132 bytes apart
    assert as_bits(rows).dtype == torch.int16 and as_bits(rows).data_ptr() == rows.data_ptr()


@pytest.mark.parametrize("width", [32, 96, 2880, 7168])
def test_rows_in_the_order_of_words(width):
    x = torch.randn(3, width + 16, dtype=torch.float32)[:, :width]
    expected = x.view(3, width // 4, 4).transpose(1, 2).reshape(3, width)
    assert torch.equal(in_word_order(x), expected)


@pytest.mark.parametrize("byte", [120, 140])
def test_tiles_of_words_of_both_widths_agree(monkeypatch, byte):
    """140: a scale that is decoded in a second try. Rows of 160 weights end within a step."""
    calls = []
    for name in ("gate_up", "down"):
        function = getattr(_expert_words, name)
        monkeypatch.setattr(_expert_words, name, lambda *args, function=function: calls.append(0) or function(*args))
    experts = make_experts(3, 192, 160)
    experts["w13_bias"], experts["w2_bias"] = torch.randn(3, 384), torch.randn(3, 160)
    experts["w13_scale"][1, 70] = byte
    x = make_rows(5, 160, torch.bfloat16)
    ids, weights = make_routing(5, 2, 3)
    results = []
    for narrow in (0, _expert_words.NARROW_PROGRAMS):
        monkeypatch.setattr(_expert_words, "NARROW_PROGRAMS", narrow)
        results.append(fused_mxfp4_moe(x, ids, weights, **experts, w13_layout="gate_up", out_dtype=torch.float32))
    assert len(calls) == 4
    assert torch.equal(*results)
    expected = reference.fused_mxfp4_moe(x, ids, weights, **experts, w13_layout="gate_up", out_dtype=torch.float32)
    assert_close(results[0], expected, max_tol=1e-4, rms_tol=1e-5)
