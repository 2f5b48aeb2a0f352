"""select_deferred_experts and gpu_expert_masks, on numbers."""

from __future__ import annotations

import pytest
import torch

import moe_ops

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("ids", "weights", "max_deferred", "late"),
    [
        ([4, 1, 6], [0.2, 0.5, 0.3], 0, []),
        ([4, 1, 6], [0.2, 0.5, 0.3], 1, [0]),
        ([4, 1, 6], [0.2, 0.5, 0.3], 2, [0, 2]),
        ([4, 1, 6], [0.2, 0.5, 0.3], 3, [0, 1, 2]),
        ([4, 1, 6], [0.2, 0.5, 0.3], 9, [0, 1, 2]),
        ([4, 1, 6], [0.2, 0.5, 0.3], -1, []),
        ([4, 1, 6], [0.5, 0.5, 0.5], 1, [2]),  # a tie keeps the lower slot immediate
        ([4, 1, 6], [0.5, 0.5, 0.7], 1, [1]),
        ([-1, 1, 6], [0.0, 0.5, 0.3], 1, [2]),  # only valid slots are counted
        ([-1, -1, 6], [0.0, 0.0, 0.3], 2, [2]),
        ([-1, -1, -1], [0.0, 0.0, 0.0], 2, []),
        ([3, 3, 3], [0.1, 0.3, 0.2], 1, [0]),  # one expert twice: slots have fates of their own
        ([4, 1, 6], [NAN, 0.5, 0.3], 2, [1, 2]),  # NaN counts as the largest
        ([4, 1, 6], [INF, -INF, NAN], 2, [1, 2]),
        ([4, -1, 6], [INF, 0.0, INF], 2, [0, 2]),
        ([4, 1, 6], [0.0, 0.5, 0.3], 1, [2]),  # a weight of 0 is no work
        ([4, 1, 6], [0.0, INF, -0.0], 2, [1]),
    ],
)
def test_one_token(ids, weights, max_deferred, late):
    now, later = moe_ops.select_deferred_experts(torch.tensor([ids]), torch.tensor([weights]), max_deferred)
    assert now.tolist() == [[-1 if k in late else max(id, -1) for k, id in enumerate(ids)]]
    assert later.tolist() == [[id if k in late else -1 for k, id in enumerate(ids)]]


def test_a_token_does_not_depend_on_the_others():
    """The batch-wide rule of older systems gives [4, 1, 6] another fate beside a row whose best expert is 4."""
    alone = moe_ops.select_deferred_experts(torch.tensor([[4, 1, 6]]), torch.tensor([[0.2, 0.5, 0.3]]), 2)
    ids, weights = torch.tensor([[4, 1, 6], [2, 4, 5]]), torch.tensor([[0.2, 0.5, 0.3], [0.1, 0.6, 0.3]])
    both = moe_ops.select_deferred_experts(ids, weights, 2)
    assert torch.equal(both[0][:1], alone[0]) and torch.equal(both[1][:1], alone[1])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_partition(dtype):
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(-2, 9, (200, 8), generator=g).to(dtype)
    weights = torch.randint(0, 4, (200, 8), generator=g).float()  # many ties
    before = ids.clone()
    for max_deferred in range(10):
        now, later = moe_ops.select_deferred_experts(ids, weights, max_deferred)
        assert now.dtype == later.dtype == dtype and torch.equal(ids, before)
        assert torch.equal(torch.maximum(now, later), ids.clamp(min=-1))
        assert ((now == -1) | (later == -1)).all()
        work = (ids >= 0) & (weights != 0)
        count = torch.minimum(work.sum(1), torch.tensor(max_deferred))
        assert torch.equal((later >= 0).sum(1), count)
        for row in range(0, 200, 17):  # every deferred weight is at most every immediate one
            late, soon = work[row] & (later[row] >= 0), work[row] & (now[row] >= 0)
            if late.any() and soon.any():
                assert weights[row][late].max() <= weights[row][soon].min()


def test_no_tokens():
    now, later = moe_ops.select_deferred_experts(torch.empty(0, 3, dtype=torch.int64), torch.empty(0, 3), 1)
    assert now.shape == later.shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_ids_that_cannot_be_minus_one_are_refused(dtype):
    with pytest.raises(ValueError, match=r"topk_ids must be \[num_tokens, top_k\] int32 or int64"):
        moe_ops.select_deferred_experts(torch.zeros(2, 3, dtype=dtype), torch.ones(2, 3), 1)


def test_masks_by_hand():
    frequencies = torch.tensor([[0.1, 0.5, 0.3, 0.8], [0.2, 0.4, 0.9, 0.1]])
    assert moe_ops.gpu_expert_masks(frequencies, 3).tolist() == [
        [False, True, False, True],
        [False, False, True, False],
    ]


@pytest.mark.parametrize(("count", "total"), [(-5, 0), (0, 0), (8, 8), (100, 8)])
def test_masks_are_clamped(count, total):
    mask = moe_ops.gpu_expert_masks(torch.rand(2, 4), count)
    assert int(mask.sum()) == total and mask.dtype == torch.bool and mask.is_contiguous()


def test_masks_of_ties_strides_and_nan():
    same = torch.ones(3, 4)
    assert moe_ops.gpu_expert_masks(same, 5).flatten().tolist() == [True] * 5 + [False] * 7
    turned = torch.tensor([[1.0, 2.0], [4.0, 3.0], [5.0, 0.0]]).t()
    assert moe_ops.gpu_expert_masks(turned, 2).tolist() == [[False, True, True], [False, False, False]]
    broken = torch.tensor([[NAN, 1.0, 2.0]])
    assert moe_ops.gpu_expert_masks(broken, 2).tolist() == [[False, True, True]]
    assert moe_ops.gpu_expert_masks(torch.tensor([[3, 1, 2]]), 1).tolist() == [[True, False, False]]
