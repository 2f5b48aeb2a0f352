"""The expert computation: grouped matmuls over blocks of dequantised weights, and the activation between them.

Which weights are dequantised is decided by sizes alone, so that it never changes within a captured graph: the experts
that the slots name where there are fewer slots than experts, else all. Memory is bounded by going through the output
columns of each product in blocks. A column is one complete dot product, so that the block size does not change a bit,
and no row of the activations is moved twice; going through the experts instead would gather the rows anew for
every block, since where an expert's rows begin is known to the device only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from moe_ops.meta.fused_mxfp4_moe import BLOCK, CHECKPOINT, resolve_activation
from moe_ops.npu import mx
from moe_ops.npu._device import has_operator
from moe_ops.npu._grouped import MAX_GROUPS, MAX_INNER, grouped_product
from moe_ops.npu._routing import Permutation, permute, slot_order
from moe_ops.npu._weights import Matrix, gate_up_rows, take

_DEFAULT_BLOCK_MIB = 1024


def block_bytes() -> int:
    """How many bytes of dequantised weights may exist at a time."""
    return int(os.environ.get("MOE_OPS_NPU_BLOCK_MIB", _DEFAULT_BLOCK_MIB)) << 20


@dataclass(frozen=True)
class Experts:
    """The weights and options of one call."""

    w13: Matrix
    w2: Matrix
    w13_rows: str  # row order of w13; prepared weights are always [gate; up]
    w13_layout: str  # row order of w13_bias
    w13_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None
    activation: str
    limit: float | None
    alpha: float
    num_experts: int
    hidden_size: int
    intermediate_size: int


def make_experts(
    op: str,
    geometry: tuple[int, int],
    hidden_size: int,
    weights: tuple[torch.Tensor, ...],
    *,
    w13_layout: str,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    activation: str = "silu",
    swiglu_limit: float | None = None,
    swiglu_alpha: float | None = None,
    weight_layout: str = CHECKPOINT,
) -> Experts:
    w13, w13_scale, w2, w2_scale = weights
    if weight_layout == CHECKPOINT:
        matrices = Matrix(w13, w13_scale), Matrix(w2, w2_scale)
    elif weight_layout == mx.LAYOUT:
        matrices = mx.unpacked(w13, w13_scale), mx.unpacked(w2, w2_scale)
    else:
        matrices = Matrix(w13[0], None), Matrix(w2[0], None)
    activation, limit, alpha = resolve_activation(op, activation, swiglu_limit, swiglu_alpha)
    return Experts(
        w13=matrices[0],
        w2=matrices[1],
        w13_rows=w13_layout if weight_layout == CHECKPOINT else "gate_up",
        w13_layout=w13_layout,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        activation=activation,
        limit=limit,
        alpha=alpha,
        num_experts=geometry[0],
        hidden_size=hidden_size,
        intermediate_size=geometry[1],
    )


def product_dtypes(dtype: torch.dtype, weight_layout: str) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of the gate-and-up product and of the down product.

    A grouped matmul of bfloat16 gives bfloat16. Gate and up rounded there would be two roundings more than on the
    other devices, so that this product runs in float32 unless the caller has chosen speed: with weights prepared as
    bfloat16, or with MOE_OPS_NPU_PRODUCTS=bfloat16. float16 cannot hold every MXFP4 value and is not narrowed.
    """
    if dtype != torch.bfloat16:
        return torch.float32, torch.float32
    fast = weight_layout != CHECKPOINT or os.environ.get("MOE_OPS_NPU_PRODUCTS", "float32") == "bfloat16"
    return torch.bfloat16 if fast else torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Groups:
    """Rows in groups of one expert each, and the product over them."""

    experts: torch.Tensor | None  # [G] int64, the expert of each group; None: expert g in group g
    count: int
    product: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor
    ]  # x [M, C], w [G, N, C], bias [G, N]


