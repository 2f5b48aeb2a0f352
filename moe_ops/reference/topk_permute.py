"""Expert-major expansion of token rows.

Slot q = t * K + k of token t goes to the row given by a stable sort of the expert ids; slots without an expert get no
row.
"""

from __future__ import annotations

import torch


def permutation_map(topk_ids: torch.Tensor, num_experts: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(row_map [T, K] int32, tokens_per_expert [E] int32)."""
    ids = topk_ids.reshape(-1).to(torch.int64)
    routed = (ids >= 0) & (ids < num_experts)
    key = torch.where(routed, ids, num_experts)  # slots without an expert sort last
    order = torch.argsort(key, stable=True)
    row = torch.empty_like(order)
    row[order] = torch.arange(order.numel(), device=order.device)
    row = torch.where(routed & (row < rows), row, -1)
    counts = torch.bincount(key, minlength=num_experts + 1)[:num_experts]
    return row.to(torch.int32).view(topk_ids.shape), counts.to(torch.int32)


def topk_permute(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    num_experts: int,
    *,
    num_out_tokens: int | None = None,
    after: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_tokens, top_k = topk_ids.shape
    rows = num_tokens * top_k if num_out_tokens is None else num_out_tokens
    row_map, tokens_per_expert = permutation_map(topk_ids, num_experts, rows)
    permuted = hidden_states.new_zeros(rows, hidden_states.shape[1])  # [rows, H]
    slots = torch.nonzero(row_map.reshape(-1) >= 0).reshape(-1)
    permuted[row_map.reshape(-1)[slots].to(torch.int64)] = hidden_states[slots // max(top_k, 1)]
    return permuted, row_map, tokens_per_expert
