"""Argument checks that several ops share. The texts are those of csrc/cpu/check.h."""

from __future__ import annotations

import torch

from moe_ops._errors import argument_error, describe, rank, require

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
FLOATS_TEXT = "bfloat16, float16 or float32"
IDS = (torch.int32, torch.int64)
INT32_MAX = 2**31 - 1


def check_rows(op: str, argument: str, rows: torch.Tensor, expected: str = "[num_tokens, hidden_size]") -> None:
    require(rank(rows) == 2 and rows.dtype in FLOATS, op, argument, f"{expected} {FLOATS_TEXT}", rows)


def check_ids(op: str, topk_ids: torch.Tensor, num_tokens: int, topk_weights: torch.Tensor | None = None) -> None:
    ids_dtype, weights_dtype = (None if t is None else t.dtype for t in (topk_ids, topk_weights))
    if ids_dtype and weights_dtype and ids_dtype.is_floating_point and not weights_dtype.is_floating_point:
        raise argument_error(
            op,
            "topk_ids",
            f"[{num_tokens}, top_k] int32 or int64",
            f"{describe(topk_ids)}: topk_ids and topk_weights are swapped",
        )
    ok = rank(topk_ids) == 2 and topk_ids.dtype in IDS and topk_ids.shape[0] == num_tokens
    require(ok, op, "topk_ids", f"[{num_tokens}, top_k] int32 or int64", topk_ids)
    slots = topk_ids.shape[0] * topk_ids.shape[1]
    if isinstance(slots, int):  # a symbolic size is not guarded: the kernel checks the real one
        require(slots <= INT32_MAX, op, "topk_ids", f"at most {INT32_MAX} slots", topk_ids)


def check_weights(op: str, topk_weights: torch.Tensor, num_tokens: int, top_k: int) -> None:
    ok = (
        rank(topk_weights) == 2
        and topk_weights.dtype.is_floating_point
        and topk_weights.dtype.itemsize >= 2
        and topk_weights.shape[0] == num_tokens
        and topk_weights.shape[1] == top_k
    )
    require(ok, op, "topk_weights", f"[{num_tokens}, {top_k}] float", topk_weights)


def check_device(op: str, like: torch.Tensor, **others: torch.Tensor | None) -> None:
    for name, tensor in others.items():
        if tensor is not None:
            require(tensor.device == like.device, op, name, f"on {like.device}", str(tensor.device))


def check_ticket(op: str, argument: str, ticket: torch.Tensor | None) -> None:
    if ticket is not None:
        check_required_ticket(op, argument, ticket)


def check_required_ticket(op: str, argument: str, ticket: torch.Tensor) -> None:
    ok = rank(ticket) == 1 and ticket.dtype == torch.int64 and ticket.shape[0] == 1
    require(ok, op, argument, "[1] int64", ticket)
