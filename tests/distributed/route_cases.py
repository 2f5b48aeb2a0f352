"""What the processes of the route tests run. Each function is called on every rank of a gloo group."""

from __future__ import annotations

from dataclasses import fields
from typing import Any
from unittest import mock

import oracle
import torch
import torch.distributed as dist

from moe_ops.distributed import RouteSpec, Workspace, combine, dispatch, prepare_topk_route
from moe_ops.distributed import route as route_module
from moe_ops.distributed.spec import Route

HIDDEN = 4


def make_spec(num_experts: int, top_k: int, **options: Any) -> RouteSpec:
    return RouteSpec(num_experts, top_k, HIDDEN, dist.group.WORLD, **options)


def rows_of(rank: int, tokens: int) -> torch.Tensor:
    """[tokens, HIDDEN] float32 whose first column names the rank and whose second the token."""
    rows = torch.zeros(tokens, HIDDEN)
    rows[:, 0], rows[:, 1] = rank, torch.arange(tokens)
    return rows


def prepare(ids: torch.Tensor, spec: RouteSpec, **options: Any) -> Route:
    workspace = options.pop("workspace", None)
    if spec.mode == "pull" and workspace is None:
        workspace = Workspace()
        workspace.claim("test")
    hidden_states = rows_of(spec.ep_rank, ids.shape[0])
    weights = torch.ones(ids.shape, dtype=torch.float32)
    return prepare_topk_route(hidden_states, ids, weights, spec, workspace=workspace, **options)


def as_lists(route: Route) -> dict[str, Any]:
    found = {field.name: getattr(route.metadata, field.name) for field in fields(route.metadata)}
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in found.items()}


def described(all_ids: list[list[list[int]]], num_experts: int, top_k: int, options: dict[str, Any]) -> dict[str, Any]:
    """Prepare a route and return its metadata and the rest as lists."""
    spec = make_spec(num_experts, top_k, **options)
    ids = torch.tensor(all_ids[spec.ep_rank], dtype=torch.int64).reshape(-1, top_k)
    with torch.no_grad():
        route = prepare(ids, spec)
    return as_lists(route) | {
        "row_map": route.row_map.reshape(-1).tolist(),
        "row_map_dtype": str(route.row_map.dtype),
        "received_counts": route.received_counts.tolist(),
        "maximum": route.maximum_received_slots,
        "loads": list(route.loads),
        "tokens_per_expert": route.tokens_per_expert.tolist(),
    }


def from_counts(counts: list[list[int]], top_k: int, options: dict[str, Any]) -> dict[str, Any]:
    """As `described`, with ids made from given counts (rank's row); slots that are left over are -1."""
    row = counts[dist.get_rank()]
    flat = [expert for expert, count in enumerate(row) for _ in range(count)]
    flat += [-1] * (-len(flat) % top_k)
    ids = [[flat[i : i + top_k] for i in range(0, len(flat), top_k)]] * dist.get_world_size()
    return described(ids, len(row), top_k, options)


