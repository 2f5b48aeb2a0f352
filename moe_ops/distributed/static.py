"""The capture-safe route: sizes are fixed by a capacity, nothing is read on the host.

Every pair of ranks exchanges `capacity` rows, used or not, so that shapes depend on nothing but the configuration. What
does not fit is never dropped silently: the rows of affected tokens are NaN, `overflow` says so on the device, and
`check` raises on the host, after the replay, with the same text on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from moe_ops import ops
from moe_ops._errors import require
from moe_ops.distributed import collectives
from moe_ops.distributed.placement import first_experts, owners
from moe_ops.distributed.route import count_tokens
from moe_ops.distributed.spec import RouteSpec
from moe_ops.distributed.summary import dtype_bits
from moe_ops.meta._checks import check_ids, check_rows

OP = "prepare_static_route"


def pair_capacity(num_tokens: int, spec: RouteSpec) -> int:
    """Rows that no pair of ranks can exceed with `num_tokens` tokens a rank: nothing can overflow with it."""
    slots = min(spec.top_k, spec.max_local_experts) if spec.distinct_experts else spec.top_k
    return max(1, num_tokens * slots)


@dataclass(frozen=True)
class StaticRoute:
    """All tensors have static shapes. R ranks, C capacity, L = `max_local_experts`.

    - `send_hidden_states` `[R * C, H]`: rows for rank t begin at `t * C`; unused rows are 0.
    - `row_map` `[T, K]` int32: the row of each slot in that layout, -1 for no row or no room.
    - `expert_ids` `[R * C]` int32: local expert of each row that arrives, -1 for unused.
    - `received_counts` `[R, L]` int32, `loads` `[R]` int64: as routed, before any truncation.
    - `lost` `[T]` bool: tokens of which a slot found no room; `overflow` `[R]` bool: per rank, any pair above capacity;
      `disagree` [] bool: some rank has another spec.
    """

    spec: RouteSpec
    capacity: int
    send_hidden_states: torch.Tensor
    row_map: torch.Tensor
    expert_ids: torch.Tensor
    tokens_per_expert: torch.Tensor
    received_counts: torch.Tensor
    loads: torch.Tensor
    lost: torch.Tensor
    overflow: torch.Tensor
    disagree: torch.Tensor

    def check(self) -> None:
        """Read the flags on the host and raise if the last run lost rows. Not for use inside a capture."""
        check_flags(self.spec, self.capacity, self.overflow, self.disagree)


def check_flags(spec: RouteSpec, capacity: int, overflow: torch.Tensor, disagree: torch.Tensor) -> None:
    if bool(disagree):
        raise RuntimeError(f"{OP}: every rank must have the same RouteSpec, some rank differs")
    ranks = overflow.nonzero().reshape(-1).tolist()
    if ranks:
        raise RuntimeError(
            f"{OP}: capacity overflow: more than {capacity} rows for one rank from ranks {ranks};"
            f" the affected tokens are NaN. {pair_capacity(1, spec)} rows per token always suffice"
        )


def prepare_static_route(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    spec: RouteSpec,
    capacity: int,
    *,
    combine_dtype: torch.dtype | None = None,
) -> StaticRoute:
    """Permute, gather the counts and lay the rows out for an exchange of equal parts. A collective; can be captured.

    `capacity`, the dtype of `hidden_states` and `combine_dtype`, that of the rows that come back (None: the same), must
    be those of all ranks. They are compared when they are new on this rank, outside captures and compiled code.
    """
    check_rows(OP, "hidden_states", hidden_states)
    check_ids(OP, topk_ids, hidden_states.shape[0])
    fits = hidden_states.shape[1] == spec.hidden_size
    require(fits, OP, "hidden_states", f"[num_tokens, {spec.hidden_size}]", hidden_states)
    require(topk_ids.shape[1] == spec.top_k, OP, "topk_ids", f"[num_tokens, {spec.top_k}]", topk_ids)
    require(capacity >= 1, OP, "capacity", "at least 1", capacity)

    if not torch.compiler.is_compiling() and not _capturing(hidden_states.device):
        dtypes = dtype_bits(hidden_states.dtype, combine_dtype)
        agreed = (spec.num_experts, spec.hidden_size, capacity, dtypes)
        collectives.agree(agreed, spec.group, hidden_states.device, OP, "RouteSpec, capacity and dtypes")
    counts = count_tokens(topk_ids, spec.num_experts)
    # Word 0 tells ranks that were set up differently; the device compares it, since the host reads nothing.
    header = torch.full((1,), spec.fingerprint, dtype=torch.int32, device=counts.device)
    pending = torch.cat((header, counts))
    if spec.group is not None:
        pending = collectives.start_all_gather(pending, spec.group)
    permuted, row_map, _ = ops.topk_permute(hidden_states, topk_ids, spec.num_experts)
    table = collectives.wait(pending).view(spec.ep_size, 1 + spec.num_experts)

    first = first_experts(spec.shards, counts.device)
    edges = pad(table[:, 1:].cumsum(1, dtype=torch.int64), (1, 0)).index_select(1, first)  # [R, R + 1]
    pairs = edges.diff(dim=1)  # [source, destination]
    begins, sizes = edges[spec.ep_rank, :-1], pairs[spec.ep_rank]
    slot = torch.arange(spec.ep_size * capacity, device=counts.device)
    rank, place = slot // capacity, slot % capacity
    source_row = torch.where(place < sizes[rank], begins[rank] + place, -1).to(torch.int32)
    send_hidden_states = ops.topk_unpermute(permuted, source_row[:, None])

    received = _received_counts(table[:, 1:], spec)
    ends = received.cumsum(1, dtype=torch.int64)  # [R, L]
    places = place.view(spec.ep_size, capacity)
    expert = torch.searchsorted(ends, places, right=True)
    expert_ids = torch.where(places < ends[:, -1:], expert, -1).to(torch.int32).reshape(-1)
    padded_map = _padded_row_map(row_map, owners(spec.shards, topk_ids), edges[spec.ep_rank], capacity)
    return StaticRoute(
        spec=spec,
        capacity=capacity,
        send_hidden_states=send_hidden_states,
        row_map=padded_map,
        expert_ids=expert_ids,
        tokens_per_expert=counts,
        received_counts=received,
        loads=pairs.sum(0),
        lost=((row_map >= 0) & (padded_map < 0)).any(1),
        overflow=(pairs > capacity).any(1),
        disagree=(table[:, 0] != header).any(),
    )


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _received_counts(counts: torch.Tensor, spec: RouteSpec) -> torch.Tensor:
    """[R, L] int32, this rank's columns of [R, E]; virtual experts of a smaller rank are empty."""
    mine = spec.shards.owned(spec.ep_rank)
    return pad(counts[:, mine.start : mine.stop], (0, spec.max_local_experts - len(mine)))


def _padded_row_map(row_map: torch.Tensor, rank: torch.Tensor, edges: torch.Tensor, capacity: int) -> torch.Tensor:
    """Rows of the permuted buffer to rows of the padded one; `rank` [T, K] owns a slot, `edges` [R + 1] are the ends of
    the ranks' blocks."""
    row = row_map.to(torch.int64)
    place = row - edges[rank]
    return torch.where((row >= 0) & (place < capacity), rank * capacity + place, -1).to(torch.int32)


def static_dispatch(route: StaticRoute) -> torch.Tensor:
    """[R * C, H]: the rows for this rank's experts, with `route.expert_ids`. A collective."""
    return collectives.all_to_all_rows(route.send_hidden_states, None, None, route.spec.group)


def static_combine(
    route: StaticRoute, expert_rows: torch.Tensor, topk_weights: torch.Tensor | None = None
) -> torch.Tensor:
    """[T, H]: each token's weighted sum in slot order; NaN for tokens that lost a slot. A collective."""
    returned = collectives.all_to_all_rows(expert_rows.contiguous(), None, None, route.spec.group)
    output = ops.topk_unpermute(returned, route.row_map, topk_weights)
    return output.masked_fill((route.lost | route.disagree)[:, None], float("nan"))
