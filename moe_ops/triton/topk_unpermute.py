"""topk_unpermute on CUDA."""

from __future__ import annotations

import torch

from moe_ops.meta.topk_unpermute import topk_unpermute as check_and_allocate
from moe_ops.triton._combine_rows import combine_rows


def topk_unpermute(
    permuted_hidden_states: torch.Tensor, row_map: torch.Tensor, topk_weights: torch.Tensor | None = None
) -> torch.Tensor:
    out = check_and_allocate(permuted_hidden_states, row_map, topk_weights)
    combine_rows(permuted_hidden_states, row_map, topk_weights, out)
    return out
