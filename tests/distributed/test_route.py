"""prepare_topk_route over gloo processes: golden numbers, random routes, refusal, order of events, caches."""

from __future__ import annotations

import oracle
import pytest
import route_cases as cases
from cluster import Cluster
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

ARRAYS = ("dispatch_src", "dispatch_dst", "dispatch_size", "combine_src", "combine_dst", "combine_size", "group_ends")

# spec.md 8.1, both ranks
IDS = [[[0, 3], [2, 0], [1, 3]], [[3, 2], [0, 3]]]
GOLDEN = {
    "push": (
        ([0, 2, 3, 4], [0, 3, 0, 2], [2, 1, 1, 2], [0, 3, 2, 4], [0, 2, 0, 1], [2, 1, 1, 0], [3, 4]),
        ([0, 1, 1, 2], [2, 4, 1, 4], [1, 0, 1, 2], [0, 2, 1, 4], [3, 4, 1, 2], [1, 2, 1, 2], [2, 6]),
    ),
    "pull": (
        ([0, 2, 0, 1], [0, 3, 2, 4], [2, 1, 1, 0], [0, 3, 2, 4], [0, 2, 0, 1], [2, 1, 1, 0], [3, 4]),
        ([3, 4, 1, 2], [0, 2, 1, 4], [1, 2, 1, 2], [0, 2, 1, 4], [3, 4, 1, 2], [1, 2, 1, 2], [2, 6]),
    ),
}


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("limit", [None, 16], ids=["auto", "limited"])
def test_worked_example(pair: Cluster, mode: str, limit: int | None) -> None:
    found = pair.run(cases.described, IDS, 4, 2, {"mode": mode, "max_local_tokens": limit})
    for rank in range(2):
        assert tuple(found[rank][name] for name in ARRAYS) == GOLDEN[mode][rank]
        assert found[rank]["expert_capacity"] == (4, 6)[rank]
        assert (found[rank]["maximum"], found[rank]["loads"]) == (6, [4, 6])
        assert (found[rank]["local_num_tokens"], found[rank]["plan_tokens"]) == ((3, 2)[rank], 128)
    assert found[0]["row_map"] == [0, 4, 3, 1, 2, 5]
    assert [found[rank]["tokens_per_expert"] for rank in range(2)] == [[2, 1, 1, 2], [1, 0, 1, 2]]
    assert found[1]["received_counts"] == [[1, 2], [1, 2]]


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_golden_counts(pair: Cluster, mode: str) -> None:
    found = pair.run(cases.from_counts, [[1, 2, 3, 4], [5, 6, 7, 8]], 2, {"mode": mode})
    arrays = [[found[rank][name] for name in ARRAYS] for rank in range(2)]
    push = [[[0, 1, 3, 6], [0, 6, 0, 10], [1, 2, 3, 4]], [[0, 5, 11, 18], [1, 8, 3, 14], [5, 6, 7, 8]]]
    pull = [[[0, 1, 0, 5], [0, 6, 1, 8], [1, 2, 5, 6]], [[3, 6, 11, 18], [0, 10, 3, 14], [3, 4, 7, 8]]]
    back = [
        [[0, 6, 1, 8], [0, 1, 0, 5], [1, 2, 5, 6], [6, 14]],
        [[0, 10, 3, 14], [3, 6, 11, 18], [3, 4, 7, 8], [10, 22]],
    ]
    for rank in range(2):
        assert arrays[rank] == (push if mode == "push" else pull)[rank] + back[rank]
        assert (found[rank]["expert_capacity"], found[rank]["maximum"]) == ((14, 22)[rank], 22)


def test_dynamic_counts(pair: Cluster) -> None:
    idle = pair.run(cases.described, [[], [[0, 1], [2, 0], [2, 0]]], 4, 2, {})
    assert [rank["plan_tokens"] for rank in idle] == [128, 128]
    assert idle[0]["row_map"] == []
    assert idle[0]["row_map_dtype"] == "torch.int32"
    one_sided = pair.run(cases.described, [[[0, 1]] * 129, []], 4, 2, {})
    assert [rank["plan_tokens"] for rank in one_sided] == [256, 256]
    assert [rank["expert_capacity"] for rank in one_sided] == [258, 1]
    assert [rank["maximum"] for rank in one_sided] == [258, 258]


