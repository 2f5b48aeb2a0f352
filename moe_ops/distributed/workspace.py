"""Buffers that the layers of a model share: grown by agreement, never shrunk, leased to one call at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moe_ops._errors import argument_error
from moe_ops.distributed.cache import HeaderCache, RouteCache, StreamStamp
from moe_ops.distributed.spec import align
from moe_ops.distributed.symmetric import PeerBuffers, open_peer_buffers

REGIONS = ("source", "receive", "combine")
_OP = "Workspace"


class Workspace:
    """Three byte regions on one device: permuted rows to send, received rows, and rows that came back.

    Layers run one after another, so they share one workspace. `claim` marks it as used by one call, `release` hands it
    back; the next claim waits, on its own stream, for the work that still read the buffers. `grow` is called with
    numbers that every rank has agreed on, so that all ranks grow in the same call; that is what symmetric memory needs.
    Route and header caches live here too: a new workspace has empty caches.

    `symmetric=True` keeps the source and combine regions in memory that the other ranks of the host can read and write
    (see docs/distributed.md); it needs a `group` and raises where torch offers no symmetric memory.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        group: torch.distributed.ProcessGroup | None = None,
        growth: float = 1.25,
        symmetric: bool = False,
    ) -> None:
        if not growth >= 1.0:
            raise argument_error(_OP, "growth", "at least 1.0", growth)
        if symmetric and group is None:
            raise argument_error(_OP, "group", "a process group where symmetric is set", group)
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.group = group
        self.growth = growth
        self.symmetric = symmetric
        self.generation = 0  # rises with each growth: addresses of before are gone
        self.route_cache = RouteCache()
        self.header_cache = HeaderCache()
        self._buffers: dict[str, torch.Tensor] = {}
        self._peers: dict[str, PeerBuffers] = {}
        self._owner: object | None = None
        self._free_after = StreamStamp()

    # -- lease -----------------------------------------------------------------------------------------------------

    @property
    def leases(self) -> bool:
        """Whether buffers are handed out: autograd would keep rows that the next layer overwrites."""
        return not torch.is_grad_enabled()

    @property
    def claimed(self) -> bool:
        return self._owner is not None

    def claim(self, owner: object) -> None:
        if self._owner is not None:
            raise RuntimeError(f"{_OP}: already in use by {self._owner!r}; layers share a workspace one after another")
        self._owner = owner
        self.wait_reuse()

    def release(self, owner: object) -> None:
        if self._owner is not owner:
            raise RuntimeError(f"{_OP}: {owner!r} releases what it has not claimed")
        self._owner = None
        self._free_after = StreamStamp.record(self.device)

    @contextmanager
    def lease(self, owner: object) -> Iterator[Workspace]:
        self.claim(owner)
        try:
            yield self
        finally:
            self.release(owner)

    def wait_reuse(self) -> None:
        """Order the current stream after the last user of the buffers."""
        self._free_after.hand_to_current(self.device, list(self._buffers.values()))

    # -- size ------------------------------------------------------------------------------------------------------

    def nbytes(self, region: str) -> int:
        return self._buffers[region].numel() if region in self._buffers else 0

    def grow(
        self,
        plan_tokens: int,
        maximum: int,
        *,
        top_k: int,
        hidden_size: int,
        dtype: torch.dtype,
        combine_dtype: torch.dtype | None = None,
    ) -> bool:
        """Make room for an agreed plan; True if an address changed. Every rank must call it with the same numbers."""
        combine_dtype = combine_dtype or dtype
        sent = plan_tokens * top_k * hidden_size
        wanted = {
            "source": sent * dtype.itemsize,
            "receive": align(max(1, maximum)) * hidden_size * dtype.itemsize,
            "combine": sent * combine_dtype.itemsize,
        }
        grown = False
        for region in REGIONS:
            held = self.nbytes(region)
            if wanted[region] > held:
                self._allocate(region, max(wanted[region], int(held * self.growth)))
                grown = True
        self.generation += grown
        return grown

    def _allocate(self, region: str, nbytes: int) -> None:
        nbytes = -(-nbytes // 512) * 512
        self._buffers.pop(region, None)
        self._peers.pop(region, None)
        # A buffer born in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            if self.symmetric and region != "receive":
                self._peers[region] = open_peer_buffers(nbytes, self.device, self.group)
                self._buffers[region] = self._peers[region].local
            else:
                self._buffers[region] = torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    # -- views -----------------------------------------------------------------------------------------------------

    def view(self, region: str, rows: int, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
        """The first `rows` rows of a region, valid until the lease ends."""
        return _rows(self._held(region, rows * hidden_size * dtype.itemsize), rows, hidden_size, dtype)

    def peer_view(self, region: str, rank: int, rows: int, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
        self._held(region, rows * hidden_size * dtype.itemsize)
        return _rows(self._peers[region].peer(rank), rows, hidden_size, dtype)

    def barrier(self) -> None:
        """All ranks' work on the symmetric regions so far is done (in stream order) before what follows."""
        self._peers["source"].barrier()

    def _held(self, region: str, nbytes: int) -> torch.Tensor:
        if not self.claimed:
            raise RuntimeError(f"{_OP}: claim it before using its buffers")
        if nbytes > self.nbytes(region):
            raise RuntimeError(
                f"{_OP}: region {region} holds {self.nbytes(region)} bytes, {nbytes} wanted: grow it by agreement first"
            )
        return self._buffers[region]


def _rows(buffer: torch.Tensor, rows: int, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
    return buffer[: rows * hidden_size * dtype.itemsize].view(dtype).view(rows, hidden_size)
