"""Which rank owns which expert, and which copy of a replicated expert a slot uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_ops._errors import argument_error


@dataclass(frozen=True)
class ExpertShards:
    """`num_experts` in order over `ep_size` ranks: the first `num_experts % ep_size` ranks own one more.

    Metadata uses `max_local` experts for every rank; a rank that owns fewer has empty virtual experts at its end.
    """

    num_experts: int
    ep_size: int

    def __post_init__(self) -> None:
        for name in ("num_experts", "ep_size"):
            if getattr(self, name) < 1:
                raise argument_error("ExpertShards", name, "at least 1", getattr(self, name))

    @property
    def max_local(self) -> int:
        return -(-self.num_experts // self.ep_size)

    def count(self, ep_rank: int) -> int:
        """Experts that `ep_rank` owns."""
        self._check_rank(ep_rank)
        quotient, remainder = divmod(self.num_experts, self.ep_size)
        return quotient + (1 if ep_rank < remainder else 0)

    def first(self, ep_rank: int) -> int:
        """Global id of the first expert of `ep_rank`; `first(ep_size)` is `num_experts`."""
        quotient, remainder = divmod(self.num_experts, self.ep_size)
        return ep_rank * quotient + min(ep_rank, remainder)

    def owned(self, ep_rank: int) -> range:
        return range(self.first(ep_rank), self.first(ep_rank) + self.count(ep_rank))

    def owner(self, expert: int) -> int:
        quotient, remainder = divmod(self.num_experts, self.ep_size)
        head = remainder * (quotient + 1)
        return expert // (quotient + 1) if expert < head else remainder + (expert - head) // quotient

    def _check_rank(self, ep_rank: int) -> None:
        if not 0 <= ep_rank < self.ep_size:
            raise argument_error("ExpertShards", "ep_rank", f"in [0, {self.ep_size})", ep_rank)


def first_experts(shards: ExpertShards, device: torch.device) -> torch.Tensor:
    """[R + 1] int64: first expert of every rank, and the end. Made on the device: an upload cannot be captured."""
    quotient, remainder = divmod(shards.num_experts, shards.ep_size)
    rank = torch.arange(shards.ep_size + 1, device=device)
    return rank * quotient + rank.clamp(max=remainder)


def owners(shards: ExpertShards, experts: torch.Tensor) -> torch.Tensor:
    """int64: the rank that owns each expert; some rank for ids outside [0, num_experts). Arithmetic: on CUDA inductor
    cannot search in a slice."""
    quotient, remainder = divmod(shards.num_experts, shards.ep_size)
    expert = experts.to(torch.int64).clamp(0, shards.num_experts - 1)
    head = remainder * (quotient + 1)
    behind = remainder + (expert - head) // max(quotient, 1)
    return torch.where(expert < head, expert // (quotient + 1), behind)


def local_experts(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's experts of a DTensor that is sharded over its first dimension, as a plain tensor without a copy.

    Experts must divide evenly: DTensor cuts 30 over 8 into 4, 4, 4, 4, 4, 4, 4, 2, this library into six 4 and two 3.
    A plain tensor is returned as it is. The ops take plain tensors only.
    """
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(tensor, DTensor):
        return tensor
    mesh = tensor.device_mesh
    if mesh.ndim != 1 or tensor.placements != (Shard(0),):
        expected = "sharded as Shard(0) on a mesh of one dimension"
        raise argument_error("local_experts", "tensor", expected, str(tensor.placements))
    if tensor.shape[0] % mesh.size():
        raise argument_error("local_experts", "tensor", f"a multiple of {mesh.size()} experts", tensor.shape[0])
    return tensor.to_local()


class ReplicaTable(torch.nn.Module):
    """Logical expert ids to physical ones, applied before routing.

    `physical_to_logical[p]` names the logical expert whose weights physical expert `p` holds; every logical expert
    has at least one copy. A slot goes to exactly one copy, so an expert that is on two ranks counts once: copy
    `(token + ep_rank) % copies`, which depends on nothing but the token's place and the rank. The layer then counts,
    routes and owns physical experts only.
    """

    table: torch.Tensor  # [num_logical, max_copies] int64, cyclic past the copies of an expert
    copies: torch.Tensor  # [num_logical] int64

    def __init__(self, physical_to_logical: Sequence[int], num_logical: int) -> None:
        super().__init__()
        holders: list[list[int]] = [[] for _ in range(num_logical)]
        for physical, logical in enumerate(physical_to_logical):
            if not 0 <= logical < num_logical:
                expected = f"logical ids in [0, {num_logical})"
                raise argument_error("ReplicaTable", "physical_to_logical", expected, f"{logical} at {physical}")
            holders[logical].append(physical)
        missing = [logical for logical, held in enumerate(holders) if not held]
        if missing:
            expected = "a map onto every logical expert"
            raise argument_error("ReplicaTable", "physical_to_logical", expected, f"no copy of {missing[:8]}")
        self.num_logical = num_logical
        self.num_physical = len(physical_to_logical)
        self.physical_to_logical = tuple(int(logical) for logical in physical_to_logical)
        width = max(len(held) for held in holders)
        rows = [[held[copy % len(held)] for copy in range(width)] for held in holders]
        self.register_buffer("table", torch.tensor(rows, dtype=torch.int64), persistent=False)
        self.register_buffer("copies", torch.tensor([len(held) for held in holders]), persistent=False)

    @classmethod
    def balanced(cls, loads: Sequence[float], num_physical: int) -> ReplicaTable:
        """Copies for the most loaded experts: each spare place goes to the expert with the highest load per copy
        (a tie to the lower id). Physical ids are dealt so that the copies of one expert lie far apart."""
        num_logical = len(loads)
        if num_physical < num_logical:
            raise argument_error("ReplicaTable.balanced", "num_physical", f"at least {num_logical}", num_physical)
        copies = [1] * num_logical
        for _ in range(num_physical - num_logical):
            heaviest = max(range(num_logical), key=lambda expert: (loads[expert] / copies[expert], -expert))
            copies[heaviest] += 1
        rounds = range(max(copies, default=0))
        return cls([e for copy in rounds for e in range(num_logical) if copy < copies[e]], num_logical)

    def forward(self, topk_ids: torch.Tensor, ep_rank: int = 0) -> torch.Tensor:
        """`topk_ids` [T, K] of logical experts to physical ones; ids outside [0, num_logical) become -1."""
        valid = (topk_ids >= 0) & (topk_ids < self.num_logical)
        logical = torch.where(valid, topk_ids, 0).to(torch.int64)
        token = torch.arange(topk_ids.shape[0], device=topk_ids.device)[:, None] + ep_rank
        physical = self.table[logical, token % self.copies[logical]]
        return torch.where(valid, physical, -1).to(topk_ids.dtype)
