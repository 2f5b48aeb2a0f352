"""MXFP4 weights kept as bfloat16: four times the memory, no dequantisation per call, products in bfloat16.

    budget = WeightBudget(24 << 30)
    for layer in layers:
        layer.weights, layer.weight_layout = prepare(*layer.weights, w13_layout="gate_up", budget=budget)

Opt-in, within a budget that the layers of a model share: a layer that no longer fits keeps its checkpoint tensors,
which the op takes as well. bfloat16 holds every MXFP4 value exactly; what changes is that gate and up are rounded to
bfloat16 between the products (docs/npu.md).
"""

from __future__ import annotations

import weakref

import torch

from moe_ops._errors import require
from moe_ops.meta.fused_mxfp4_moe import (
    BLOCK,
    CHECKPOINT,
    PREPARED_LAYOUTS,
    W13_LAYOUTS,
    PreparedLayout,
    checkpoint_geometry,
)
from moe_ops.npu._weights import Matrix, gate_up_rows

LAYOUT = "npu_bf16_v1"
_OP = "prepare"

Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class WeightBudget:
    """Bytes that prepared weights may take together; weights that are freed give theirs back."""

    def __init__(self, total_bytes: int) -> None:
        require(total_bytes >= 0, "WeightBudget", "total_bytes", "at least 0", str(total_bytes))
        self.total_bytes = total_bytes
        self._tensors: list[weakref.ref[torch.Tensor]] = []

    @property
    def used_bytes(self) -> int:
        alive = [(ref, tensor) for ref in self._tensors if (tensor := ref()) is not None]
        self._tensors = [ref for ref, _ in alive]
        return sum(tensor.numel() * tensor.element_size() for _, tensor in alive)

    def fits(self, size: int) -> bool:
        return self.used_bytes + size <= self.total_bytes

    def add(self, tensor: torch.Tensor) -> None:
        self._tensors.append(weakref.ref(tensor))


def prepare(
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    *,
    w13_layout: str,
    budget: WeightBudget,
) -> tuple[Weights, str]:
    """(weights, weight_layout) for `fused_mxfp4_moe`: bfloat16 within the budget, else what was given.

    w13_layout: the row order of `w13`. Calls keep naming it, since `w13_bias` stays in that order.
    """
    require(w13_layout in W13_LAYOUTS, _OP, "w13_layout", "'gate_up', 'up_gate' or 'interleaved'", f"'{w13_layout}'")
    hidden_size = w2.shape[1] if w2.dim() == 3 else 0
    num_experts, size = checkpoint_geometry(_OP, hidden_size, w13, w13_scale, w2, w2_scale)
    if not budget.fits(num_experts * 3 * size * hidden_size * torch.bfloat16.itemsize):
        return (w13, w13_scale, w2, w2_scale), CHECKPOINT
    first = torch.empty(1, num_experts, 2 * size, hidden_size, dtype=torch.bfloat16, device=w13.device)
    second = torch.empty(1, num_experts, hidden_size, size, dtype=torch.bfloat16, device=w13.device)
    rows = gate_up_rows(w13_layout, size, 0, size)
    for expert in range(num_experts):  # one at a time: the peak is the result plus one expert
        one = slice(expert, expert + 1)
        first[0, one] = Matrix(w13[one], w13_scale[one]).block(None, rows, slice(0, hidden_size), torch.bfloat16)
        second[0, one] = Matrix(w2[one], w2_scale[one]).block(
            None, (slice(0, hidden_size),), slice(0, size), torch.bfloat16
        )
    budget.add(first)
    budget.add(second)
    return (first, w13_scale.new_empty(0), second, w2_scale.new_empty(0)), LAYOUT


def _geometry(
    op: str,
    hidden_size: int,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
) -> tuple[int, int]:
    expected = f"[1, num_experts, 2 * intermediate_size, {hidden_size}] bfloat16 for weight_layout '{LAYOUT}'"
    ok = w13.dim() == 4 and w13.dtype == torch.bfloat16 and w13.shape[0] == 1 and w13.shape[3] == hidden_size
    require(ok and w13.shape[2] % (2 * BLOCK) == 0 and w13.is_contiguous(), op, "w13", expected, w13)
    num_experts, size = w13.shape[1], w13.shape[2] // 2
    ok = w2.dim() == 4 and w2.dtype == torch.bfloat16 and w2.is_contiguous()
    ok = ok and list(w2.shape) == [1, num_experts, hidden_size, size]
    require(ok, op, "w2", f"[1, {num_experts}, {hidden_size}, {size}] bfloat16", w2)
    for name, scale in (("w13_scale", w13_scale), ("w2_scale", w2_scale)):
        require(scale.dtype == torch.uint8 and scale.numel() == 0, op, name, "[0] uint8", scale)
    return num_experts, size


PREPARED_LAYOUTS[LAYOUT] = PreparedLayout("npu", _geometry)
