"""Descriptors, summaries and checks on made-up tables: one process plays any rank of any group."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch

from moe_ops.distributed import RouteSpec, Workspace, route
from moe_ops.distributed.cache import RouteCache
from moe_ops.distributed.descriptors import FIELDS, build, compute, packed_layout, upload
from moe_ops.distributed.placement import ExpertShards
from moe_ops.distributed.spec import INT32_MAX
from moe_ops.distributed.summary import check, header_values, summarise, token_code


def play(ep_size: int, ep_rank: int, num_experts: int, top_k: int = 2, **options: Any) -> RouteSpec:
    """A spec as rank `ep_rank` of a group that does not exist."""
    spec = RouteSpec(num_experts, top_k, options.pop("hidden_size", 8), **options)
    object.__setattr__(spec, "topology", (spec.topology, ep_size, ep_rank))
    object.__setattr__(spec, "ep_size", ep_size)
    object.__setattr__(spec, "ep_rank", ep_rank)
    object.__setattr__(spec, "shards", ExpertShards(num_experts, ep_size))
    return spec


def table_of(counts: list[list[int]], spec: RouteSpec, tokens: list[int] | None = None) -> torch.Tensor:
    tokens = tokens or [sum(row) for row in counts]
    rows = [[*header_values(spec, count, 0, 0), *row] for row, count in zip(counts, tokens, strict=True)]
    return torch.tensor(rows, dtype=torch.int32 if spec.auto else torch.int64)


def random_counts(ep_size: int, num_experts: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 4, (ep_size, num_experts), generator=generator).tolist()


# -- descriptors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize(
    ("ep_size", "num_experts"), [(4, 256), (5, 205), (8, 256), (3, 683), (8, 30), (3, 256), (1, 8), (4, 2)]
)
def test_host_and_device_paths_agree(ep_size: int, num_experts: int, mode: str) -> None:
    """Around R * E = 1024 and 2048 (4 * 256, 5 * 205, 8 * 256, 3 * 683), uneven experts, one rank, idle ranks."""
    counts = random_counts(ep_size, num_experts)
    for ep_rank in {0, ep_size // 2, ep_size - 1}:
        spec = play(ep_size, ep_rank, num_experts, mode=mode)
        table = table_of(counts, spec)
        by_host = upload(compute(table, spec), table.device)
        by_device = build(table, None, spec, 1)
        chosen = build(table, table, spec, 1)
        expected = oracle.metadata(counts, ep_rank, mode)
        for name in FIELDS:
            assert by_host[name].tolist() == expected[name], name
            for other in (getattr(by_device, name), getattr(chosen, name)):
                assert torch.equal(by_host[name], other) and by_host[name].dtype == other.dtype


def test_packed_fields_start_at_512_bytes_and_keep_their_storage() -> None:
    spec = play(2, 0, 4)
    fields = compute(table_of([[1, 2, 3, 4], [5, 6, 7, 8]], spec), spec)
    assert packed_layout(fields) == (dict(zip(FIELDS, range(0, 3585, 512), strict=False)), 3584)
    views = upload(fields, torch.device("cpu"))
    storages = {view.untyped_storage().data_ptr() for view in views.values()}
    assert len(storages) == 1
    begin = storages.pop()
    assert [views[name].data_ptr() - begin for name in FIELDS] == list(range(0, 3584, 512))
    padding = torch.empty(0, dtype=torch.uint8).set_(views["dispatch_src"].untyped_storage())
    for start, name in zip(range(0, 3584, 512), FIELDS, strict=True):
        assert not padding[start + fields[name].nbytes : start + 512].any()
    large = compute(table_of(random_counts(8, 256), play(8, 0, 256)), play(8, 0, 256))
    assert packed_layout(large)[1] == 4 * 2048 + 512 + 2 * 1024


def test_where_descriptors_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 1024 counts on the host; up to 2048 the table is still read; above, neither."""
    log: list[str] = []
    for ep_size, num_experts, expected in ((4, 256, "upload"), (5, 205, "read"), (8, 256, "read"), (3, 683, "")):
        log.clear()
        spec = play(ep_size, 0, num_experts)
        table = table_of(random_counts(ep_size, num_experts), spec)
        real = upload
        monkeypatch.setattr(
            "moe_ops.distributed.descriptors.upload", lambda *a, real=real: log.append("upload") or real(*a)
        )
        agreement = route._agree(table, spec, None)
        route._metadata(agreement, spec, None)
        read = "read" if agreement.host_table is not None else ""
        assert (log or [read])[0] == expected


# -- summary -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ep_size", "num_experts"), [(2, 4), (8, 30), (3, 256), (1, 5), (4, 3)])
def test_summary_of_rows(ep_size: int, num_experts: int) -> None:
    counts = random_counts(ep_size, num_experts, seed=1)
    owned = oracle.owners(num_experts, ep_size)
    for ep_rank in range(ep_size):
        spec = play(ep_size, ep_rank, num_experts)
        summary = summarise(table_of(counts, spec), spec)
        assert list(summary.loads) == oracle.loads(counts)
        assert list(summary.send_rows) == [sum(counts[ep_rank][e] for e in mine) for mine in owned]
        assert list(summary.receive_rows) == [sum(row[e] for e in owned[ep_rank]) for row in counts]
        first = owned[ep_rank][0] if owned[ep_rank] else num_experts
        assert list(summary.source_offsets) == [sum(row[:first]) for row in counts]
        assert summary.sums == tuple(sum(row) for row in counts)


