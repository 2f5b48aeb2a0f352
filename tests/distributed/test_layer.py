"""ExpertParallelMoE over gloo processes against one process: forward, backward, replicas, slices, capacity, compile."""

from __future__ import annotations

import hybrid_cases
import layer_cases as cases
import pytest
import torch
from cluster import Cluster
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from moe_ops.distributed import ExpertParallelMoE, ReplicaTable, Workspace

# No shrinking: a failure breaks the group, and each further try would start a new one.
PROPERTY = settings(
    phases=[Phase.explicit, Phase.generate],
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@settings(PROPERTY, max_examples=15)
@given(data=st.data())
def test_equals_single_process(cluster: Cluster, data: st.DataObject) -> None:
    ranks = cluster.world_size
    tokens = data.draw(st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks), "tokens")
    options = {
        "mode": data.draw(st.sampled_from(["push", "pull"]), "mode"),
        "replicas": data.draw(st.booleans(), "replicas"),
        "max_local_tokens": data.draw(st.sampled_from([None, 5]), "limit"),
        "combine_dtype": data.draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16]), "combine_dtype"),
    }
    num_experts = data.draw(st.integers(1, 2 * ranks + 1), "num_experts")
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), "dtype")
    top_k = data.draw(st.integers(1, 4), "top_k")
    cluster.run(
        cases.equals_single_process, data.draw(st.integers(0, 99), "seed"), tokens, num_experts, top_k, dtype, options
    )


@pytest.mark.parametrize("batch_invariant", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
def test_fused_experts_equal_single_process(cluster: Cluster, dtype: torch.dtype, batch_invariant: bool) -> None:
    tokens = [[5, 0, 3, 1][rank % 4] for rank in range(cluster.world_size)]
    cluster.run(cases.fused_equals_single_process, 40, tokens, dtype, batch_invariant)


@pytest.mark.parametrize(("slots", "dtype"), [(0, torch.float32), (1, torch.float32), (1, torch.bfloat16)])
def test_hybrid_experts(pair: Cluster, slots: int, dtype: torch.dtype) -> None:
    pair.run(hybrid_cases.hybrid_equals_fused, [5, 0], slots, dtype)
    pair.run(hybrid_cases.hybrid_equals_fused, [2, 7], slots, dtype)


def test_thirty_experts_and_idle_ranks(cluster: Cluster) -> None:
    tokens = [6 if rank % 2 else 0 for rank in range(cluster.world_size)]
    cluster.run(cases.equals_single_process, 3, tokens, 30, 4, torch.bfloat16, {})


def test_deep_copies(pair: Cluster) -> None:
    pair.run(cases.copies_share_the_group)


def test_layers_share_a_workspace(cluster: Cluster) -> None:
    cluster.run(cases.shared_workspace)


@pytest.mark.parametrize("capacity", [None, 3])
def test_experts_without_rows_take_part_in_the_backward(pair: Cluster, capacity: int | None) -> None:
    pair.run(cases.only_the_experts_are_trained, capacity)


@settings(PROPERTY, max_examples=8)
@given(data=st.data())
def test_fixed_capacity_equals_exact_sizes(cluster: Cluster, data: st.DataObject) -> None:
    arguments = data.draw(st.tuples(st.integers(0, 99), st.integers(0, 5), st.integers(1, 20), st.integers(1, 4)))
    cluster.run(cases.static_equals_dynamic, *arguments)


def test_pull_through_shared_memory(cluster: Cluster) -> None:
    ranks = cluster.world_size
    plan = [[3] * ranks, [(5 * rank) % 7 for rank in range(ranks)], [0] * ranks, [150] + [1] * (ranks - 1)]
    cluster.run(cases.pulls_from_peers, plan, torch.bfloat16)


def test_capacity_overflow_is_nan_and_raises_everywhere(pair: Cluster) -> None:
    found = pair.run(cases.overflow)
    assert [lost for lost, _ in found] == [[False] * 4, [False, False, True, False]] or [lost for lost, _ in found] == [
        [False] * 4,
        [True, False, False, False],
    ]
    assert found[0][1] == found[1][1]
    assert "capacity overflow: more than 2 rows for one rank from ranks [1]" in found[0][1]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.heavy)])
