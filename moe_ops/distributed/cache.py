"""Reuse of descriptors and headers between calls whose counts did not change.

A table must be seen twice in a row before anything is kept for it: decoding repeats its counts rarely, and a copy
that is never read again costs more than it saves. After a miss on a large table the host comparison is skipped for a
few calls. Tensors handed out of a cache are immutable and carry the stream and event after which they are complete.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_ops.distributed.descriptors import HOST_DESCRIPTOR_LIMIT, HOST_TABLE_LIMIT
from moe_ops.distributed.spec import RouteMetadata, RouteSpec
from moe_ops.distributed.summary import Summary

BACK_OFF_CALLS = 8


@dataclass
class StreamStamp:
    """Where and when a cached tensor became complete; None on devices without streams."""

    stream: torch.Stream | None = None
    event: torch.Event | None = None

    @classmethod
    def record(cls, device: torch.device) -> StreamStamp:
        if device.type == "cpu":
            return cls()
        stream = torch.accelerator.current_stream(device)
        return cls(stream, stream.record_event())

    def hand_to_current(self, device: torch.device, tensors: list[torch.Tensor]) -> None:
        """Order the current stream after the stamp and re-record, so that a chain of consumers stays transitive."""
        if self.event is None or self.stream is None:
            return
        current = torch.accelerator.current_stream(device)
        if current != self.stream:
            current.wait_event(self.event)
            for tensor in tensors:
                tensor.record_stream(current)
        self.stream, self.event = current, current.record_event()


def metadata_tensors(metadata: RouteMetadata) -> list[torch.Tensor]:
    return [value for value in vars(metadata).values() if isinstance(value, torch.Tensor)]


@dataclass
class CachedRoute:
    topology: tuple
    device: torch.device
    table: torch.Tensor  # on the host
    summary: Summary
    metadata: RouteMetadata | None = None
    stamp: StreamStamp | None = None


@dataclass
class RouteCache:
    """Lives on a workspace. `look_up` before the checks, `store` after the descriptors."""

    back_off: int = 0
    hits: int = 0
    entry: CachedRoute | None = None

    @staticmethod
    def applies(spec: RouteSpec) -> bool:
        return spec.auto and spec.tokens == "dynamic" and spec.ep_size * spec.num_experts <= HOST_TABLE_LIMIT

    def _same(self, spec: RouteSpec, device: torch.device) -> CachedRoute | None:
        entry = self.entry
        # Tuple equality compares the groups by identity first; the entry keeps its group alive.
        if entry is not None and entry.topology == spec.topology and entry.device == device:
            return entry
        return None

    def skip_table(self, spec: RouteSpec, device: torch.device) -> bool:
        """Within the back-off: do not read the table at all. Counts down."""
        if self.back_off > 0 and self._same(spec, device) is not None:
            self.back_off -= 1
            return True
        self.back_off = 0
        return False

    def look_up(self, spec: RouteSpec, device: torch.device, table: torch.Tensor) -> CachedRoute | None:
        """The entry whose host table equals `table`; its metadata may still be None (second sighting)."""
        entry = self._same(spec, device)
        if entry is None:
            return None
        if not torch.equal(entry.table, table):
            if spec.ep_size * spec.num_experts > HOST_DESCRIPTOR_LIMIT:
                self.back_off = BACK_OFF_CALLS
            return None
        if entry.metadata is not None and entry.stamp is not None:
            entry.stamp.hand_to_current(device, metadata_tensors(entry.metadata))
            self.hits += 1
        return entry

    def store(
        self,
        spec: RouteSpec,
        device: torch.device,
        table: torch.Tensor,
        summary: Summary,
        metadata: RouteMetadata,
        found: CachedRoute | None,
    ) -> None:
        if found is None:
            self.entry = CachedRoute(spec.topology, device, table, summary)
        elif found.metadata is None:
            found.metadata, found.stamp = metadata, StreamStamp.record(device)


@dataclass
class HeaderCache:
    """The header on the device, kept after two identical calls, so that steady decoding uploads nothing."""

    key: tuple | None = None
    header: torch.Tensor | None = None
    stamp: StreamStamp | None = None

    def get(self, values: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        key = (values, dtype, device)
        if key == self.key and self.header is not None and self.stamp is not None:
            self.stamp.hand_to_current(device, [self.header])
            return self.header
        header = make_header(values, dtype, device)
        if key == self.key:
            self.header, self.stamp = header, StreamStamp.record(device)
        else:
            self.key, self.header, self.stamp = key, None, None
        return header


def make_header(values: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
