"""Owners of experts, replicas, and tensor-parallel slices."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ops.distributed import ExpertShards, ReplicaTable, RouteSpec, slice_tensor_parallel
from moe_ops.distributed.placement import first_experts, owners
from moe_ops.distributed.tensor_parallel import slice_bounds
from moe_ops.reference.fused_mxfp4_moe import fused_mxfp4_moe as reference
from moe_ops.reference.mxfp4 import quantize_mxfp4
from tests.support import assert_close


def test_the_first_ranks_own_one_more() -> None:
    shards = ExpertShards(30, 8)
    assert [shards.count(rank) for rank in range(8)] == [4] * 6 + [3] * 2
    assert [shards.first(rank) for rank in range(9)] == [0, 4, 8, 12, 16, 20, 24, 27, 30]
    assert shards.max_local == 4
    assert [ExpertShards(256, 3).count(rank) for rank in range(3)] == [86, 85, 85]
    with pytest.raises(ValueError, match=r"ExpertShards: ep_rank must be in \[0, 8\), got 8"):
        shards.count(8)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(1, 300), st.integers(1, 64))
def test_every_expert_has_one_owner(num_experts: int, ep_size: int) -> None:
    shards = ExpertShards(num_experts, ep_size)
    owned = [expert for rank in range(ep_size) for expert in shards.owned(rank)]
    assert owned == list(range(num_experts))
    assert [shards.owner(expert) for expert in owned] == [r for r in range(ep_size) for _ in shards.owned(r)]
    assert owners(shards, torch.tensor(owned, dtype=torch.int32)).tolist() == [shards.owner(expert) for expert in owned]
    outside = owners(shards, torch.tensor([-1, num_experts, 2**31 - 1]))
    assert ((outside >= 0) & (outside < ep_size)).all()
    edges = first_experts(shards, torch.device("cpu")).tolist()
    assert edges == [shards.first(rank) for rank in range(ep_size + 1)]


def test_a_slot_goes_to_exactly_one_copy() -> None:
    table = ReplicaTable([0, 1, 2, 0, 0], 3)
    ids = torch.tensor([[0, 1], [0, 2], [0, -1], [0, 3], [0, 0]], dtype=torch.int32)
    physical = table(ids)
    assert physical.tolist() == [[0, 1], [3, 2], [4, -1], [0, -1], [3, 3]]
    assert physical.dtype == torch.int32
    assert table(ids, ep_rank=1)[:, 0].tolist() == [3, 4, 0, 3, 4]


def test_balanced_copies_follow_the_load() -> None:
    table = ReplicaTable.balanced([8.0, 1.0, 4.0, 1.0], 7)
    assert sorted(table.physical_to_logical) == [0, 0, 0, 1, 2, 2, 3]
    with pytest.raises(ValueError, match="num_physical must be at least 4, got 3"):
        ReplicaTable.balanced([1.0] * 4, 3)
    with pytest.raises(ValueError, match="physical_to_logical must be a map onto every logical expert"):
        ReplicaTable([0, 0], 2)
    with pytest.raises(ValueError, match=r"must be logical ids in \[0, 2\), got 2 at 1"):
        ReplicaTable([0, 2, 1], 2)


# -- tensor parallel -----------------------------------------------------------------------------------------------


def weights(num_experts: int, hidden: int, intermediate: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    w13 = quantize_mxfp4(torch.randn(num_experts, 2 * intermediate, hidden, generator=generator) * 0.3)
    w2 = quantize_mxfp4(torch.randn(num_experts, hidden, intermediate, generator=generator) * 0.3)
    biases = torch.randn(num_experts, 2 * intermediate, generator=generator), torch.randn(num_experts, hidden)
    return (*w13, *w2, *biases)


@pytest.mark.parametrize("w13_layout", ["gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize(("intermediate", "tp_size"), [(128, 2), (96, 2), (160, 3), (64, 1)])
def test_parts_add_up(w13_layout: str, intermediate: int, tp_size: int) -> None:
    w13, w13_scale, w2, w2_scale, w13_bias, w2_bias = weights(3, 64, intermediate)
    hidden_states = torch.randn(7, 64)
    topk_ids = torch.randint(-1, 3, (7, 2))
    topk_weights = torch.rand(7, 2)

    def run(w13, w13_scale, w2, w2_scale, w13_bias, w2_bias):  # type: ignore[no-untyped-def]
        return reference(
            hidden_states, topk_ids, topk_weights, w13, w13_scale, w2, w2_scale,
            w13_layout=w13_layout, w13_bias=w13_bias, w2_bias=w2_bias, out_dtype=torch.float32,
        )  # fmt: skip

    parts = [
        run(
            *slice_tensor_parallel(
                w13, w13_scale, w2, w2_scale,
                w13_layout=w13_layout, tp_rank=rank, tp_size=tp_size, w13_bias=w13_bias, w2_bias=w2_bias,
            )
        )
        for rank in range(tp_size)
    ]  # fmt: skip
    whole = run(w13, w13_scale, w2, w2_scale, w13_bias, w2_bias)
    # Elements that cancel have no digits of their own: the bound is relative to the RMS.
    assert_close(sum(parts), whole, max_tol=3e-6, rms_tol=5e-7)


def test_slices_cut_at_blocks() -> None:
    assert [slice_bounds(160, rank, 3) for rank in range(3)] == [(0, 64), (64, 128), (128, 160)]
    assert [slice_bounds(2880, rank, 4) for rank in range(4)] == [(0, 736), (736, 1472), (1472, 2176), (2176, 2880)]
    with pytest.raises(ValueError, match=r"intermediate size must be a multiple of 32 .*, got 48"):
        slice_bounds(48, 0, 1)
    with pytest.raises(ValueError, match=r"at least one block per rank \(4\), got 96"):
        slice_bounds(96, 0, 4)
    with pytest.raises(ValueError, match=r"tp_rank must be in \[0, 2\), got 2"):
        slice_bounds(64, 2, 2)
    w13, w13_scale, w2, w2_scale, _, _ = weights(1, 64, 64)
    with pytest.raises(ValueError, match="w13_layout must be"):
        slice_tensor_parallel(w13, w13_scale, w2, w2_scale, w13_layout="w13", tp_rank=0, tp_size=1)
    with pytest.raises(ValueError, match=r"w2_scale must be of shape \[1, 64, 2\], got \[1, 64, 32\] uint8"):
        slice_tensor_parallel(w13, w13_scale, w2, w2, w13_layout="gate_up", tp_rank=0, tp_size=1)
    whole = slice_tensor_parallel(w13, w13_scale, w2, w2_scale, w13_layout="gate_up", tp_rank=0, tp_size=1)
    assert torch.equal(whole.w2, w2) and whole.w2.data_ptr() != w2.data_ptr()


def test_a_copied_model_shares_its_spec() -> None:
    spec = RouteSpec(8, 2, 64)
    assert copy.deepcopy({"spec": spec})["spec"] is spec
