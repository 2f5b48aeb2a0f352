"""One expert at a time between the checkpoint's layout and a pool of slots in layout "sm90_v1", exact both ways."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_ops.cuda.layout import GROUP, STRIP, unpack_codes, unpack_scales, w13_row_order
from moe_ops.cuda.prepare import LEAST_SCALE, MOST_SCALE, prepare_sm90, sm90_reason

PIECE_BYTES = 1 << 20
WEIGHTS = ("w13", "w13_scale", "w2", "w2_scale")


def slots_reason(device: torch.device) -> str | None:
    """Why slots on this device cannot have the Hopper kernels, in one line, or None."""
    nothing = torch.empty(0, 1, 1, dtype=torch.uint8, device=device)
    return sm90_reason(nothing, nothing, nothing, nothing)


def slot_shapes(hidden_size: int, intermediate_size: int) -> dict[str, tuple[int, ...]]:
    """Shapes of one slot."""
    strips13, strips2 = intermediate_size // 8, hidden_size // STRIP
    return {
        "w13": (strips13, STRIP, hidden_size // 2),
        "w13_scale": (strips13, STRIP, hidden_size // GROUP),
        "w2": (strips2, STRIP, intermediate_size // 2),
        "w2_scale": (strips2, STRIP, intermediate_size // GROUP),
    }


def expert_reason(expert: dict[str, Tensor]) -> str | None:
    """Why this expert, in checkpoint layout, cannot be in a slot, or None."""
    for name in ("w13_scale", "w2_scale"):
        # Also of zeros, whose scales prepare_sm90 would change: slots give back the bytes that they were given.
        outside = int(((expert[name] < LEAST_SCALE) | (expert[name] > MOST_SCALE)).sum())
        if outside:
            return f"{outside} scales of {name} are outside {LEAST_SCALE}..{MOST_SCALE}"
    return None


def pack_expert(expert: dict[str, Tensor], w13_layout: str, device: torch.device) -> dict[str, Tensor]:
    """The weights of an expert in checkpoint layout, packed on the device."""
    raw = (expert[name].to(device, copy=True)[None].contiguous() for name in WEIGHTS)
    packed = prepare_sm90(*raw, w13_layout=w13_layout)
    return {name: tensor[0] for name, tensor in zip(WEIGHTS, packed, strict=True)}


def unpack_expert(slot: dict[str, Tensor], w13_layout: str) -> dict[str, Tensor]:
    """The inverse of pack_expert, on the slot's device."""
    hidden_size, intermediate_size = slot["w13"].shape[2] * 2, slot["w2"].shape[2] * 2
    device = slot["w13"].device
    if device.type == "cuda":
        from moe_ops.cuda._repack import repack

        sizes = {"w13": (2 * intermediate_size, hidden_size), "w2": (hidden_size, intermediate_size)}
        unpacked: dict[str, Tensor] = {}
        for name, (num_rows, k) in sizes.items():
            codes, scales = slot[name][None], slot[f"{name}_scale"][None]
            raw = codes.new_empty((1, num_rows, k // 2)), scales.new_empty((1, num_rows, k // GROUP))
            repack(*raw, codes, scales, w13_layout if name == "w13" else None, pack=False)
            unpacked[name], unpacked[f"{name}_scale"] = raw[0][0], raw[1][0]
        return unpacked
    order = w13_row_order(intermediate_size, w13_layout, device)
    expert = {
        "w13": _unpack_rows(slot["w13"], hidden_size, unpack_codes),
        "w13_scale": _unpack_rows(slot["w13_scale"], hidden_size, unpack_scales),
        "w2": _unpack_rows(slot["w2"], intermediate_size, unpack_codes),
        "w2_scale": _unpack_rows(slot["w2_scale"], intermediate_size, unpack_scales),
    }
    for name in ("w13", "w13_scale"):
        rows = torch.empty_like(expert[name])
        rows[order] = expert[name]
        expert[name] = rows
    return expert


def _unpack_rows(packed: Tensor, k: int, unpack: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Unpacking takes several times the memory of what it unpacks: it goes by pieces."""
    strips = max(1, PIECE_BYTES // packed[0].numel())
    return torch.cat([unpack(piece.flatten(1), k) for piece in packed.split(strips)])
