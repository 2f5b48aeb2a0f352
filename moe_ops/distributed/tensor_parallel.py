"""Cut MXFP4 experts along the intermediate dimension into parts whose outputs add up."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_ops._errors import argument_error

BLOCK = 32  # elements that share a scale
_OP = "slice_tensor_parallel"


class ExpertSlice(NamedTuple):
    """One rank's part of the experts, in the layout that the whole had."""

    w13: torch.Tensor  # [E, 2 * i, H / 2] u8
    w13_scale: torch.Tensor  # [E, 2 * i, H / 32] u8
    w2: torch.Tensor  # [E, H, i / 2] u8
    w2_scale: torch.Tensor  # [E, H, i / 32] u8
    w13_bias: torch.Tensor | None  # [E, 2 * i]
    w2_bias: torch.Tensor | None  # [E, H]


def slice_bounds(intermediate_size: int, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """First and end element of a rank's part: whole blocks of 32, the first ranks take one more where needed."""
    if tp_size < 1 or not 0 <= tp_rank < tp_size:
        raise argument_error(_OP, "tp_rank", f"in [0, {tp_size})", tp_rank)
    blocks = intermediate_size // BLOCK
    if intermediate_size % BLOCK or blocks < tp_size:
        expected = f"a multiple of {BLOCK} with at least one block per rank ({tp_size})"
        raise argument_error(_OP, "intermediate size", expected, intermediate_size)
    quotient, remainder = divmod(blocks, tp_size)
    first = tp_rank * quotient + min(tp_rank, remainder)
    return first * BLOCK, (first + quotient + (1 if tp_rank < remainder else 0)) * BLOCK


def slice_tensor_parallel(
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    *,
    w13_layout: str,
    tp_rank: int,
    tp_size: int,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> ExpertSlice:
    """The part of rank `tp_rank` of raw checkpoint tensors: gate and up rows of w13, columns of w2, and their scales.

    The outputs of all parts add up to the output of the whole. `w2_bias` stays on rank 0 only and is zero elsewhere,
    or it would count `tp_size` times. The results are fresh contiguous tensors: the whole can be freed.
    """
    if w13.ndim != 3 or w13.dtype != torch.uint8:
        raise argument_error(_OP, "w13", "[E, 2I, H/2] uint8 (raw, not prepared)", w13)
    num_experts, double, half_hidden = w13.shape
    intermediate, hidden = double // 2, half_hidden * 2
    expected = {
        "w13_scale": (w13_scale, (num_experts, double, hidden // BLOCK)),
        "w2": (w2, (num_experts, hidden, intermediate // 2)),
        "w2_scale": (w2_scale, (num_experts, hidden, intermediate // BLOCK)),
        "w13_bias": (w13_bias, (num_experts, double)),
        "w2_bias": (w2_bias, (num_experts, hidden)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise argument_error(_OP, name, f"of shape {list(shape)}", tensor)
    first, end = slice_bounds(intermediate, tp_rank, tp_size)

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        if w13_layout == "interleaved":
            return _fresh(tensor[:, 2 * first : 2 * end])
        parts = tensor[:, first:end], tensor[:, intermediate + first : intermediate + end]
        return torch.cat(parts, dim=1)

    if w13_layout not in ("gate_up", "up_gate", "interleaved"):
        raise argument_error(_OP, "w13_layout", '"gate_up", "up_gate" or "interleaved"', w13_layout)
    if w2_bias is not None:
        w2_bias = w2_bias.clone() if tp_rank == 0 else torch.zeros_like(w2_bias)
    return ExpertSlice(
        rows(w13),
        rows(w13_scale),
        _fresh(w2[:, :, first // 2 : end // 2]),
        _fresh(w2_scale[:, :, first // BLOCK : end // BLOCK]),
        None if w13_bias is None else rows(w13_bias),
        w2_bias,
    )


def _fresh(view: torch.Tensor) -> torch.Tensor:
    return view.clone(memory_format=torch.contiguous_format)
