"""MXFP4 weights in the byte order of the matrix product that Ascend950 has for them: no dequantisation, no copy.

    weights, weight_layout = prepare_mx(*weights, w13_layout="gate_up")
    out = torch.ops.moe_ops.fused_mxfp4_moe(x, ids, topk_weights, *weights, w13_layout="gate_up",
                                            weight_layout=weight_layout)

The product is CANN's aclnnGroupedMatmulWeightNz with 16-bit activations (docs/npu.md). The vector unit multiplies each
code by its scale in bfloat16, which is exact for the scale codes 2 to 252, and the products are summed in float32;
gate and up are rounded to bfloat16 between the two products. What the operator does not hold keeps its checkpoint
tensors (`mx_reason`). Rows of another dtype than bfloat16, and the backward, unpack the weights for the call.
"""

from __future__ import annotations

import warnings

import torch

from moe_ops._errors import argument_error, require
from moe_ops.meta.fused_mxfp4_moe import (
    BLOCK,
    CHECKPOINT,
    PREPARED_LAYOUTS,
    W13_LAYOUTS,
    PreparedLayout,
    checkpoint_geometry,
)
from moe_ops.npu import _native
from moe_ops.npu._device import family, has_operator, runtime
from moe_ops.npu._grouped import MAX_GROUPS
from moe_ops.npu._weights import Matrix, gate_up_rows, take

LAYOUT = "npu_mx_v1"
_OP = "prepare_mx"

# The scale is shifted to the exponent of a bfloat16 and multiplied: the code 0 would be 0, 255 infinity. From 2 to 252
# every product is a normal number, whatever the unit does with the others.
LEAST_SCALE, MOST_SCALE = 2, 252
_ALIGNMENT = 64  # 32 bytes of codes, of both dimensions

# The private format of the weight: 16 codes, in two float32 carriers of 8, make a row of memory; 16 rows a block.
_FORMAT, _PLAIN_FORMAT = 52, 2  # ACL_FORMAT_FRACTAL_NZ_C0_2, ACL_FORMAT_ND
_ROW, _ROWS, _CARRIER = 16, 16, 8

Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def mx_reason(w13: torch.Tensor, w13_scale: torch.Tensor, w2: torch.Tensor, w2_scale: torch.Tensor) -> str | None:
    """Why the native product does not take these checkpoint tensors; None where it does. Waits for the device."""
    device = w13.device
    if device.type != "npu" or family(device) != "A5":
        name = runtime().get_device_name(device.index) if device.type == "npu" else str(device)
        return f"{name} has no product for MXFP4 weights (Ascend950 has)"
    for name in ("npu_grouped_matmul", "empty_with_format"):
        if not has_operator(device, name):
            return f"this torch_npu has no {name}"
    num_experts, hidden_size, size = w13.shape[0], w2.shape[1], w13.shape[1] // 2
    if hidden_size % _ALIGNMENT or size % _ALIGNMENT:
        return f"hidden_size {hidden_size} and intermediate_size {size} are not both multiples of {_ALIGNMENT}"
    if num_experts > MAX_GROUPS:
        return f"{num_experts} experts are more than {MAX_GROUPS}"
    for label, scale in (("w13_scale", w13_scale), ("w2_scale", w2_scale)):
        codes = scale.to(torch.int32)
        outside = int(((codes < LEAST_SCALE) | (codes > MOST_SCALE)).to(torch.int32).sum())
        if outside:
            return f"{outside} codes of {label} are outside {LEAST_SCALE} to {MOST_SCALE}"
    return None


def prepare_mx(
    w13: torch.Tensor, w13_scale: torch.Tensor, w2: torch.Tensor, w2_scale: torch.Tensor, *, w13_layout: str
) -> tuple[Weights, str]:
    """(weights, weight_layout) for `fused_mxfp4_moe`: packed for Ascend950, or, after a warning that says why, what was
    given.

    The packed tensors are as large as the checkpoint's, which are left alone: drop them afterwards. They cannot share
    their memory, since a private format belongs to a storage of its own. Prepare on the device that uses the weights: a
    copy of a packed tensor is refused by the op.
    """
    require(w13_layout in W13_LAYOUTS, _OP, "w13_layout", "'gate_up', 'up_gate' or 'interleaved'", f"'{w13_layout}'")
    hidden_size = w2.shape[1] if w2.dim() == 3 else 0
    _, size = checkpoint_geometry(_OP, hidden_size, w13, w13_scale, w2, w2_scale)
    reason = mx_reason(w13, w13_scale, w2, w2_scale)
    if reason is not None:
        warnings.warn(f"moe_ops: the generic composition serves these experts: {reason}", stacklevel=2)
        return (w13, w13_scale, w2, w2_scale), CHECKPOINT
    rows = gate_up_rows(w13_layout, size, 0, size)
    with torch.no_grad():
        packed13 = _pack(w13, rows, 2 * size, hidden_size)
        packed2 = _pack(w2, (slice(0, hidden_size),), hidden_size, size)
        scale13 = take(w13_scale, None, rows).transpose(1, 2).contiguous()
        scale2 = w2_scale.transpose(1, 2).contiguous()
    return (packed13, scale13, packed2, scale2), LAYOUT