@pytest.mark.parametrize(
    ("counts", "capacities"),
    [
        ([[1, 1, 1, 1]] * 2, (4, 4)),
        ([[2, 1, 1, 0]] * 2, (6, 2)),
        ([[2, 2, 0, 0]] * 2, (8, 1)),
        ([[0, 0, 2, 2]] * 2, (1, 8)),
    ],
)
def test_capacities(counts: list[list[int]], capacities: tuple[int, int]) -> None:
    for ep_rank in range(2):
        spec = play(2, ep_rank, 4)
        agreement = route._agree(table_of(counts, spec, [2, 2]), spec, None)
        assert route._metadata(agreement, spec, None).expert_capacity == capacities[ep_rank]
        assert agreement.summary.maximum == max(capacities)


def test_plan_and_native_limits() -> None:
    spec = play(2, 0, 2, top_k=1, hidden_size=7168)
    summary = summarise(table_of([[299_520, 0], [0, 0]], spec), spec)
    assert summary.plan_tokens == 299_520
    check(summary, spec)
    over = summarise(table_of([[299_521, 0], [0, 0]], spec), spec)
    with pytest.raises(RuntimeError, match="the plan exceeds native INT32 size limits: 299648 tokens"):
        check(over, spec)
    assert token_code(spec, INT32_MAX // 7168) == 0
    assert token_code(spec, INT32_MAX // 7168 + 1) == 1
    refused = table_of([[0, 0], [0, 0]], spec)
    refused[1, 0] += 1
    with pytest.raises(RuntimeError, match=r"tokens per rank exceed native INT32 size limits, got \[0, 0\]"):
        check(summarise(refused, spec), spec)
    assert header_values(spec, 2**40, 0, 1)[1] == INT32_MAX


def test_refusals_of_a_table() -> None:
    limited = play(2, 0, 4, max_local_tokens=257)
    # No rank can receive more than its sources could hold: 2 * 257 * 2 rows, aligned.
    with pytest.raises(RuntimeError, match="counts must describe"):
        check(summarise(table_of([[600, 0, 0, 0], [0] * 4], limited, [257, 0]), limited), limited)
    with pytest.raises(RuntimeError, match=r"token capacity overflow: at most 257 tokens per rank, got \[258, 0\]"):
        check(summarise(table_of([[258, 258, 0, 0], [0] * 4], limited, [258, 0]), limited), limited)
    distinct = play(2, 0, 4, distinct_experts=True)
    with pytest.raises(RuntimeError, match="distinct"):  # ids [[1, 1], [1, 0]]
        check(summarise(table_of([[1, 3, 0, 0], [0] * 4], distinct, [2, 0]), distinct), distinct)
    check(summarise(table_of([[1, 2, 1, 0], [0] * 4], distinct, [2, 0]), distinct), distinct)
    ordinary = play(2, 0, 4)
    check(summarise(table_of([[1, 3, 0, 0], [0] * 4], ordinary, [2, 0]), ordinary), ordinary)


# -- cache ---------------------------------------------------------------------------------------------------------


def sight(table: torch.Tensor, spec: RouteSpec, workspace: Workspace) -> torch.Tensor:
    """The dispatch sizes after one call with this table; the same object where they came from the cache."""
    return route._metadata(route._agree(table, spec, workspace), spec, workspace).dispatch_size


def test_a_changed_topology_never_matches() -> None:
    workspace = Workspace()
    counts = random_counts(2, 4)
    specs = [play(2, 0, 4), play(2, 0, 4), play(2, 0, 4, mode="pull"), play(2, 1, 4), play(2, 0, 4, hidden_size=16)]
    table = table_of(counts, specs[0])
    first = [sight(table, specs[0], workspace) for _ in range(3)][-1]
    assert sight(table, specs[1], workspace) is first  # an equal spec is the same topology
    for spec in specs[2:]:
        assert sight(table_of(counts, spec), spec, workspace) is not first
        assert workspace.route_cache.entry is not None and workspace.route_cache.entry.metadata is None
    assert sight(table, specs[0], Workspace()) is not first


@pytest.mark.parametrize(
    ("options", "applies"),
    [({}, True), ({"max_local_tokens": 4}, False), ({"tokens": "static"}, False), ({"num_experts": 1025}, False)],
)
def test_where_the_cache_applies(options: dict[str, Any], applies: bool) -> None:
    spec = play(2, 0, options.pop("num_experts", 4), **options)
    assert RouteCache.applies(spec) is applies


def test_headers_are_kept_after_two_identical_calls() -> None:
    workspace = Workspace()
    spec = play(2, 0, 4)
    headers = [
        workspace.header_cache.get(header_values(spec, tokens, 0, 0), torch.int32, torch.device("cpu"))
        for tokens in (5, 5, 5, 6, 5, 5)
    ]
    kept = [header is headers[1] for header in headers]
    assert kept == [False, True, True, False, False, False]
    assert headers[3].tolist()[1] == 6
