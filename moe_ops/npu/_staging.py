"""Page-locked staging memory of the CPU-expert coupling: a pool per device, a slot per copy in flight.

Outside captures a slot is taken for one call and is free again when the event behind its last copy has passed. In a
capture every stream takes one slot of each kind, which all its calls share, since they are ordered on the stream; the
graph owns it until it is destroyed. The memory comes from the runtime itself: torch's pinned allocator would record
events inside the capture and query them later, which CANN refuses.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass, field
from typing import Any

from moe_ops.npu import _native
from moe_ops.npu._device import runtime

_SMALLEST = 64 << 10
_EAGER_SLOTS = 64  # of a kind, in flight outside captures: then the host waits
_HEADER = 64  # bytes: handle, then {ticket, deferred ticket}


@dataclass
class Slot:
    kind: str
    device: int
    address: int
    capacity: int
    done: Any = None  # event

    @property
    def handle(self) -> int:
        return self.address

    @property
    def tickets(self) -> int:
        return self.address + 8

    @property
    def payload(self) -> int:
        return self.address + _HEADER

    def read_tickets(self) -> tuple[int, int]:
        first, second = (ctypes.c_int64 * 2).from_address(self.tickets)
        return first, second


@dataclass
class CapturedGraph:
    """What the calls of one captured graph share; lives until the runtime says that the graph is gone."""

    model: int
    arena: int
    destroyed: ctypes.c_int64
    slots: dict[tuple[int, str], Slot] = field(default_factory=dict)  # by stream and kind
    constants: list[ctypes.c_int64] = field(default_factory=list)

    def streams(self) -> set[int]:
        return {stream for stream, _ in self.slots}


@dataclass
class _Pool:
    free: list[Slot] = field(default_factory=list)
    in_flight: list[Slot] = field(default_factory=list)
    warm: int = 0  # the largest size that a call outside captures has asked for
    slots: int = 0
    bytes: int = 0


_lock = threading.Lock()
_pools: dict[tuple[int, str], _Pool] = {}
_graphs: list[CapturedGraph] = []


def captured_graph(op: str, stream: int) -> CapturedGraph | None:
    """The record of the graph that the stream is captured into, None outside captures."""
    acl = _native.runtime()
    status, model = ctypes.c_int(), ctypes.c_void_p()
    code = acl.aclmdlRICaptureGetInfo(stream, ctypes.byref(status), ctypes.byref(model))
    _native.require_success(op, "aclmdlRICaptureGetInfo", code)
    if status.value == 0:
        return None
    if status.value != _native.CAPTURE_ACTIVE or model.value is None:
        raise RuntimeError(f"{op}: the capture of this stream was invalidated by an earlier error")
    with _lock:
        _reclaim_graphs()
        for graph in _graphs:
            if graph.model == model.value:
                return graph
        graph = _adopt(op, model.value)
        _graphs.append(graph)
        return graph


def _adopt(op: str, model: int) -> CapturedGraph:
    acl, engine = _native.runtime(), _native.engine()
    arena = engine.moe_ops_arena_create()
    if not arena:
        raise RuntimeError(f"{op}: {engine.moe_ops_last_error().decode()}")
    graph = CapturedGraph(model, arena, ctypes.c_int64(0))
    if acl.has("aclmdlRIDestroyRegisterCallback"):
        # C functions: a graph may be destroyed on any thread, with or without the GIL. Where CANN does not take them,
        # the slots and the arena of the graph are kept for the life of the process.
        flag = ctypes.addressof(graph.destroyed)
        if acl.aclmdlRIDestroyRegisterCallback(model, engine.address("moe_ops_arena_destroy"), arena) == 0:
            acl.aclmdlRIDestroyRegisterCallback(model, engine.address("moe_ops_set_flag"), flag)
    return graph


def _reclaim_graphs() -> None:
    for graph in [graph for graph in _graphs if graph.destroyed.value]:
        for slot in graph.slots.values():
            _pools[slot.device, slot.kind].free.append(slot)
        _graphs.remove(graph)


def take_slot(op: str, kind: str, device: int, size: int, what: str, graph: CapturedGraph | None, stream: int) -> Slot:
    """A slot of at least `size` payload bytes; `what` names the size in the message about a missing warm-up."""
    capacity = max(_SMALLEST, 1 << (size - 1).bit_length())
    with _lock:
        pool = _pools.setdefault((device, kind), _Pool())
        _reclaim_graphs()
        if graph is not None:
            return _slot_of_graph(op, pool, kind, device, capacity, what, graph, stream)
        pool.warm = max(pool.warm, capacity)
        _reclaim(pool)
        slot = _pop(pool, capacity)
        while slot is None and len(pool.in_flight) >= _EAGER_SLOTS:
            pool.in_flight[0].done.synchronize()
            _reclaim(pool)
            slot = _pop(pool, capacity)
        return slot or _allocate(op, pool, kind, device, capacity)


def _slot_of_graph(
    op: str, pool: _Pool, kind: str, device: int, capacity: int, what: str, graph: CapturedGraph, stream: int
) -> Slot:
    slot = graph.slots.get((stream, kind))
    if slot is not None and slot.capacity >= capacity:
        return slot
    if pool.warm < capacity:
        raise RuntimeError(
            f"{op}: the first call with {what} on npu:{device} must be outside a capture; run the model once at this "
            "size before capturing (warm-up)"
        )
    known = graph.streams()
    if known and stream not in known:
        _native.engine().moe_ops_arena_set_parallel(graph.arena)
    # Events of eager calls may be queried here: they were not recorded in a capture.
    _reclaim(pool)
    fresh = _pop(pool, capacity) or _allocate(op, pool, kind, device, capacity)
    # A smaller slot stays with the graph: calls captured so far use it.
    key = (stream, kind) if slot is None else (stream, f"{kind} of {capacity}")
    graph.slots[key] = fresh
    if slot is not None:
        graph.slots[stream, kind], graph.slots[key] = fresh, slot
    return fresh


def _reclaim(pool: _Pool) -> None:
    waiting: list[Slot] = []
    for slot in pool.in_flight:
        (pool.free if slot.done.query() else waiting).append(slot)
    pool.in_flight = waiting


def _pop(pool: _Pool, capacity: int) -> Slot | None:
    """The smallest free slot that is large enough."""
    fitting = [slot for slot in pool.free if slot.capacity >= capacity]
    if not fitting:
        return None
    slot = min(fitting, key=lambda candidate: candidate.capacity)
    pool.free.remove(slot)
    return slot


def _allocate(op: str, pool: _Pool, kind: str, device: int, capacity: int) -> Slot:
    address = ctypes.c_void_p()
    code = _native.runtime().aclrtMallocHost(ctypes.byref(address), _HEADER + capacity)
    _native.require_success(op, "aclrtMallocHost", code)
    assert address.value is not None
    ctypes.memset(address.value, 0, _HEADER)
    pool.slots += 1
    pool.bytes += _HEADER + capacity
    return Slot(kind, device, address.value, capacity)


def mark_in_flight(slot: Slot) -> None:
    """After the last copy of a call outside captures was queued on the current stream."""
    if slot.done is None:
        slot.done = runtime().Event()
    slot.done.record()
    with _lock:
        _pools[slot.device, slot.kind].in_flight.append(slot)


def give_back(slot: Slot) -> None:
    """A slot of a call that failed before its host function was queued. Copies into it may still be under way."""
    mark_in_flight(slot)


def staging_size(device: int) -> tuple[int, int]:
    """(slots, bytes) of page-locked memory."""
    with _lock:
        pools = [pool for (index, _), pool in _pools.items() if index == device]
        return sum(pool.slots for pool in pools), sum(pool.bytes for pool in pools)