def test_static_routes_have_no_plan(pair: Cluster) -> None:
    found = pair.run(cases.described, [[[0, 3]], [[3, 2]]], 4, 2, {"tokens": "static", "mode": "pull"})
    assert [(rank["local_num_tokens"], rank["plan_tokens"]) for rank in found] == [(None, None)] * 2
    assert found[1]["dispatch_size"] == [0, 1, 1, 1]


# No shrinking: a failure breaks the group, and each further try would start a new one.
@settings(
    max_examples=60,
    phases=[Phase.explicit, Phase.generate],
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_random_round_trips(cluster: Cluster, data: st.DataObject) -> None:
    """Any shapes, skew, idle ranks, experts that ranks do not divide: exact layout, exact return, exact metadata."""
    ranks = cluster.world_size
    tokens = data.draw(st.lists(st.integers(0, 8), min_size=ranks, max_size=ranks), "tokens")
    num_experts = data.draw(st.integers(1, 3 * ranks + 2), "num_experts")
    top_k = data.draw(st.integers(1, 4), "top_k")
    skew = data.draw(st.sampled_from([1, 1, 2, 8]), "skew")
    options = {
        "mode": data.draw(st.sampled_from(["push", "pull"]), "mode"),
        "grouped": data.draw(st.booleans(), "grouped"),
        "workspace": data.draw(st.booleans(), "workspace"),
        "max_local_tokens": data.draw(st.sampled_from([None, 8]), "limit"),
    }
    cluster.run(cases.round_trip, data.draw(st.integers(0, 99), "seed"), tokens, num_experts, top_k, skew, options)


@pytest.mark.parametrize("num_experts", [30, 256])
def test_experts_that_ranks_do_not_divide(cluster: Cluster, num_experts: int) -> None:
    tokens = [5 + 3 * rank for rank in range(cluster.world_size)]
    options = {"mode": "push", "grouped": True, "workspace": False}
    cluster.run(cases.round_trip, 7, tokens, num_experts, 4, 1, options)


# -- refusal: every rank raises the same, and nothing has been written ---------------------------------------------


def _refused(cluster: Cluster, tokens: dict[int, int], change: dict, spec: dict, text: str, first: str = "") -> None:
    """`change` applies to rank 1; `first` is the text there if it differs from the others'."""
    counts = [tokens.get(rank, 2) for rank in range(cluster.world_size)]
    changes = [change if rank == 1 else {} for rank in range(cluster.world_size)]
    for mode in ("push", "pull"):
        found = cluster.run(cases.refused, counts, changes, spec | {"mode": mode})
        for rank, (kind, message, untouched) in enumerate(found):
            expected = first if rank == 1 and first else text
            assert expected in message, (rank, message)
            assert message.startswith("prepare_topk_route: ")
            assert kind == ("ValueError" if rank == 1 and first else "RuntimeError")
            assert untouched


REFUSALS = {
    "limit": (
        {1: 258},
        {},
        {"max_local_tokens": 257},
        "token capacity overflow: at most 257 tokens per rank, got [2, 258",
    ),
    "mask": ({}, {"autograd_mask": 1}, {}, "autograd participation differs"),
    "mask_limited": ({}, {"autograd_mask": 1}, {"max_local_tokens": 9}, "autograd participation differs"),
    "sum": ({}, {"counts": [2, 1, 0, 0]}, {}, "counts must describe the actual Top-K routes: rank 1"),
    "negative": ({}, {"counts": [5, -1, 0, 0]}, {}, "counts must describe the actual Top-K routes: rank 1"),
    "too_many": (
        {},
        {"counts": [9, 9, 9, 9]},
        {"tokens": "static"},
        "counts must describe the actual Top-K routes: rank 1",
    ),
    "distinct": ({}, {"counts": [3, 1, 0, 0]}, {"distinct_experts": True}, "actual distinct Top-K routes: rank 1"),
    "static": ({1: 3}, {}, {"tokens": "static"}, "same number of tokens on every rank, got [2, 3"),
    "top_k": ({}, {"top_k": 1}, {}, "every rank must have the same RouteSpec"),
    "mode": ({}, {"spec": {"mode": "push", "distinct_experts": True}}, {}, "every rank must have the same RouteSpec"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_all_ranks_refuse_alike(pair: Cluster, name: str) -> None:
    tokens, change, spec, text = REFUSALS[name]
    _refused(pair, tokens, change, spec, text)


def test_wrong_arguments_reach_every_rank(pair: Cluster) -> None:
    text = "rank 1 refused its arguments: topk_ids must be"
    own = "topk_ids must be [2, top_k] int32 or int64, got [2, 2] float32"
    _refused(pair, {}, {"bad_ids": True}, {}, text, own)
    text = "rank 1 refused its arguments: tokens_per_expert must be"
    own = "tokens_per_expert must be [4] int32 or int64, got [2] int64"
    _refused(pair, {}, {"counts": [2, 2]}, {}, text, own)


def test_refusal_reaches_every_rank_of_any_group(cluster: Cluster) -> None:
    _refused(cluster, {1: 300}, {}, {"max_local_tokens": 128}, "token capacity overflow")


# -- order of events, counts, growth, caches -----------------------------------------------------------------------


def test_the_gather_is_in_flight_during_the_permutation(pair: Cluster) -> None:
    assert pair.run(cases.events, "push", {}) == [["reuse", "gather", "permute", "wait", "grow"]] * 2
    assert pair.run(cases.events, "push", {"max_local_tokens": 4})[0] == ["reuse", "gather", "permute", "wait", "grow"]
    assert pair.run(cases.events, "pull", {}) == [["gather", "permute", "wait", "grow"]] * 2
    # Too large to be staged: straight into the workspace, after the agreement.
    assert pair.run(cases.events, "pull", {}, 0) == [["gather", "wait", "grow", "place"]] * 2


def test_trusted_counts_are_used_as_given_and_not_aliased(pair: Cluster) -> None:
    pair.run(cases.trusted_counts)


def test_workspace_grows_by_agreement_and_never_shrinks(pair: Cluster) -> None:
    row = 2 * cases.HIDDEN * 4  # top_k rows of float32
    found = pair.run(cases.growth, [[1, 2], [129, 0], [1, 1], [0, 300]])
    sources = [size for size, _, _ in found[0]]
    assert found[0] == found[1]
    assert sources == [128 * row, 256 * row, 256 * row, 384 * row]
    assert [generation for _, _, generation in found[0]] == [1, 2, 2, 3]


def test_route_cache_needs_two_sightings(pair: Cluster) -> None:
    a, b = [[0, 1, 3], [2]], [[0, 1, 2], [2]]
    log = pair.run(cases.cached, [a, a, a, a, b, b, b, a], 4)
    # stored on the second sighting, returned from the third; any difference starts again
    assert [hits for hits, _, _ in log[0]] == [0, 0, 1, 2, 2, 2, 3, 3]
    assert [same for _, same, _ in log[0]] == [False, False, True, True, False, False, True, False]
    assert all(back_off == 0 for _, _, back_off in log[0])
    assert log[0] == log[1]


def test_route_cache_backs_off_on_large_tables(pair: Cluster) -> None:
    a, b = [[0, 1, 3], [2]], [[600, 1, 3], [2]]
    log = pair.run(cases.cached, [a, b] + [b] * 11, 1000)  # 2 * 1000 counts: read to the host, described on the device
    assert [back_off for _, _, back_off in log[0]] == [0, 8, 7, 6, 5, 4, 3, 2, 1, 0, 0, 0, 0]
    # b is known from the miss; the first look after the back-off is its second sighting, later ones hit
    assert [hits for hits, _, _ in log[0]] == [0] * 11 + [1, 2]


def test_oracle_reproduces_the_golden_numbers() -> None:
    counts = [[2, 1, 1, 2], [1, 0, 1, 2]]
    for mode, ranks in GOLDEN.items():
        for rank, expected in enumerate(ranks):
            assert tuple(oracle.metadata(counts, rank, mode)[name] for name in ARRAYS) == expected
