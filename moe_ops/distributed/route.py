"""From router output to a prepared route: permute, agree with the other ranks, describe the exchange.

gather of counts starts -> permutation -> gather awaited -> checks, alike on all ranks -> buffers -> descriptors
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from moe_ops import ops
from moe_ops._errors import argument_error, require
from moe_ops.distributed import collectives, descriptors
from moe_ops.distributed.cache import CachedRoute, RouteCache, make_header
from moe_ops.distributed.descriptors import HOST_TABLE_LIMIT
from moe_ops.distributed.spec import Route, RouteMetadata, RouteSpec
from moe_ops.distributed.summary import (
    HEADER_WORDS,
    OP,
    Summary,
    check,
    dtype_bits,
    header_values,
    summarise,
    token_code,
)
from moe_ops.distributed.workspace import Workspace
from moe_ops.meta._checks import FLOATS, FLOATS_TEXT, check_device, check_ids, check_weights

PULL_STAGING_LIMIT = 64 * 2**20  # bytes: larger expansions are permuted straight into the workspace, after agreement

_LEASES_BIT = 1 << 30  # of the mask: rows lie where peers pull them, which all ranks must do or none

PrepareWorkspace = Callable[[int, int], object]


def prepare_topk_route(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    spec: RouteSpec,
    tokens_per_expert: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    *,
    autograd_mask: int = 0,
    combine_dtype: torch.dtype | None = None,
    prepare_workspace: PrepareWorkspace | None = None,
) -> Route:
    """Permute this rank's tokens and agree with the other ranks on who sends what where. A collective.

    - `hidden_states` `[T, H]` float; T may differ between ranks (dynamic) and may be 0.
    - `topk_ids` `[T, K]` int32 or int64; an id outside [0, E) means no expert.
    - `topk_weights` `[T, K]` float; only checked here, used when rows are restored.
    - `tokens_per_expert` `[E]` int32 or int64: trusted counts of a router; without it the ids are counted.
    - `workspace`: leased buffers and caches; required, and claimed by the caller, in dynamic pull mode.
    - `autograd_mask`: what takes part in autograd on this rank; must be the same on all ranks.
    - `combine_dtype`: of the rows that come back (None: of `hidden_states`); both must be the same on all ranks.
    - `prepare_workspace(plan_tokens, maximum)`: called with agreed numbers before any write, to grow buffers; by
      default the workspace's own `grow`.

    Reads a few numbers on the host, so it cannot be captured: `prepare_static_route` can.

    Where any rank refuses (arguments, limits, counts, masks, another spec), every rank raises before anything is
    written: RuntimeError with the same text; the rank whose arguments are wrong raises ValueError with the argument's
    name instead.
    """
    collectives.agree((spec.num_experts,), spec.group, hidden_states.device, OP, "RouteSpec")
    _refuse_together(hidden_states, topk_ids, topk_weights, spec, tokens_per_expert, workspace)
    tokens = hidden_states.shape[0]
    counts = count_tokens(topk_ids, spec.num_experts) if tokens_per_expert is None else _as_int32(tokens_per_expert)
    if workspace is not None and spec.mode == "push":
        workspace.wait_reuse()

    code = token_code(spec, tokens)
    payload_counts = counts if tokens_per_expert is None else _poisoned_where_wrong(counts, topk_ids, spec)
    mask = autograd_mask | dtype_bits(hidden_states.dtype, combine_dtype)
    mask |= _LEASES_BIT if _uses_source_buffer(spec, workspace) else 0
    payload = _payload(header_values(spec, tokens, mask, code), payload_counts, spec, workspace)
    pending = _start_gather(payload, spec)
    direct = _permutes_into_workspace(hidden_states, topk_ids, spec, workspace)
    permuted = None if code or direct else ops.topk_permute(hidden_states, topk_ids, spec.num_experts)[:2]
    agreement = _agree(_finish_gather(pending, spec), spec, workspace)

    _grow(agreement.summary, hidden_states, spec, workspace, prepare_workspace)
    rows, row_map = _place(permuted, hidden_states, topk_ids, spec, workspace)
    metadata = _metadata(agreement, spec, workspace)
    summary = agreement.summary
    if spec.tokens == "dynamic":
        metadata = replace(metadata, local_num_tokens=tokens, plan_tokens=summary.plan_tokens)
    return Route(
        spec=spec,
        permuted_hidden_states=rows,
        row_map=row_map,
        tokens_per_expert=counts,
        received_counts=metadata.combine_size.view(spec.ep_size, spec.max_local_experts),
        maximum_received_slots=summary.maximum,
        metadata=metadata,
        loads=summary.loads,
        send_rows=summary.send_rows,
        receive_rows=summary.receive_rows,
        source_offsets=summary.source_offsets,
    )


def count_tokens(topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[E] int32 counts of the ids in [0, E): a histogram of fixed length, so nothing is read on the host."""
    valid = (topk_ids >= 0) & (topk_ids < num_experts)
    slots = torch.where(valid, topk_ids, num_experts).reshape(-1).to(torch.int64)
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=topk_ids.device)
    return counts.scatter_add_(0, slots, torch.ones_like(slots, dtype=torch.int32))[:num_experts]