def row_products(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The plain form, for devices without a known grouped matmul: one group is one row."""
    y = torch.bmm(x.unsqueeze(1), weight.transpose(1, 2)).squeeze(1)
    return y if bias is None else (y.to(torch.float32) + bias.to(torch.float32)).to(y.dtype)


def used_experts(counts: torch.Tensor, slots: int) -> torch.Tensor:
    """[slots] int64, ascending within the experts that have rows; these come first."""
    return torch.sort((counts == 0).to(torch.int32), dim=0, stable=True)[1][:slots]


def arrange(hidden_states: torch.Tensor, keys: torch.Tensor, experts: Experts) -> tuple[Permutation, Groups]:
    """Expert-major rows and their groups, for at least one slot. `keys`: local ids, num_experts for none."""
    slots = keys.numel()
    few = slots < experts.num_experts
    widest = max(experts.hidden_size, 2 * experts.intermediate_size)
    groups = slots if few else experts.num_experts
    grouped = has_operator(hidden_states.device, "npu_grouped_matmul")
    if grouped and groups <= MAX_GROUPS and widest <= MAX_INNER:
        rows = permute(hidden_states, keys, experts.num_experts)
        if not few:
            return rows, Groups(None, groups, partial(grouped_product, counts=rows.counts))
        used = used_experts(rows.counts, slots)
        return rows, Groups(used, groups, partial(grouped_product, counts=rows.counts.index_select(0, used)))
    order, row_map = slot_order(keys, experts.num_experts)
    of_row = keys.flatten().index_select(0, order)
    of_row = torch.where(of_row < experts.num_experts, of_row, torch.zeros_like(of_row))
    rows = Permutation(hidden_states.index_select(0, order // keys.shape[1]), row_map, keys.new_empty(0))
    return rows, Groups(of_row, slots, row_products)


def _products(
    x: torch.Tensor,
    groups: Groups,
    matrix: Matrix,
    width: int,
    bytes_per_column: int,
    weight_and_bias: Callable[[int, int], tuple[torch.Tensor, torch.Tensor | None]],
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(start, stop, product) of ranges of the `width` columns: whole MXFP4 blocks, within the budget if one block is.

    Prepared weights of all experts are used where they are, in one range.
    """
    in_place = matrix.scales is None and groups.experts is None and x.dtype == matrix.codes.dtype
    step = max(BLOCK, block_bytes() // (groups.count * bytes_per_column) // BLOCK * BLOCK)
    if in_place:
        step = width
    for start in range(0, width, step):
        stop = min(width, start + step)
        yield start, stop, groups.product(x, *weight_and_bias(start, stop))


def _joined(pieces: Iterator[tuple[int, int, torch.Tensor]], rows: int, width: int) -> torch.Tensor:
    result: torch.Tensor | None = None
    for start, stop, piece in pieces:
        if stop - start == width:
            return piece
        if result is None:
            result = piece.new_empty(rows, width)
        result[:, start:stop].copy_(piece)
    assert result is not None
    return result


def _gate_up_products(x: torch.Tensor, groups: Groups, experts: Experts) -> Iterator[tuple[int, int, torch.Tensor]]:
    """x @ w13^T + bias as [gate; up] of ranges of the intermediate columns."""
    size = experts.intermediate_size

    def weight_and_bias(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = gate_up_rows(experts.w13_rows, size, start, stop)
        weight = experts.w13.block(groups.experts, rows, slice(0, experts.hidden_size), x.dtype)
        if experts.w13_bias is None:
            return weight, None
        bias = take(experts.w13_bias, groups.experts, gate_up_rows(experts.w13_layout, size, start, stop))
        return weight, bias

    per_column = 2 * experts.hidden_size * x.element_size()
    return _products(x, groups, experts.w13, size, per_column, weight_and_bias)


def gate_up(x: torch.Tensor, groups: Groups, experts: Experts) -> torch.Tensor:
    """[M, 2I], gate before up, before the activation."""
    size = experts.intermediate_size
    pieces = list(_gate_up_products(x, groups, experts))
    if len(pieces) == 1:
        return pieces[0][2]
    gates, ups = zip(*(piece.chunk(2, dim=1) for _, _, piece in pieces), strict=True)
    assert sum(gate.shape[1] for gate in gates) == size
    return torch.cat([*gates, *ups], dim=1)


def hidden_activations(x: torch.Tensor, groups: Groups, experts: Experts, dtype: torch.dtype) -> torch.Tensor:
    """[M, I] `dtype`: act(x @ w13^T + bias)."""
    products = _gate_up_products(x, groups, experts)
    kind = (experts.activation, experts.limit, experts.alpha)
    activated = ((start, stop, activate(piece, *kind).to(dtype)) for start, stop, piece in products)
    return _joined(activated, x.shape[0], experts.intermediate_size)


def down(hidden: torch.Tensor, groups: Groups, experts: Experts) -> torch.Tensor:
    """[M, H]: hidden @ w2^T + bias."""

    def weight_and_bias(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = (slice(start, stop),)
        weight = experts.w2.block(groups.experts, rows, slice(0, experts.intermediate_size), hidden.dtype)
        return weight, None if experts.w2_bias is None else take(experts.w2_bias, groups.experts, rows)

    per_column = experts.intermediate_size * hidden.element_size()
    products = _products(hidden, groups, experts.w2, experts.hidden_size, per_column, weight_and_bias)
    return _joined(products, hidden.shape[0], experts.hidden_size)


def hidden_gradient(grad: torch.Tensor, groups: Groups, experts: Experts) -> torch.Tensor:
    """[M, I]: grad @ w2."""

    def weight_and_bias(start: int, stop: int) -> tuple[torch.Tensor, None]:
        rows = (slice(0, experts.hidden_size),)
        weight = experts.w2.block(groups.experts, rows, slice(start, stop), grad.dtype)
        return weight.transpose(1, 2), None

    per_column = experts.hidden_size * grad.element_size()
    products = _products(grad, groups, experts.w2, experts.intermediate_size, per_column, weight_and_bias)
    return _joined(products, grad.shape[0], experts.intermediate_size)


def input_gradient(grad: torch.Tensor, groups: Groups, experts: Experts) -> torch.Tensor:
    """[M, H]: grad [M, 2I], gate before up, @ w13."""
    size = experts.intermediate_size

    def weight_and_bias(start: int, stop: int) -> tuple[torch.Tensor, None]:
        rows = gate_up_rows(experts.w13_rows, size, 0, size)
        weight = experts.w13.block(groups.experts, rows, slice(start, stop), grad.dtype)
        return weight.transpose(1, 2), None

    per_column = 2 * size * grad.element_size()
    products = _products(grad, groups, experts.w13, experts.hidden_size, per_column, weight_and_bias)
    return _joined(products, grad.shape[0], experts.hidden_size)


def activate(gate_up: torch.Tensor, activation: str, limit: float | None, alpha: float) -> torch.Tensor:
    """[M, 2n] -> [M, n] of the same dtype, in float32 inside."""
    device = gate_up.device
    if limit is None and has_operator(device, "npu_swiglu"):
        return torch.ops.npu.npu_swiglu(gate_up, dim=-1)
    offset = 1.0 if activation == "swiglu_oai" else 0.0
    if limit is not None and has_operator(device, "npu_clipped_swiglu"):
        return torch.ops.npu.npu_clipped_swiglu(
            gate_up, dim=-1, alpha=alpha, limit=limit, bias=offset, interleaved=False
        )
    gate, up = gate_up.to(torch.float32).chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(gate * alpha) * (up + offset)).to(gate_up.dtype)
