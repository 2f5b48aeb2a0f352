"""Weighted restore: out[t] = sum over k of weight[t, k] * permuted[row_map[t, k]], summed in float32 in slot order."""

from __future__ import annotations

import torch


def topk_unpermute(
    permuted_hidden_states: torch.Tensor, row_map: torch.Tensor, topk_weights: torch.Tensor | None = None
) -> torch.Tensor:
    rows, hidden_size = permuted_hidden_states.shape
    num_tokens, top_k = row_map.shape
    total = torch.zeros(num_tokens, hidden_size, dtype=torch.float32, device=row_map.device)
    if rows == 0:
        return total.to(permuted_hidden_states.dtype)
    for k in range(top_k):
        row = row_map[:, k].to(torch.int64)
        present = (row >= 0) & (row < rows)
        value = permuted_hidden_states[row.clamp(0, rows - 1)].to(torch.float32)  # [T, H]
        if topk_weights is not None:
            weight = topk_weights[:, k].to(torch.float32)
            present = present & (weight != 0)
            value = value * weight.unsqueeze(1)
        total = total + torch.where(present.unsqueeze(1), value, 0.0)
    return total.to(permuted_hidden_states.dtype)
