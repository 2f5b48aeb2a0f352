"""What a route is for, and what its preparation yields."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from moe_ops._errors import argument_error
from moe_ops.distributed.collectives import group_rank, group_size
from moe_ops.distributed.placement import ExpertShards

INT32_MAX = 2**31 - 1
ALIGNMENT = 128  # rows: schedules and receive limits are multiples of it


def align(rows: int) -> int:
    return -(-rows // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, eq=False)
class RouteSpec:
    """Everything that all ranks of `group` must agree on, once, for many calls.

    - `num_experts`: experts over all ranks (physical ones where there are replicas); `group` None is a single process.
    - `mode`: "push" describes the dispatch as the sender sees it, "pull" as the receiver does; the rows are the same.
    - `tokens`: "dynamic" lets every rank bring another number of tokens, "static" demands the same number everywhere.
    - `max_local_tokens`: limit on the tokens of one rank; None is automatic capacity, where only int32 limits bind.
    - `distinct_experts`: reject rows that are not `top_k` different experts (ids of -1, an expert twice). Off by
      default, since both are legal in every op of this library.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    group: dist.ProcessGroup | None = None
    mode: str = "push"
    tokens: str = "dynamic"
    max_local_tokens: int | None = None
    distinct_experts: bool = False
    shards: ExpertShards = field(init=False)
    ep_size: int = field(init=False)
    ep_rank: int = field(init=False)
    # 27 bits that differ, almost surely, where ranks were set up differently; travels in every header.
    fingerprint: int = field(init=False, repr=False)
    # What a cached route depends on beside the counts. Holds the group itself: an address could be used again.
    topology: tuple = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "hidden_size"):
            if getattr(self, name) < 1:
                raise argument_error("RouteSpec", name, "at least 1", getattr(self, name))
        if self.mode not in ("push", "pull"):
            raise argument_error("RouteSpec", "mode", '"push" or "pull"', self.mode)
        if self.tokens not in ("static", "dynamic"):
            raise argument_error("RouteSpec", "tokens", '"static" or "dynamic"', self.tokens)
        if self.max_local_tokens is not None and self.max_local_tokens < 0:
            raise argument_error("RouteSpec", "max_local_tokens", "None or at least 0", self.max_local_tokens)
        object.__setattr__(self, "ep_size", group_size(self.group))
        object.__setattr__(self, "ep_rank", group_rank(self.group))
        object.__setattr__(self, "shards", ExpertShards(self.num_experts, self.ep_size))
        sizes = (self.num_experts, self.top_k, self.hidden_size, self.max_local_tokens, self.ep_size)
        shared = (*sizes, self.mode, self.tokens, self.distinct_experts)
        object.__setattr__(self, "fingerprint", zlib.crc32(repr(shared).encode()) >> 5)
        object.__setattr__(self, "topology", (self.group, self.ep_rank, *shared))

    def __deepcopy__(self, memo: dict[int, Any]) -> RouteSpec:
        return self  # immutable, and a process group cannot be copied

    @property
    def auto(self) -> bool:
        """Automatic capacity: no limit on tokens but the native ones."""
        return self.max_local_tokens is None

    @property
    def max_local_experts(self) -> int:
        return self.shards.max_local


@dataclass(frozen=True)
class RouteMetadata:
    """Who sends which rows where. Offsets and sizes are in rows; R ranks, L = `max_local_experts`.

    - `dispatch_src`, `dispatch_dst` `[R * L]` int64, `dispatch_size` `[R * L]` int32: of block `t * L + j` to rank
      t's expert j (push), or of block `s * L + j` from rank s (pull). Source offsets count in the source's permuted
      rows, destination offsets in the destination's receive buffer.
    - `combine_src`, `combine_dst` int64, `combine_size` int32, `[R * L]`: the way back of block `s * L + j`.
    - `group_ends` `[L]` int64: the row where local expert j ends in the receive buffer.
    - `expert_capacity`: rows of the receive buffer, at least 1.
    - `local_num_tokens`, `plan_tokens`: this rank's tokens, and the agreed schedule size; None in static mode.
    """

    dispatch_src: torch.Tensor
    dispatch_dst: torch.Tensor
    dispatch_size: torch.Tensor
    combine_src: torch.Tensor
    combine_dst: torch.Tensor
    combine_size: torch.Tensor
    group_ends: torch.Tensor
    expert_capacity: int
    local_num_tokens: int | None = None
    plan_tokens: int | None = None


@dataclass(frozen=True)
class Route:
    """A prepared route: permuted rows and what every rank does with them.

    - `permuted_hidden_states` `[T * K, H]`, expert-major; in pull mode with a workspace a view of its source buffer.
    - `row_map` `[T, K]` int32, always int32, -1 for no row.
    - `tokens_per_expert` `[E]` int32: this rank's counts; the very tensor that was given if it was int32 and
      contiguous.
    - `received_counts` `[R, L]` int32: rows from rank s for local expert j.
    - `maximum_received_slots`: the largest load of any rank.
    - `loads`: rows that each rank receives; `send_rows[t]`, `receive_rows[s]`: rows of this rank to t and from s;
      `source_offsets[s]`: where the rows for this rank begin in the permuted rows of s.
    """

    spec: RouteSpec
    permuted_hidden_states: torch.Tensor
    row_map: torch.Tensor
    tokens_per_expert: torch.Tensor
    received_counts: torch.Tensor
    maximum_received_slots: int
    metadata: RouteMetadata
    loads: tuple[int, ...]
    send_rows: tuple[int, ...]
    receive_rows: tuple[int, ...]
    source_offsets: tuple[int, ...]

    @property
    def num_received(self) -> int:
        return self.loads[self.spec.ep_rank]
