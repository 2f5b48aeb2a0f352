"""Checks and outputs of topk_permute_out."""

from __future__ import annotations

import torch

from moe_ops._errors import dtype_name, rank, require
from moe_ops.meta._checks import check_device
from moe_ops.meta.topk_permute import check_permute


def topk_permute_out(
    hidden_states: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, *, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    op = "topk_permute_out"
    check_permute(op, hidden_states, topk_ids, num_experts)
    check_device(op, hidden_states, out=out)
    num_tokens, hidden_size = hidden_states.shape
    top_k = topk_ids.shape[1]
    ok = rank(out) == 2 and out.dtype == hidden_states.dtype and out.is_contiguous() and out.shape[1] == hidden_size
    require(
        ok and out.shape[0] >= num_tokens * top_k,
        op,
        "out",
        f"a contiguous [at least {num_tokens * top_k}, {hidden_size}] {dtype_name(hidden_states.dtype)}",
        out,
    )
    return (
        topk_ids.new_empty((num_tokens, top_k), dtype=torch.int32),
        topk_ids.new_empty((num_experts,), dtype=torch.int32),
    )


def check_no_overlap(op: str, out: torch.Tensor, **inputs: torch.Tensor | None) -> None:
    """Real tensors only: `out` may not share memory with an input."""
    start = out.data_ptr()
    end = start + out.numel() * out.element_size()
    for name, tensor in inputs.items():
        if tensor is None or tensor.numel() == 0 or out.numel() == 0:
            continue
        first = tensor.data_ptr()
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        overlaps = first < end and start < first + span * tensor.element_size()
        require(not overlaps, op, "out", f"memory of its own, apart from {name}", "an overlapping tensor")
