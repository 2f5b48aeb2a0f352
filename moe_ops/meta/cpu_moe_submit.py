"""Checks and outputs of cpu_moe_submit."""

from __future__ import annotations

import torch

from moe_ops._errors import require
from moe_ops.meta._checks import check_device, check_ids, check_required_ticket, check_rows, check_weights


def cpu_moe_submit(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    engine: torch.Tensor,
    *,
    max_deferred: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    op = "cpu_moe_submit"
    check_rows(op, "hidden_states", hidden_states)
    num_tokens = hidden_states.shape[0]
    check_ids(op, topk_ids, num_tokens, topk_weights)
    check_weights(op, topk_weights, num_tokens, topk_ids.shape[1])
    check_required_ticket(op, "engine", engine)
    require(max_deferred is None or max_deferred >= 0, op, "max_deferred", "at least 0", str(max_deferred))
    check_device(op, hidden_states, topk_ids=topk_ids, topk_weights=topk_weights)
    if engine.device.type != "cpu":  # a CPU tensor is read on the host, whatever the device
        check_device(op, hidden_states, engine=engine)
    ticket = torch.empty(1, dtype=torch.int64, device=hidden_states.device)
    return ticket, torch.empty_like(ticket)