def _pack(codes: torch.Tensor, rows: tuple[slice, ...], columns: int, inner: int) -> torch.Tensor:
    """[E, columns, inner / 2] uint8 to [1, E, inner, columns / 8] float32 in the private format."""
    num_experts = codes.shape[0]
    packed = torch.ops.npu.empty_with_format(
        [num_experts, inner, columns // _CARRIER], dtype=torch.float32, device=codes.device, acl_format=_FORMAT
    )
    size = columns * inner // 2
    with runtime().device(codes.device):
        for expert in range(num_experts):
            blocks = nz_bytes(take(codes[expert : expert + 1], None, rows)[0])
            # torch_npu moves no bytes into a private format as they are; the runtime does. Reading the handle of the
            # stream issues what is queued, and on one stream `blocks` is not used again before the copy.
            stream = runtime().current_stream().npu_stream
            target = packed.data_ptr() + expert * size
            code = _native.runtime().aclrtMemcpyAsync(
                target, size, blocks.data_ptr(), size, _native.DEVICE_TO_DEVICE, stream
            )
            _native.require_success(_OP, "aclrtMemcpyAsync", code)
    return packed.view(1, *packed.shape)


def nz_bytes(codes: torch.Tensor) -> torch.Tensor:
    """[N, K / 2] uint8, two codes along K in a byte, to [N / 16, K / 16, 16, 8] uint8, two codes along N in a byte."""
    columns, inner = codes.shape[0], codes.shape[1] * 2
    wide = codes.to(torch.int32)
    single = torch.stack([wide % 16, wide // 16], dim=-1).view(columns // _ROW, _ROW // 2, 2, inner // _ROWS, _ROWS)
    low, high = single.permute(0, 3, 4, 1, 2).contiguous().unbind(-1)
    return (low + high * 16).to(torch.uint8)


def unpacked(packed: torch.Tensor, scales: torch.Tensor) -> Matrix:
    """The checkpoint form of a packed matrix, rows in the packed order: for what the native product does not do."""
    _, num_experts, inner, carriers = packed.shape
    plain = torch.ops.npu.npu_format_cast(packed.view(num_experts, inner, carriers), _PLAIN_FORMAT)
    pairs = plain.view(torch.uint8)  # [E, K, N / 2], two codes along N in a byte
    codes = torch.empty(num_experts, carriers * _CARRIER, inner // 2, dtype=torch.uint8, device=packed.device)
    for expert in range(num_experts):
        wide = pairs[expert].to(torch.int32)
        single = torch.stack([wide % 16, wide // 16], dim=-1).view(inner // 2, 2, -1)  # [K / 2, 2, N]
        codes[expert].copy_((single[:, 0] + single[:, 1] * 16).t())
    return Matrix(codes, scales.transpose(1, 2).contiguous())


def check_packed(op: str, w13: torch.Tensor, w2: torch.Tensor) -> None:
    """What a fake cannot see: the device, and the format of the storage."""
    if family(w13.device) != "A5":
        expected = f"'{CHECKPOINT}' or a prepared layout of {runtime().get_device_name(w13.device.index)}"
        raise argument_error(op, "weight_layout", expected, f"'{LAYOUT}'")
    for name, tensor in (("w13", w13), ("w2", w2)):
        found = int(torch.ops.npu.get_npu_format(tensor))
        require(found == _FORMAT, op, name, "a tensor that prepare_mx has made, not a copy", f"format {found}")


def _geometry(
    op: str,
    hidden_size: int,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
) -> tuple[int, int]:
    form = f"[1, num_experts, {hidden_size}, 2 * intermediate_size / {_CARRIER}] float32 for weight_layout '{LAYOUT}'"
    ok = w13.dim() == 4 and w13.dtype == torch.float32 and w13.shape[0] == 1 and w13.shape[2] == hidden_size
    require(ok and w13.shape[3] * _CARRIER % (2 * _ALIGNMENT) == 0 and w13.is_contiguous(), op, "w13", form, w13)
    num_experts, size = w13.shape[1], w13.shape[3] * _CARRIER // 2
    expected = [1, num_experts, size, hidden_size // _CARRIER]
    ok = w2.dim() == 4 and w2.dtype == torch.float32 and list(w2.shape) == expected and w2.is_contiguous()
    require(ok, op, "w2", f"{expected} float32", w2)
    for name, scale, shape in (
        ("w13_scale", w13_scale, [num_experts, hidden_size // BLOCK, 2 * size]),
        ("w2_scale", w2_scale, [num_experts, size // BLOCK, hidden_size]),
    ):
        ok = scale.dtype == torch.uint8 and list(scale.shape) == shape and scale.is_contiguous()
        require(ok, op, name, f"a contiguous {shape} uint8", scale)
    return num_experts, size


PREPARED_LAYOUTS[LAYOUT] = PreparedLayout("npu", _geometry)
