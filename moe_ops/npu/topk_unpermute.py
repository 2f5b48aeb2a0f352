"""topk_unpermute on NPU: gathers and float32 sums, selected and not multiplied (see _routing.combine)."""

from __future__ import annotations

import torch

from moe_ops.meta.topk_unpermute import check_unpermute
from moe_ops.npu._device import require_npu
from moe_ops.npu._routing import combine


def topk_unpermute(
    permuted_hidden_states: torch.Tensor, row_map: torch.Tensor, topk_weights: torch.Tensor | None = None
) -> torch.Tensor:
    require_npu("topk_unpermute")
    check_unpermute("topk_unpermute", permuted_hidden_states, row_map, topk_weights)
    return combine(permuted_hidden_states, row_map, topk_weights).to(permuted_hidden_states.dtype)
