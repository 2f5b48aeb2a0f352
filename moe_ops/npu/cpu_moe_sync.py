"""cpu_moe_sync on NPU: [tickets to staging] [host function: wait] [the CPU's rows to the device], then the sum.

The CPU's part always travels as float32: device_out + part is rounded once.
"""

from __future__ import annotations

import torch

from moe_ops.meta.cpu_moe_sync import cpu_moe_sync as check_and_allocate
from moe_ops.npu import _native
from moe_ops.npu._coupling import Coupling, raise_stream_errors
from moe_ops.npu._device import on_device, require_npu


def cpu_moe_sync(
    ticket: torch.Tensor,
    device_out: torch.Tensor,
    *,
    deferred_ticket: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    op = "cpu_moe_sync"
    require_npu(op)
    out = check_and_allocate(ticket, device_out, deferred_ticket=deferred_ticket, out_dtype=out_dtype)
    num_tokens, hidden_size = device_out.shape
    part = torch.empty(num_tokens, hidden_size, dtype=torch.float32, device=device_out.device)
    deferred = torch.zeros_like(ticket) if deferred_ticket is None else deferred_ticket
    what = f"[{num_tokens}, {hidden_size}] rows"
    with on_device(device_out.device), Coupling(op, "sync", part.numel() * 4, what) as coupling:
        slot = coupling.slot
        call = _native.engine(op).moe_ops_sync_call_create(
            coupling.arena, num_tokens, hidden_size, slot.tickets, deferred_ticket is not None, slot.payload
        )
        coupling.own(call)
        coupling.to_host(slot.tickets, ticket)
        coupling.to_host(slot.tickets + 8, deferred)
        coupling.run("moe_ops_sync_call_run")
        coupling.to_device(part, slot.payload)
        if coupling.synchronous:
            raise_stream_errors(op)
    return out.copy_(device_out.to(torch.float32) + part)