def test_compiles_whole(pair: Cluster, backend: str) -> None:
    pair.run(cases.compiled, backend, backend == "aot_eager", timeout=240)


def test_exact_sizes_inside_a_compiled_model(pair: Cluster) -> None:
    for message in pair.run(cases.compiled_around):
        assert "give the layer a capacity to compile it whole" in message


def test_tensor_parallel_slices_add_up() -> None:
    four = Cluster(4)
    try:
        four.run(cases.tensor_parallel, torch.float32)
    finally:
        four.stop()


# -- one process ---------------------------------------------------------------------------------------------------


def single(**options: object) -> ExpertParallelMoE:
    return ExpertParallelMoE(cases.RowExperts(*cases.dense_weights(4)), 4, 2, cases.HIDDEN, **options)


@pytest.mark.parametrize("capacity", [None, 8])
def test_no_tokens_keep_their_edges(capacity: int | None) -> None:
    output, grad_hidden, grad_weights = cases.run(single(capacity=capacity), cases.batch(0, 0, 4, 2, torch.float32))
    assert output.shape == (0, cases.HIDDEN)
    assert grad_hidden.shape == (0, cases.HIDDEN) and grad_weights.shape == (0, 2)


@pytest.mark.parametrize("capacity", [None, 8])
def test_rows_of_no_expert_are_zero_and_touch_nothing(capacity: int | None) -> None:
    """Ids of -1 and >= E on rows of NaN: zero there; the other rows have the bits of a run without them."""
    hidden_states, ids, weights, _ = cases.batch(1, 4, 4, 2, torch.bfloat16)
    ids = ids.clamp(min=0)
    layer = single(capacity=capacity)
    with torch.no_grad():
        clean = layer(hidden_states, ids, weights)
        hidden_states[1], ids[1] = float("nan"), torch.tensor([-1, 4])
        before = hidden_states.clone(), ids.clone(), weights.clone()
        output = layer(hidden_states, ids, weights)
    assert torch.equal(output[1], torch.zeros(cases.HIDDEN, dtype=torch.bfloat16))
    assert torch.equal(output[[0, 2, 3]], clean[[0, 2, 3]])
    for tensor, kept in zip((hidden_states, ids, weights), before, strict=True):
        assert torch.equal(tensor.nan_to_num(), kept.nan_to_num())


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="num_experts must be 3, the physical experts of replicas"):
        single(replicas=ReplicaTable([0, 1, 1], 2))
    with pytest.raises(ValueError, match="capacity must be None or at least 1, got 0"):
        single(capacity=0)
    with pytest.raises(ValueError, match='mode must be "push" or "pull"'):
        single(mode="shove")
    hidden_states, ids, weights, _ = cases.batch(0, 2, 4, 2, torch.float32)
    with pytest.raises(ValueError, match=r"topk_ids must be .*: topk_ids and topk_weights are swapped"):
        single()(hidden_states, weights, ids)
    with pytest.raises(ValueError, match=r"hidden_states must be \[num_tokens, 8\] .*, got \[2, 7\] float32"):
        single()(hidden_states[:, :7], ids, weights)
    workspace = Workspace()
    with workspace.lease("another call"), pytest.raises(RuntimeError, match="already in use by 'another call'"):
        single(workspace=workspace)(hidden_states, ids, weights)
    assert not workspace.claimed
    with pytest.raises(RuntimeError, match="symmetric memory is not available: it needs CUDA"):
        Workspace(symmetric=True, group=torch.distributed.ProcessGroup(0, 1)).grow(
            1, 1, top_k=1, hidden_size=8, dtype=torch.float32
        )


def test_experts_that_cannot_be_differentiated_are_refused() -> None:
    layer = ExpertParallelMoE(lambda rows, ids, weights: rows.detach() * 2, 4, 2, cases.HIDDEN)
    hidden_states, ids, weights, _ = cases.batch(0, 2, 4, 2, torch.float32)
    ids.clamp_(min=0)
    with pytest.raises(RuntimeError, match="experts must be differentiable"):
        layer(hidden_states.requires_grad_(), ids, weights)
    with torch.no_grad():
        expected = (2 * hidden_states * weights.sum(1, keepdim=True)).detach()
        torch.testing.assert_close(layer(hidden_states, ids, weights), expected)