def round_trip(seed: int, tokens: list[int], num_experts: int, top_k: int, skew: int, options: dict[str, Any]) -> None:
    """Random ids, -1 and duplicates included; exact layout of every received row, exact return, exact metadata."""
    grouped, use_workspace = options.pop("grouped"), options.pop("workspace")
    spec = make_spec(num_experts, top_k, **options)
    generator = torch.Generator().manual_seed(seed)
    all_ids = [torch.randint(-1, max(1, num_experts // skew), (t, top_k), generator=generator) for t in tokens]
    all_ids = [ids.to(torch.int32 if seed % 2 else torch.int64) for ids in all_ids]
    counts = [oracle.histogram(ids, num_experts) for ids in all_ids]
    rank = spec.ep_rank
    workspace = Workspace() if use_workspace or spec.mode == "pull" else None
    # Every other seed takes the path of large expansions: into the workspace, after agreement.
    limit = 0 if seed % 4 < 2 else route_module.PULL_STAGING_LIMIT
    with torch.no_grad(), mock.patch.object(route_module, "PULL_STAGING_LIMIT", limit):
        if workspace is not None:
            workspace.claim("test")
        route = prepare(all_ids[rank], spec, workspace=workspace)
        received = dispatch(route, workspace, grouped=grouped)
        expected = oracle.metadata(counts, rank, spec.mode)
        found = as_lists(route)
        assert {name: found[name] for name in expected} == expected
        assert list(route.loads) == oracle.loads(counts)
        assert route.maximum_received_slots == max(route.loads)
        assert found["expert_capacity"] == max(1, route.loads[rank])
        check_arrival(received.hidden_states, received.expert_ids, all_ids, num_experts, rank, grouped)
        if grouped:
            assert received.group_ends is not None
            assert received.group_ends.tolist() == expected["group_ends"]
        returned = combine(route, received, received.hidden_states.double(), None)
        assert torch.equal(returned, route.permuted_hidden_states[: sum(route.send_rows)].double())


def check_arrival(
    rows: torch.Tensor,
    expert_ids: torch.Tensor,
    all_ids: list[torch.Tensor],
    num_experts: int,
    rank: int,
    grouped: bool,
) -> None:
    """Each row is the one that the layout demands: (expert, source) major if grouped, else (source, expert)."""
    owned = oracle.owners(num_experts, len(all_ids))[rank]
    order = [
        (local, source) if grouped else (source, local)
        for local, source in [(j, s) for j in range(len(owned)) for s in range(len(all_ids))]
    ]
    expected_rows, expected_ids = [], []
    for first, second in sorted(order):
        local, source = (first, second) if grouped else (second, first)
        for token, row in enumerate(all_ids[source].tolist()):
            for expert in row:
                if expert == owned[local]:
                    expected_rows.append([source, token])
                    expected_ids.append(local)
    assert rows[:, :2].tolist() == expected_rows
    assert expert_ids.tolist() == expected_ids


def refused(tokens: list[int], changes: list[dict[str, Any]], spec_options: dict[str, Any]) -> tuple[str, str, bool]:
    """One call in which this rank's part is changed; returns the error and whether the workspace stayed untouched."""
    rank = dist.get_rank()
    change = dict(changes[rank])
    spec = make_spec(change.pop("num_experts", 4), change.pop("top_k", 2), **(spec_options | change.pop("spec", {})))
    ids = torch.tensor([[0, 1]] * tokens[rank], dtype=torch.int64).reshape(-1, 2)[:, : spec.top_k]
    ids = change.pop("ids", lambda ids: ids)(ids) if "ids" in change else ids
    counts = change.pop("counts", None)
    workspace = Workspace()
    workspace.claim("test")
    workspace.grow(512, 512, top_k=2, hidden_size=HIDDEN, dtype=torch.float32)
    regions = [workspace.view(name, 512, HIDDEN, torch.float32).fill_(7.0) for name in ("source", "receive", "combine")]
    hidden_states = rows_of(rank, ids.shape[0])
    if change.pop("bad_ids", False):
        ids = ids.float()
    weights = torch.ones(ids.shape)
    called = []
    try:
        with torch.no_grad():
            prepare_topk_route(
                hidden_states,
                ids,
                weights,
                spec,
                None if counts is None else torch.tensor(counts),
                workspace,
                autograd_mask=change.pop("autograd_mask", 0),
                prepare_workspace=lambda plan, maximum: called.append((plan, maximum)),
            )
    except (RuntimeError, ValueError) as error:
        untouched = not called and all(bool((region == 7.0).all()) for region in regions)
        return type(error).__name__, str(error), untouched
    return "none", "", False


def events(mode: str, options: dict[str, Any], staging_limit: int = route_module.PULL_STAGING_LIMIT) -> list[str]:
    """The order of reuse, gather, permutation and wait."""
    log: list[str] = []
    workspace = Workspace()
    workspace.claim("test")
    spec = make_spec(4, 2, mode=mode, **options)

    def logged(name: str, function: Any) -> Any:
        def wrapper(*arguments: Any, **keywords: Any) -> Any:
            log.append(name)
            return function(*arguments, **keywords)

        return wrapper

    with (
        mock.patch.object(route_module, "PULL_STAGING_LIMIT", staging_limit),
        mock.patch.object(workspace, "wait_reuse", logged("reuse", workspace.wait_reuse)),
        mock.patch.object(workspace, "grow", logged("grow", workspace.grow)),
        mock.patch.object(route_module, "_start_gather", logged("gather", route_module._start_gather)),
        mock.patch.object(route_module, "_finish_gather", logged("wait", route_module._finish_gather)),
        mock.patch.object(route_module.ops, "topk_permute", logged("permute", route_module.ops.topk_permute)),
        mock.patch.object(route_module.ops, "topk_permute_out", logged("place", route_module.ops.topk_permute_out)),
        torch.no_grad(),
    ):
        prepare(torch.tensor([[0, 3], [1, 2]]), spec, workspace=workspace)
    return log


def trusted_counts() -> None:
    """Given counts are used as they are; int64 is converted; the table never aliases them."""
    spec = make_spec(4, 2)
    ids = torch.tensor([[0, 3], [2, 0]])
    counts = torch.tensor([2, 0, 1, 1], dtype=torch.int32)
    with torch.no_grad():
        route = prepare(ids, spec, tokens_per_expert=counts)
        assert route.tokens_per_expert is counts
        before = as_lists(route)
        counts.fill_(77)
        assert as_lists(route) == before
        route = prepare(ids, spec, tokens_per_expert=torch.tensor([2, 0, 1, 1]))
    assert route.tokens_per_expert.dtype == torch.int32
    assert route.received_counts[:, 0].tolist() == [[2, 0, 1, 1][spec.shards.first(spec.ep_rank)]] * spec.ep_size


def growth(plan: list[list[int]]) -> list[tuple[int, int]]:
    """Sizes of the source region and generation after each call, with other token counts per call and rank."""
    spec = make_spec(4, 2)
    workspace = Workspace()
    seen = []
    for tokens in plan:
        with torch.no_grad(), workspace.lease("test"):
            prepare(torch.zeros(tokens[spec.ep_rank], 2, dtype=torch.int64), spec, workspace=workspace)
        seen.append((workspace.nbytes("source"), workspace.nbytes("receive"), workspace.generation))
    return seen


def cached(tables: list[list[list[int]]], num_experts: int) -> list[tuple[int, bool, int]]:
    """Per call: cache hits, whether the metadata is the object of the call before, and the back-off."""
    spec = make_spec(num_experts, 1)
    workspace = Workspace()
    workspace.claim("test")
    log, last = [], None
    for table in tables:
        ids = torch.tensor(table[spec.ep_rank], dtype=torch.int64).reshape(-1, 1)
        with torch.no_grad():
            route = prepare(ids, spec, workspace=workspace)
        same = last is not None and route.metadata.dispatch_src.data_ptr() == last.metadata.dispatch_src.data_ptr()
        counts = [oracle.histogram(torch.tensor(rows).reshape(-1, 1), num_experts) for rows in table]
        expected = oracle.metadata(counts, spec.ep_rank, "push") if num_experts < 64 else {}
        found = as_lists(route)
        assert {name: found[name] for name in expected} == expected
        log.append((workspace.route_cache.hits, same, workspace.route_cache.back_off))
        last = route
    return log
