"""A rank that dies, hangs or disagrees ends in an error on the others within the group's time-out, not in a hang."""

from __future__ import annotations

import time

import failure_cases as cases
import pytest
from cluster import Cluster

TIMEOUT = 3.0  # of the group, in seconds


@pytest.mark.parametrize(
    ("how", "where", "text"),
    [
        ("dies", "gather", "prepare_topk_route: the gather of counts failed"),
        ("dies", "dispatch", "dispatch: the exchange of rows failed"),
        ("leaves", "combine", "combine: the exchange of rows failed"),
        ("hangs", "dispatch", "dispatch: the exchange of rows failed"),
    ],
)
def test_the_others_raise_within_the_time_out(how: str, where: str, text: str) -> None:
    cluster = Cluster(3, group_timeout=TIMEOUT)
    try:
        begin = time.monotonic()
        outcomes = cluster.outcomes(cases.fails, how, where, timeout=40)
        assert time.monotonic() - begin < 30
        for rank, outcome in enumerate(outcomes):
            if rank == cases.BAD_RANK:
                assert outcome[0] == ("died" if how == "dies" else "error")
            else:
                assert outcome[:2] == ("error", "RuntimeError"), outcome
                assert text in outcome[2]
                assert "has died, is late beyond the group's time-out, or made a different call" in outcome[2]
    finally:
        cluster.stop()


def test_another_configuration_is_the_same_error_everywhere() -> None:
    """Ranks that were set up with other sizes learn it before a collective whose size depends on them."""
    cluster = Cluster(3, group_timeout=TIMEOUT)
    try:
        outcomes = cluster.outcomes(cases.fails, "other_experts", "", timeout=40)
        text = "prepare_topk_route: every rank must have the same RouteSpec, ranks [1] differ from the others"
        assert [outcome[1:3] for outcome in outcomes] == [("RuntimeError", text)] * 3
        outcomes = cluster.outcomes(cases.other_capacity, timeout=40)
        text = "prepare_static_route: every rank must have the same RouteSpec, capacity and dtypes, ranks [1] differ"
        assert [outcome[1] for outcome in outcomes] == ["RuntimeError"] * 3
        assert all(text in outcome[2] for outcome in outcomes)
    finally:
        cluster.stop()


@pytest.mark.parametrize("what", ["hidden_states", "combine_dtype"])
def test_other_dtypes_are_the_same_error_everywhere(what: str) -> None:
    """A transport would end the process, or return whatever lies in the rows, where sizes differ."""
    cluster = Cluster(2, group_timeout=TIMEOUT)
    try:
        for capacity, text in (
            (None, "prepare_topk_route: the dtypes of hidden_states and combined rows differ between ranks, got ["),
            (
                64,
                "prepare_static_route: every rank must have the same RouteSpec, capacity and dtypes, ranks [1] differ",
            ),
        ):
            outcomes = cluster.outcomes(cases.other_dtypes, what, capacity, timeout=40)
            assert [outcome[1] for outcome in outcomes] == ["RuntimeError"] * 2, outcomes
            assert all(text in outcome[2] for outcome in outcomes), outcomes
    finally:
        cluster.stop()


def test_an_error_in_one_ranks_experts_reaches_all() -> None:
    cluster = Cluster(2, group_timeout=TIMEOUT)
    try:
        outcomes = cluster.outcomes(cases.raises_inside_the_experts, timeout=40)
        assert outcomes[1][:2] == ("error", "ZeroDivisionError")
        assert outcomes[0][:2] == ("error", "RuntimeError")
        assert "combine: the exchange of rows failed" in outcomes[0][2]
    finally:
        cluster.stop()
