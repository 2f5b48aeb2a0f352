"""Memory of one host that every rank can read and write: the pull path without a collective.

Only `torch.distributed._symmetric_memory` is used, through plain peer pointers; NVLink multicast is not.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist


class PeerBuffers(Protocol):
    """What the pull path needs of shared memory."""

    local: torch.Tensor  # uint8, this rank's buffer

    def peer(self, rank: int) -> torch.Tensor:
        """Rank `rank`'s buffer, uint8, as seen from here."""

    def barrier(self) -> None:
        """In stream order: everything every rank has issued on the buffers is done."""


class SymmetricBuffers:
    """`PeerBuffers` on CUDA. Making one is a collective."""

    def __init__(self, nbytes: int, device: torch.device, group: dist.ProcessGroup) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self.local = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
        self._handle = symmetric_memory.rendezvous(self.local, group.group_name)
        self._size = nbytes

    def peer(self, rank: int) -> torch.Tensor:
        if rank == self._handle.rank:
            return self.local
        return self._handle.get_buffer(rank, (self._size,), torch.uint8)

    def barrier(self) -> None:
        self._handle.barrier(channel=0)


def open_peer_buffers(nbytes: int, device: torch.device, group: dist.ProcessGroup | None) -> PeerBuffers:
    reason = unavailable(device)
    if reason or group is None:
        raise RuntimeError(f"Workspace: symmetric memory is not available: {reason or 'no process group'}")
    return SymmetricBuffers(nbytes, device, group)


def unavailable(device: torch.device) -> str:
    """Why symmetric memory cannot be used on `device`, or an empty string."""
    if device.type != "cuda":
        return f"it needs CUDA, the workspace is on {device.type}"
    try:
        import torch.distributed._symmetric_memory  # noqa: F401
    except ImportError as error:
        return f"this torch has none ({error})"
    return ""
