"""Checks and output of cpu_moe_sync."""

from __future__ import annotations

import torch

from moe_ops._errors import require
from moe_ops.meta._checks import FLOATS, FLOATS_TEXT, check_device, check_required_ticket, check_rows, check_ticket


def cpu_moe_sync(
    ticket: torch.Tensor,
    device_out: torch.Tensor,
    *,
    deferred_ticket: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    op = "cpu_moe_sync"
    check_required_ticket(op, "ticket", ticket)
    check_rows(op, "device_out", device_out)
    check_ticket(op, "deferred_ticket", deferred_ticket)
    check_device(op, ticket, device_out=device_out, deferred_ticket=deferred_ticket)
    dtype = device_out.dtype if out_dtype is None else out_dtype
    require(dtype in FLOATS, op, "out_dtype", f"None, {FLOATS_TEXT}", dtype)
    return torch.empty(device_out.shape, dtype=dtype, device=device_out.device)