def _as_int32(tokens_per_expert: torch.Tensor) -> torch.Tensor:
    return tokens_per_expert.to(torch.int32).contiguous()


def _poisoned_where_wrong(counts: torch.Tensor, topk_ids: torch.Tensor, spec: RouteSpec) -> torch.Tensor:
    """Given counts, or -1 everywhere if their sum is not the number of routed slots; all ranks then reject the row."""
    routed = ((topk_ids >= 0) & (topk_ids < spec.num_experts)).sum()
    return torch.where(counts.sum() == routed, counts, -1)


# -- refusal before the collective ---------------------------------------------------------------------------------


def _refuse_together(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    spec: RouteSpec,
    tokens_per_expert: torch.Tensor | None,
    workspace: Workspace | None,
) -> None:
    """Raise for wrong arguments, after telling the other ranks: they would wait for this one until a time-out."""
    code = 2
    try:
        require(
            hidden_states.dim() == 2 and hidden_states.shape[1] == spec.hidden_size and hidden_states.dtype in FLOATS,
            OP,
            "hidden_states",
            f"[num_tokens, {spec.hidden_size}] {FLOATS_TEXT}",
            hidden_states,
        )
        code = 3
        check_ids(OP, topk_ids, hidden_states.shape[0], topk_weights)
        expected = f"[{hidden_states.shape[0]}, {spec.top_k}] int32 or int64"
        require(topk_ids.shape[1] == spec.top_k, OP, "topk_ids", expected, topk_ids)
        code = 4
        check_weights(OP, topk_weights, hidden_states.shape[0], spec.top_k)
        code = 5
        check_device(OP, hidden_states, topk_ids=topk_ids, topk_weights=topk_weights)
        code = 6
        if tokens_per_expert is not None:
            fits = list(tokens_per_expert.shape) == [spec.num_experts]
            fits = fits and tokens_per_expert.dtype in (torch.int32, torch.int64)
            require(fits, OP, "tokens_per_expert", f"[{spec.num_experts}] int32 or int64", tokens_per_expert)
            check_device(OP, hidden_states, tokens_per_expert=tokens_per_expert)
        code = 7
        _check_workspace(hidden_states, spec, workspace)
    except Exception:
        if spec.group is not None:
            values = header_values(spec, 0, 0, code)
            device = hidden_states.device if isinstance(hidden_states, torch.Tensor) else torch.device("cpu")
            nothing = torch.zeros(spec.num_experts, dtype=torch.int32, device=device)
            _finish_gather(_start_gather(_payload(values, nothing, spec, None), spec), spec)
        raise


def _check_workspace(hidden_states: torch.Tensor, spec: RouteSpec, workspace: Workspace | None) -> None:
    if workspace is not None and workspace.device != hidden_states.device:
        raise argument_error(OP, "workspace", f"on {hidden_states.device}", str(workspace.device))
    needed = spec.mode == "pull" and (workspace is not None or spec.tokens == "dynamic")
    if needed and (workspace is None or not workspace.claimed):
        raise RuntimeError(f"{OP}: pull mode needs an initialised workspace that the caller has claimed")


# -- the collective ------------------------------------------------------------------------------------------------


def _payload(
    values: tuple[int, int, int], counts: torch.Tensor, spec: RouteSpec, workspace: Workspace | None
) -> torch.Tensor:
    """[3 + E]: header and counts, int32 with automatic capacity; a copy, so that a router may reuse its counts."""
    dtype = torch.int32 if spec.auto else torch.int64
    if workspace is not None and spec.auto:
        header = workspace.header_cache.get(values, dtype, counts.device)
    else:
        header = make_header(values, dtype, counts.device)
    return torch.cat((header, counts.to(dtype)))


