"""Build the exchange descriptors: on the host with one upload, or on the device, with the same numbers."""

from __future__ import annotations

import torch

from moe_ops import ops
from moe_ops.distributed.spec import RouteMetadata, RouteSpec
from moe_ops.distributed.summary import HEADER_WORDS

HOST_TABLE_LIMIT = 2048  # counts: up to here the gathered table is read to the host
HOST_DESCRIPTOR_LIMIT = 1024  # counts: up to here the descriptors are computed on the host
FIELD_ALIGNMENT = 512  # bytes between the starts of packed fields are multiples of this
# The order in the packed buffer.
FIELDS = (
    "dispatch_src",
    "dispatch_dst",
    "combine_src",
    "combine_dst",
    "group_ends",
    "dispatch_size",
    "combine_size",
)


def build(table: torch.Tensor, host_table: torch.Tensor | None, spec: RouteSpec, expert_capacity: int) -> RouteMetadata:
    """Descriptors of a gathered `table` [R, 3 + E]; `host_table` is its copy on the host where that was read."""
    if host_table is not None and spec.ep_size * spec.num_experts <= HOST_DESCRIPTOR_LIMIT:
        fields = upload(compute(host_table, spec), table.device)
    else:
        fields = compute(table, spec)
    return RouteMetadata(expert_capacity=expert_capacity, **fields)  # type: ignore[arg-type]


def compute(table: torch.Tensor, spec: RouteSpec) -> dict[str, torch.Tensor]:
    counts = table[:, HEADER_WORDS:].to(torch.int32).contiguous()
    dispatch_src, dispatch_dst, dispatch_size, combine_src, combine_dst, combine_size, group_ends, _ = (
        ops.route_metadata(counts, spec.ep_rank, mode=spec.mode)
    )
    return {
        "dispatch_src": dispatch_src,
        "dispatch_dst": dispatch_dst,
        "combine_src": combine_src,
        "combine_dst": combine_dst,
        "group_ends": group_ends,
        "dispatch_size": dispatch_size,
        "combine_size": combine_size,
    }


def packed_layout(fields: dict[str, torch.Tensor]) -> tuple[dict[str, int], int]:
    """Start of each field in bytes, and the total; every field begins at a multiple of 512."""
    starts, total = {}, 0
    for name in FIELDS:
        starts[name] = total
        total += -(-fields[name].nbytes // FIELD_ALIGNMENT) * FIELD_ALIGNMENT
    return starts, total


def upload(fields: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """All fields in one allocation and one asynchronous copy from pinned memory; the results are views that keep it."""
    starts, total = packed_layout(fields)
    pinned = device.type != "cpu"
    packed = torch.zeros(total, dtype=torch.uint8, pin_memory=pinned)
    for name, start in starts.items():
        source = fields[name]
        packed[start : start + source.nbytes].view(source.dtype).copy_(source)
    if pinned:
        packed = packed.to(device, non_blocking=True)
    return {
        name: packed[start : start + fields[name].nbytes].view(fields[name].dtype) for name, start in starts.items()
    }
