"""The Hopper layout by kernel, and what is computed over unpacked experts."""

from __future__ import annotations

import pytest
import torch

from moe_ops import reference
from moe_ops.cuda import prepare_sm90, unpacked
from moe_ops.cuda._repack import repack
from moe_ops.cuda.layout import pack_codes, pack_scales, w13_row_order
from moe_ops.triton._matrix import CheckpointMatrix
from moe_ops.triton._schedule import make_schedule
from moe_ops.triton.fused_mxfp4_moe import compute as forward
from moe_ops.triton.fused_mxfp4_moe_backward import compute as backward
from tests.support import assert_close, assert_same, make_experts, make_routing, make_rows

E, K, H, INTER = 5, 2, 96, 64


@pytest.mark.parametrize("k", [96, 2080])
@pytest.mark.parametrize("layout", [None, "gate_up", "up_gate", "interleaved"])
def test_both_directions_are_the_layout(layout, k):
    codes = torch.randint(0, 256, (3, 32, k // 2), dtype=torch.uint8)
    scales = torch.randint(0, 256, (3, 32, k // 32), dtype=torch.uint8)
    order = torch.arange(32) if layout is None else w13_row_order(16, layout)
    packed = [
        torch.stack([pack(expert[order]).view(2, 16, -1) for expert in raw])
        for pack, raw in ((pack_codes, codes), (pack_scales, scales))
    ]
    found = [torch.empty_like(tensor) for tensor in packed]
    repack(codes, scales, *found, layout, pack=True)
    assert_same(found[0], packed[0]), assert_same(found[1], packed[1])
    back = [torch.zeros_like(codes), torch.zeros_like(scales)]
    repack(*back, *packed, layout, pack=False, counts=torch.tensor([3, 0, 1], dtype=torch.int32))
    for actual, expected in zip(back, (codes, scales), strict=True):
        assert_same(actual[[0, 2]], expected[[0, 2]])
        assert (actual[1] == 0).all()


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_tiles_of_some_experts_are_those_of_all(batch_invariant):
    ids, _ = make_routing(200, 3, 9, invalid=0.2)
    whole = make_schedule(ids, 9, expert_map=None, topk_weights=None, batch_invariant=batch_invariant)
    parts = [whole.of(slice(first, first + 4)) for first in (0, 4, 8)]
    for number, tiles in enumerate(whole.classes):
        listed = []
        for first, part in zip((0, 4, 8), parts, strict=True):
            some = next((c for c in part.classes if c.rows == tiles.rows), None)
            for expert, row in [] if some is None else some.tiles[: int(some.count)].tolist():
                assert part.starts[expert] == whole.starts[first + expert]
                assert part.counts[expert] == whole.counts[first + expert]
                listed.append([first + expert, row])
        assert listed == tiles.tiles[: int(tiles.count)].tolist(), number


@pytest.mark.parametrize(
    ("experts_at_a_time", "layout", "mapped"),
    [(1, "gate_up", False), (2, "interleaved", True), (2, "up_gate", False), (E, "gate_up", True)],
)
def test_forward_and_backward_over_unpacked_experts(experts_at_a_time, layout, mapped, monkeypatch):
    """The bits of the same kernels over the checkpoint's tensors, which agree with the reference."""
    experts = make_experts(E, INTER, H)
    weights = [experts[name] for name in ("w13", "w13_scale", "w2", "w2_scale")]
    weights[1][0, 0, 0], weights[3][1, 2, 1] = 0, 140
    options = {
        "w13_layout": layout,
        "activation": "swiglu_oai",
        "w13_bias": torch.randn(E, 2 * INTER),
        "w2_bias": torch.randn(E, H),
        "expert_map": torch.tensor([2, -1, 0, 1, -1, 4, 3], dtype=torch.int32) if mapped else None,
    }
    ids, router = make_routing(23, K, 7 if mapped else E, 0, invalid=0.2)
    ids[3], router[5, 0] = -1, 0.0
    x, grad = make_rows(23, H, torch.float32, 1), make_rows(23, H, torch.float32, 2)
    expected = reference.fused_mxfp4_moe(x, ids, router, *weights, **options)
    gradients = reference.fused_mxfp4_moe_backward(grad, x, ids, router, *weights, **options)
    packed = prepare_sm90(
        *(tensor.clone() for tensor in weights), w13_layout=layout, weight_layout="sm90_v1_all_scales"
    )
    larger = sum(tensor[0].numel() for tensor in packed[:2])
    monkeypatch.setattr(unpacked, "BUFFER_BYTES", experts_at_a_time * larger)
    results = []
    for matrices in (
        (CheckpointMatrix(*weights[:2]), CheckpointMatrix(*weights[2:])),
        unpacked.matrices_of(*packed, layout),
    ):
        out = torch.full_like(x, float("nan"))
        forward("op", out, x, ids, router, *matrices, **options)
        grads = torch.full_like(x, float("nan")), torch.full_like(router, float("nan"))
        backward("op", grads, grad, x, ids, router, *matrices, **options)
        results.append((out, *grads))
    for actual, wanted in zip(results[0], (expected, *gradients), strict=True):
        assert_close(actual, wanted, max_tol=1e-4, rms_tol=1e-5)
    for actual, wanted in zip(results[1], results[0], strict=True):
        assert_same(actual, wanted)
    assert (results[1][0][3] == 0).all()


def test_an_expert_larger_than_the_buffer(monkeypatch):
    monkeypatch.setattr(unpacked, "BUFFER_BYTES", 1)
    experts = make_experts(2, INTER, H)
    packed = prepare_sm90(*experts.values(), w13_layout="gate_up")
    assert unpacked.matrices_of(*packed, "gate_up")[0].buffer.numel() == sum(t[0].numel() for t in packed[:2])
