"""CPU experts, submitted: which slots run now and which one layer late, and their float32 results.

Per token, up to max_deferred valid slots of lowest weight are deferred; of two equal weights the lower slot stays. The
reference computes at once; its tickets name results in a table of this module.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from moe_ops._errors import argument_error
from moe_ops.meta.fused_mxfp4_moe import resolve_activation
from moe_ops.placement import select_deferred_experts
from moe_ops.reference.fused_mxfp4_moe import moe_float32, split_gate_up, swiglu

# handle -> experts (num_experts, w13_layout, weight_format, options, read_expert); filled by moe_ops.engine.
EXPERTS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
RESULTS: dict[int, torch.Tensor] = {}  # ticket -> [T, H] float32
_tickets = itertools.count(1)


def _find(handle: int) -> Any:
    if handle not in EXPERTS:
        expected = "the handle of experts in a living CpuMoeEngine"
        raise argument_error("cpu_moe_submit", "engine", expected, hex(handle % 2**64))
    return EXPERTS[handle]


def _bfloat16_experts(
    hidden_states: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, shared: Any
) -> torch.Tensor:
    """The sum over bfloat16 experts, in float32."""
    activation, limit, alpha = resolve_activation("cpu_moe_submit", **shared.options)
    total = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for token, slot in torch.nonzero((ids >= 0) & (weights != 0)).tolist():
        one = shared.read_expert(int(ids[token, slot]))
        rows = one["w13"].float() @ hidden_states[token].float()
        if "w13_bias" in one:
            rows = rows + one["w13_bias"]
        hidden = swiglu(*split_gate_up(rows, shared.w13_layout), activation, limit, alpha)
        y = one["w2"].float() @ hidden
        if "w2_bias" in one:
            y = y + one["w2_bias"]
        total[token] += weights[token, slot] * y
    return total


def experts_float32(hidden_states: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: int) -> torch.Tensor:
    """[T, H] float32: the sum over the slots with 0 <= id < E, over the weights that the engine holds."""
    shared = _find(handle)
    valid = (ids >= 0) & (ids < shared.num_experts) & (weights != 0)
    if shared.weight_format == "bfloat16":
        return _bfloat16_experts(hidden_states, torch.where(valid, ids, -1), weights, shared)
    used = sorted(set(ids[valid].tolist()))
    total = torch.zeros(hidden_states.shape, dtype=torch.float32)
    if not used:
        return total
    read = [shared.read_expert(expert) for expert in used]
    stacked: dict[str, Any] = {name: torch.stack([one[name] for one in read]) for name in read[0]}
    local = torch.full(ids.shape, -1, dtype=torch.int64)
    for index, expert in enumerate(used):
        local[ids == expert] = index
    return moe_float32(hidden_states, local, weights, w13_layout=shared.w13_layout, **stacked, **shared.options)


def cpu_moe_submit(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    engine: torch.Tensor,
    *,
    max_deferred: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    handle = int(engine)
    num_experts = _find(handle).num_experts
    weights = topk_weights.to("cpu", torch.float32)
    ids = topk_ids.to("cpu", torch.int64)
    ids = torch.where((ids >= 0) & (ids < num_experts), ids, -1)
    now, later = select_deferred_experts(ids, weights, max_deferred or 0)
    tickets = []
    for part in (now, later):
        ticket = next(_tickets)
        if part is later and not bool((later >= 0).any()):
            ticket = 0
        else:
            RESULTS[ticket] = experts_float32(hidden_states.cpu(), part, weights, handle)
        tickets.append(torch.tensor([ticket], dtype=torch.int64, device=hidden_states.device))
    return tickets[0], tickets[1]
