"""Gradients of topk_unpermute.

grad_permuted[row_map[t, k]] = weight[t, k] * grad_output[t]; grad_weights[t, k] = <permuted[row_map[t, k]],
grad_output[t]>. Rows that no slot reads get 0, also where their weight or gradient is not finite.
"""

from __future__ import annotations

import torch

from moe_ops._errors import require


def topk_unpermute_backward(
    grad_output: torch.Tensor,
    permuted_hidden_states: torch.Tensor,
    row_map: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = permuted_hidden_states.shape[0]
    num_tokens, top_k = row_map.shape
    grad = grad_output.to(torch.float32)
    grad_permuted = torch.zeros_like(permuted_hidden_states)
    weighted = topk_weights is not None
    grad_weights = torch.zeros(
        (num_tokens, top_k) if weighted else (0,), dtype=torch.float32, device=grad_output.device
    )
    named = row_map[(row_map >= 0) & (row_map < rows)]
    values, times = named.unique(return_counts=True)
    twice = ", ".join(f"row {row} twice" for row in values[times > 1].tolist()[:1])
    require(not twice, "topk_unpermute_backward", "row_map", "a map to different rows", twice)
    for k in range(top_k):
        token = torch.nonzero((row_map[:, k] >= 0) & (row_map[:, k] < rows)).reshape(-1)
        row = row_map[token, k].to(torch.int64)
        value = grad[token]
        if topk_weights is not None:
            weight = topk_weights[token, k].to(torch.float32).unsqueeze(1)
            value = torch.where(weight != 0, value * weight, 0.0)
            grad_weights[token, k] = (permuted_hidden_states[row].to(torch.float32) * grad[token]).sum(dim=1)
        grad_permuted[row] = value.to(grad_permuted.dtype)
    return grad_permuted, grad_weights
