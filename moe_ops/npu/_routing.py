"""The permutation behind the ops: which slot goes to which row, and the weighted way back.

Ids outside [0, E) are out of contract for the fused operators of CANN. They are given the id E, and the operators are
told of E + 1 experts of which [0, E) are active: in contract for every id, and sorted last.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_ops.npu._device import has_operator

# aclnnMoeInitRoutingV3 of CANN 9.1.
_MAX_FUSED_EXPERTS = 10240


class Permutation(NamedTuple):
    rows: torch.Tensor  # [T * K, H], expert-major; what stands past the routed rows is unspecified
    row_map: torch.Tensor  # [T, K] int32, -1 for no row
    counts: torch.Tensor  # [E] int64


def expert_keys(topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[T, K] int64: the id, or num_experts for a slot without an expert. Compared in int64, never narrowed first."""
    ids = topk_ids.to(torch.int64)
    routed = (ids >= 0) & (ids < num_experts)
    return torch.where(routed, ids, torch.full_like(ids, num_experts))


def local_keys(topk_ids: torch.Tensor, num_experts: int, expert_map: torch.Tensor | None) -> torch.Tensor:
    """`expert_keys` of the ids after a table of global to local ids."""
    if expert_map is None:
        return expert_keys(topk_ids, num_experts)
    known = expert_keys(topk_ids, expert_map.numel())
    table = torch.cat([expert_map.to(torch.int64), expert_map.new_full((1,), -1, dtype=torch.int64)])
    return expert_keys(table.index_select(0, known.flatten()).view_as(known), num_experts)


def count_keys(keys: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[E] int32. Integer additions: the result does not depend on their order."""
    ones = torch.ones(keys.numel(), dtype=torch.int32, device=keys.device)
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=keys.device)
    return counts.scatter_add(0, keys.flatten(), ones)[:num_experts]


def slot_order(keys: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(slot of each row [T * K] int64, row of each slot [T, K] int32, -1 for no row), by a stable sort."""
    flat = keys.flatten()
    order = torch.sort(flat, dim=0, stable=True)[1]
    row = torch.empty(flat.numel(), dtype=torch.int32, device=keys.device)
    row = row.scatter(0, order, torch.arange(flat.numel(), dtype=torch.int32, device=keys.device))
    return order, torch.where(flat < num_experts, row, torch.full_like(row, -1)).view(keys.shape)


def permute(hidden_states: torch.Tensor, keys: torch.Tensor, num_experts: int) -> Permutation:
    """Expert-major rows of the tokens, by one fused operator where the device has it."""
    slots, top_k = keys.numel(), keys.shape[1]
    fused = slots > 0 and hidden_states.shape[1] > 0 and num_experts < _MAX_FUSED_EXPERTS
    if fused and has_operator(hidden_states.device, "npu_moe_init_routing_v2"):
        # The form that A2, A3 and A5 all take. active_expert_range is always given: left out, torch_npu 2.13 passes an
        # empty array, and later versions keep the range of the first call.
        rows, row_map, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
            hidden_states.contiguous(),
            keys.to(torch.int32),
            active_num=slots,
            expert_num=num_experts + 1,
            expert_tokens_num_type=1,
            expert_tokens_num_flag=True,
            active_expert_range=[0, num_experts],
            quant_mode=-1,
            row_idx_type=0,
        )
        return Permutation(rows, row_map.view(keys.shape), counts)
    order, row_map = slot_order(keys, num_experts)
    rows = hidden_states.index_select(0, order // max(top_k, 1))
    return Permutation(rows, row_map, count_keys(keys, num_experts).to(torch.int64))


def zero_tail(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Sets the rows past the routed ones to 0, by selection: what stands there may be NaN."""
    past = torch.arange(rows.shape[0], device=rows.device) >= counts.sum()
    return rows.masked_fill_(past.unsqueeze(1), 0)


def combine(
    rows: torch.Tensor, row_map: torch.Tensor, topk_weights: torch.Tensor | None, *, keep_zero_weights: bool = False
) -> torch.Tensor:
    """[T, H] float32: the sum over k, in slot order, of weight times row.

    A slot without a row, or of weight 0, is selected away. CANN's unpermute and finalize operators multiply such slots
    (0 * NaN) and take no -1, so that the sum is written out here.
    """
    (num_tokens, top_k), hidden_size = row_map.shape, rows.shape[1]
    total = torch.zeros(num_tokens, hidden_size, dtype=torch.float32, device=rows.device)
    if rows.shape[0] == 0 or num_tokens == 0:
        return total
    present = (row_map >= 0) & (row_map < rows.shape[0])
    index = torch.where(present, row_map, torch.zeros_like(row_map))
    weights = None
    if topk_weights is not None:
        weights = topk_weights.to(torch.float32)
        if not keep_zero_weights:
            present = present & (weights != 0)
    absent = ~present
    for k in range(top_k):
        value = rows.index_select(0, index[:, k].contiguous()).to(torch.float32)
        if weights is not None:
            value = value * weights[:, k : k + 1]
        total = total + torch.where(absent[:, k : k + 1], torch.zeros_like(value), value)
    return total
