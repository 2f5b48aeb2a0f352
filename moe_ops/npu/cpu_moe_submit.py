"""cpu_moe_submit on NPU: [inputs to staging] [host function: enqueue] [tickets to the device]."""

from __future__ import annotations

import torch

from moe_ops._errors import argument_error
from moe_ops.meta.cpu_moe_submit import cpu_moe_submit as check_and_allocate
from moe_ops.npu import _native
from moe_ops.npu._coupling import Coupling
from moe_ops.npu._device import on_device, require_npu

# Numbered as in csrc/engine/c_api.h.
_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ALIGNMENT = 64


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _check_handle(op: str, handle: int, hidden_states: torch.Tensor) -> None:
    known = _native.engine(op).moe_ops_check_handle(handle, hidden_states.shape[1])
    if known == 0:
        raise argument_error(op, "engine", "the handle of experts in a living CpuMoeEngine", hex(handle % 2**64))
    if known < 0:
        raise argument_error(op, "hidden_states", "as wide as the experts", hidden_states)


def cpu_moe_submit(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    engine: torch.Tensor,
    *,
    max_deferred: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    op = "cpu_moe_submit"
    require_npu(op)
    ticket, deferred_ticket = check_and_allocate(
        hidden_states, topk_ids, topk_weights, engine, max_deferred=max_deferred
    )
    handle = int(engine) if engine.device.type == "cpu" else None  # a CPU tensor is baked into a captured graph
    if handle is not None:
        _check_handle(op, handle, hidden_states)

    rows = hidden_states.contiguous()
    ids, weights = topk_ids.to(torch.int64).contiguous(), topk_weights.to(torch.float32).contiguous()
    (num_tokens, hidden_size), top_k = rows.shape, ids.shape[1]
    row_bytes, id_bytes = _aligned(rows.numel() * rows.element_size()), _aligned(ids.numel() * 8)
    size = row_bytes + id_bytes + weights.numel() * 4
    what = f"[{num_tokens}, {hidden_size}] rows"
    with on_device(hidden_states.device), Coupling(op, "submit", size, what) as coupling:
        slot = coupling.slot
        staged_ids = slot.payload + row_bytes
        staged_weights = staged_ids + id_bytes
        call = _native.engine(op).moe_ops_submit_call_create(
            coupling.arena, num_tokens, top_k, hidden_size, _ELEMENTS[rows.dtype], max_deferred,
            slot.handle if handle is None else coupling.constant(handle), slot.payload, staged_ids, staged_weights,
            slot.tickets,
        )  # fmt: skip
        coupling.own(call)
        coupling.to_host(slot.payload, rows)
        coupling.to_host(staged_ids, ids)
        coupling.to_host(staged_weights, weights)
        if handle is None:
            coupling.to_host(slot.handle, engine.contiguous())
        coupling.run("moe_ops_submit_call_run")
        if coupling.synchronous:
            for number in slot.read_tickets():
                if number:
                    _native.engine(op).moe_ops_wait_ticket(number)
        coupling.to_device(ticket, slot.tickets)
        coupling.to_device(deferred_ticket, slot.tickets + 8)
    return ticket, deferred_ticket
