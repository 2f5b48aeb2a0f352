"""Checks and outputs of ep_remap."""

from __future__ import annotations

import torch

from moe_ops._errors import argument_error, rank, require
from moe_ops.meta._checks import INT32_MAX, check_device, check_ids, check_weights

FILLS = ("reuse", "skip")


def ep_remap(
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    expert_offset: int | None = None,
    num_local_experts: int | None = None,
    expert_map: torch.Tensor | None = None,
    fill: str = "reuse",
) -> tuple[torch.Tensor, torch.Tensor]:
    op = "ep_remap"
    check_ids(op, topk_ids, topk_ids.shape[0] if rank(topk_ids) > 0 else 0, topk_weights)
    num_tokens, top_k = topk_ids.shape
    check_weights(op, topk_weights, num_tokens, top_k)
    ranged = expert_offset is not None and num_local_experts is not None
    mapped = expert_offset is None and num_local_experts is None and expert_map is not None
    if not mapped and not (ranged and expert_map is None):
        raise argument_error(
            op,
            "expert_offset",
            "given together with num_local_experts, or expert_map alone",
            f"expert_offset={expert_offset}, num_local_experts={num_local_experts}, "
            f"expert_map={'given' if expert_map is not None else None}",
        )
    if num_local_experts is not None:
        require(num_local_experts >= 0, op, "num_local_experts", "at least 0", str(num_local_experts))
        ok = num_local_experts <= INT32_MAX  # local ids are int32
        require(ok, op, "num_local_experts", f"at most {INT32_MAX}", str(num_local_experts))
    if expert_offset is not None:
        require(expert_offset >= 0, op, "expert_offset", "at least 0", str(expert_offset))
    if expert_map is not None:
        ok = expert_map.dim() == 1 and expert_map.dtype == torch.int32
        require(ok, op, "expert_map", "[num_experts] int32", expert_map)
    check_device(op, topk_ids, topk_weights=topk_weights, expert_map=expert_map)
    require(fill in FILLS, op, "fill", "'reuse' or 'skip'", fill.join("''"))
    return (
        topk_ids.new_empty((num_tokens, top_k), dtype=torch.int32),
        topk_ids.new_empty((num_tokens, top_k), dtype=torch.float32),
    )