def _start_gather(payload: torch.Tensor, spec: RouteSpec) -> torch.Tensor:
    if spec.group is None:
        return payload
    try:
        return collectives.start_all_gather(payload, spec.group)
    except RuntimeError as error:
        raise collectives.failure(OP, "the gather of counts", error) from error


def _finish_gather(pending: torch.Tensor, spec: RouteSpec) -> torch.Tensor:
    """[R, 3 + E], one row per rank."""
    try:
        return collectives.wait(pending).view(spec.ep_size, HEADER_WORDS + spec.num_experts)
    except RuntimeError as error:
        raise collectives.failure(OP, "the gather of counts", error) from error


# -- after the collective: the same on every rank -------------------------------------------------------------------


@dataclass
class _Agreement:
    table: torch.Tensor  # [R, 3 + E] on the device
    host_table: torch.Tensor | None
    summary: Summary
    cached: CachedRoute | None


def _cache(spec: RouteSpec, workspace: Workspace | None) -> RouteCache | None:
    return workspace.route_cache if workspace is not None and RouteCache.applies(spec) else None


def _agree(table: torch.Tensor, spec: RouteSpec, workspace: Workspace | None) -> _Agreement:
    """Read what the host needs of the table, once, and check it."""
    cache = _cache(spec, workspace)
    host_table = None
    if spec.ep_size * spec.num_experts <= HOST_TABLE_LIMIT and not (cache and cache.skip_table(spec, table.device)):
        host_table = table.cpu()
    if cache is not None and host_table is not None:
        cached = cache.look_up(spec, table.device, host_table)
        if cached is not None:
            return _Agreement(table, host_table, cached.summary, cached)
    summary = summarise(table if host_table is None else host_table, spec)
    check(summary, spec)
    return _Agreement(table, host_table, summary, None)


def _metadata(agreement: _Agreement, spec: RouteSpec, workspace: Workspace | None) -> RouteMetadata:
    cached = agreement.cached
    if cached is not None and cached.metadata is not None:
        return cached.metadata
    capacity = max(1, agreement.summary.loads[spec.ep_rank])
    metadata = descriptors.build(agreement.table, agreement.host_table, spec, capacity)
    cache = _cache(spec, workspace)
    if cache is not None and agreement.host_table is not None:
        device = agreement.table.device
        cache.store(spec, device, agreement.host_table, agreement.summary, metadata, cached)
    return metadata


def _grow(
    summary: Summary,
    hidden_states: torch.Tensor,
    spec: RouteSpec,
    workspace: Workspace | None,
    prepare_workspace: PrepareWorkspace | None,
) -> None:
    if prepare_workspace is not None:
        prepare_workspace(summary.plan_tokens, summary.maximum)
    elif workspace is not None:
        workspace.grow(
            summary.plan_tokens,
            summary.maximum,
            top_k=spec.top_k,
            hidden_size=spec.hidden_size,
            dtype=hidden_states.dtype,
        )


# -- the permutation -----------------------------------------------------------------------------------------------


def _uses_source_buffer(spec: RouteSpec, workspace: Workspace | None) -> bool:
    """Pull mode leaves the rows in the workspace, where peers can read them."""
    return spec.mode == "pull" and workspace is not None and workspace.leases


def _permutes_into_workspace(
    hidden_states: torch.Tensor, topk_ids: torch.Tensor, spec: RouteSpec, workspace: Workspace | None
) -> bool:
    """Too large to be staged in ordinary memory while the gather is in flight."""
    nbytes = topk_ids.numel() * spec.hidden_size * hidden_states.dtype.itemsize
    return _uses_source_buffer(spec, workspace) and nbytes > PULL_STAGING_LIMIT


def _place(
    permuted: tuple[torch.Tensor, torch.Tensor] | None,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    spec: RouteSpec,
    workspace: Workspace | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(permuted rows, row map); in pull mode the rows enter the source buffer here, after all ranks have agreed."""
    if workspace is None or not _uses_source_buffer(spec, workspace):
        assert permuted is not None
        return permuted
    source = workspace.view("source", topk_ids.numel(), spec.hidden_size, hidden_states.dtype)
    if permuted is not None:
        return source.copy_(permuted[0]), permuted[1]
    return source, ops.topk_permute_out(hidden_states, topk_ids, spec.num_experts, out=source)[0]
