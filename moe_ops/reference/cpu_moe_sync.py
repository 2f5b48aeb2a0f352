"""device_out + (this job's part + the deferred part), in float32, rounded once."""

from __future__ import annotations

import torch

from moe_ops.reference.cpu_moe_submit import RESULTS


def cpu_moe_sync(
    ticket: torch.Tensor,
    device_out: torch.Tensor,
    *,
    deferred_ticket: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    part = RESULTS.pop(int(ticket))
    if deferred_ticket is not None and int(deferred_ticket) != 0:
        part = part + RESULTS.pop(int(deferred_ticket))
    total = device_out.to(torch.float32) + part.to(device_out.device)
    return total.to(device_out.dtype if out_dtype is None else out_dtype)
