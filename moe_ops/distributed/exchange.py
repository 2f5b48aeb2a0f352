"""Move rows along a prepared route: to the ranks that own the experts, and back.

The transport is an all-to-all with uneven counts; experts of a rank are neighbours, so the rows for a rank are one
block. In pull mode with symmetric memory, rows are read from and written into the peers' buffers instead. Results are
the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moe_ops.distributed import collectives
from moe_ops.distributed.spec import Route
from moe_ops.distributed.workspace import Workspace

DISPATCH = "dispatch"
COMBINE = "combine"


@dataclass(frozen=True)
class ReceivedRows:
    """Rows for this rank's experts.

    - `hidden_states` `[load, H]`; in a leased workspace they are valid until the lease ends.
    - `expert_ids` `[load]` int32: local expert of each row.
    - `group_ends` `[L]` int64 ends of the experts' rows where `grouped` (the metadata's layout: expert-major, then by
      source), else None: rows lie as they came, by source and then by expert.
    """

    hidden_states: torch.Tensor
    expert_ids: torch.Tensor
    group_ends: torch.Tensor | None
    order: tuple[torch.Tensor, torch.Tensor] | None  # index to grouped order, and its inverse


class _Reorder(torch.autograd.Function):
    """rows[index] for a permutation; the gradient is a gather by the inverse, without atomics."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index, inverse)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        index, inverse = ctx.saved_tensors
        return _Reorder.apply(grads[0], inverse, index), None, None


def grouped_order(route: Route) -> tuple[torch.Tensor, torch.Tensor]:
    """`(index, inverse)`, each [load] int64: grouped[i] = arrived[index[i]], by the offsets of the metadata."""
    sizes, load = route.received_counts.reshape(-1).to(torch.int64), route.num_received
    arrived = sizes.cumsum(0) - sizes  # begin of block (s, j) among the rows as they came
    grouped = route.metadata.combine_src  # begin of the same block in the receive buffer
    place = torch.arange(load, device=sizes.device)
    inverse = place + torch.repeat_interleave(grouped - arrived, sizes, output_size=load)
    index = torch.empty_like(inverse).scatter_(0, inverse, place)
    return index, inverse


def local_expert_ids(route: Route, grouped: bool) -> torch.Tensor:
    """[load] int32, the local expert of each received row."""
    counts = route.received_counts.to(torch.int64)  # [R, L]
    experts = torch.arange(counts.shape[1], device=counts.device, dtype=torch.int32)
    if grouped:
        return torch.repeat_interleave(experts, counts.sum(0), output_size=route.num_received)
    return torch.repeat_interleave(experts.repeat(counts.shape[0]), counts.reshape(-1), output_size=route.num_received)


def dispatch(route: Route, workspace: Workspace | None = None, *, grouped: bool = True) -> ReceivedRows:
    """Send this rank's permuted rows away and receive the rows of this rank's experts. A collective."""
    rows = route.permuted_hidden_states[: sum(route.send_rows)]
    if route.spec.group is None:
        arrived = rows
    elif _pulls(route, workspace):
        arrived = _pull(route, workspace, rows.dtype)
    else:
        arrived = _exchange(rows, route.receive_rows, route.send_rows, route, workspace, "receive", DISPATCH)
    expert_ids = local_expert_ids(route, grouped)
    if not grouped:
        return ReceivedRows(arrived, expert_ids, None, None)
    if route.spec.ep_size == 1:  # one source: the order of arrival is the grouped one
        return ReceivedRows(arrived, expert_ids, route.metadata.group_ends, None)
    order = grouped_order(route)
    return ReceivedRows(_Reorder.apply(arrived, *order), expert_ids, route.metadata.group_ends, order)


def combine(
    route: Route, received: ReceivedRows, expert_rows: torch.Tensor, workspace: Workspace | None = None
) -> torch.Tensor:
    """Send `expert_rows` [load, H], one for each row of `received`, back to their sources. A collective.

    Returns this rank's rows in the order of `route.permuted_hidden_states` (as many as were sent): `topk_unpermute`
    with `route.row_map` sums them in slot order, whatever the ranks.
    """
    if received.order is not None:
        index, inverse = received.order
        expert_rows = _Reorder.apply(expert_rows, inverse, index)
    if route.spec.group is None:
        return expert_rows
    if _pulls(route, workspace):
        return _write_back(route, workspace, expert_rows)
    return _exchange(
        expert_rows.contiguous(), route.send_rows, route.receive_rows, route, workspace, "combine", COMBINE
    )


def _exchange(
    rows: torch.Tensor,
    receive_rows: tuple[int, ...],
    send_rows: tuple[int, ...],
    route: Route,
    workspace: Workspace | None,
    region: str,
    op: str,
) -> torch.Tensor:
    out, total = None, sum(receive_rows)
    nbytes = total * rows.shape[1] * rows.dtype.itemsize
    if workspace is not None and workspace.leases and nbytes <= workspace.nbytes(region):
        out = workspace.view(region, total, rows.shape[1], rows.dtype)
    try:
        return collectives.all_to_all_rows(rows, receive_rows, send_rows, route.spec.group, out)
    except RuntimeError as error:
        raise collectives.failure(op, "the exchange of rows", error) from error


# -- symmetric memory ----------------------------------------------------------------------------------------------


def _pulls(route: Route, workspace: Workspace | None) -> bool:
    """Every rank decides alike: mode and workspace are set up alike, and autograd participation was agreed on."""
    if workspace is None or not workspace.symmetric or route.spec.mode != "pull":
        return False
    source = workspace.view("source", 0, route.spec.hidden_size, torch.uint8)
    return route.permuted_hidden_states.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()


def _pull(route: Route, workspace: Workspace | None, dtype: torch.dtype) -> torch.Tensor:
    assert workspace is not None
    hidden_size, begin = route.spec.hidden_size, 0
    received = workspace.view("receive", route.num_received, hidden_size, dtype)
    workspace.barrier()  # every source buffer is filled
    for rank, (offset, rows) in enumerate(zip(route.source_offsets, route.receive_rows, strict=True)):
        if rows:
            peer = workspace.peer_view("source", rank, offset + rows, hidden_size, dtype)
            received[begin : begin + rows].copy_(peer[offset:])
            begin += rows
    return received


def _write_back(route: Route, workspace: Workspace | None, expert_rows: torch.Tensor) -> torch.Tensor:
    assert workspace is not None
    hidden_size, begin = route.spec.hidden_size, 0
    for rank, (offset, rows) in enumerate(zip(route.source_offsets, route.receive_rows, strict=True)):
        if rows:
            peer = workspace.peer_view("combine", rank, offset + rows, hidden_size, expert_rows.dtype)
            peer[offset:].copy_(expert_rows[begin : begin + rows])
            begin += rows
    workspace.barrier()  # every row is back, and no source buffer is read any more
    return workspace.view("combine", sum(route.send_rows), hidden_size, expert_rows.dtype)
