"""Which memory was repacked in place: its checkpoint bytes are gone for every tensor that shares it."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from moe_ops._errors import argument_error

# Storage -> byte ranges. A weak reference keeps the address of a storage from being used again, not its memory.
_REPACKED: dict[int, tuple[StorageWeakRef, list[range]]] = {}


def _bytes(tensor: torch.Tensor) -> range:
    """Of a contiguous tensor, within its storage."""
    start = tensor.storage_offset() * tensor.element_size()
    return range(start, start + tensor.numel() * tensor.element_size())


def mark(*tensors: torch.Tensor) -> None:
    for address in [address for address, (storage, _) in _REPACKED.items() if storage.expired()]:
        del _REPACKED[address]
    for tensor in tensors:
        storage = tensor.untyped_storage()
        _REPACKED.setdefault(storage._cdata, (StorageWeakRef(storage), []))[1].append(_bytes(tensor))


def is_marked(tensor: torch.Tensor) -> bool:
    if torch.compiler.is_compiling():  # a traced tensor has no memory of its own to look up
        return False
    storage, ranges = _REPACKED.get(tensor.untyped_storage()._cdata, (None, []))
    if storage is None or storage.expired():
        return False
    mine = _bytes(tensor)
    return any(mine.start < other.stop and other.start < mine.stop for other in ranges)


def require_unmarked(op: str, **tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and is_marked(tensor):
            raise argument_error(op, name, "checkpoint bytes", "memory that prepare() has repacked")
