"""Weights of the experts of a layer: as a checkpoint holds them, and prepared for a processor.

    experts = Mxfp4Experts(w13, w13_scale, w2, w2_scale, w13_layout="gate_up")
    prepared = experts.prepare()            # in place, expert by expert; `experts` is used up
    out = moe_ops.fused_mxfp4_moe(hidden_states, topk_ids, topk_weights, **prepared.arguments())
    prepared.save("layer0.safetensors")
    prepared = PreparedExperts.load("layer0.safetensors")   # mapped, not read: processes share the pages

Layout "x86_v1", which every x86 instruction set reads. A tile is 16 rows of a weight matrix over all of K: codes
[K / 32, 256], where dword (j, r) of a block is bytes 4 j .. 4 j + 3 of row r, and scales [K / 32, 16]. w13 is
[E, I / 16, 2, H / 32, 256] with the gate tile before the up tile, whatever the row order of the checkpoint, and w2 is
[E, H / 16, I / 32, 256].
"""

from __future__ import annotations

import json
import os
import struct
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_ops import _repacked
from moe_ops._errors import rank, require
from moe_ops._pages import move_to_huge_pages
from moe_ops.meta.fused_mxfp4_moe import (
    BLOCK,
    PREPARED_LAYOUTS,
    W13_LAYOUTS,
    PreparedLayout,
    check_bias,
    check_u8,
    checkpoint_geometry,
)
from moe_ops.reference.mxfp4 import quantize_mxfp4

X86_V1 = "x86_v1"
SM90_V1 = "sm90_v1"
SM90_V1_E4M3 = "sm90_v1_e4m3"
TILE_ROWS = 16
TILE_BLOCK_BYTES = TILE_ROWS * BLOCK // 2

FILE_FORMAT = "moe_ops.prepared_experts"
FILE_VERSION = "1"
FILE_ALIGNMENT = 4096
WEIGHTS = ("w13", "w2", "w13_scale", "w2_scale")
BIASES = ("w13_bias", "w2_bias")


def x86_v1_geometry(
    op: str, hidden_size: int, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor
) -> tuple[int, int]:
    """Check packed tensors; (num_experts, intermediate_size). The texts are those of csrc/cpu/fused_mxfp4_moe.cpp."""
    ok = rank(w13) == 5 and w13.dtype == torch.uint8
    expected = "[num_experts, intermediate_size / 16, 2, hidden_size / 32, 256] uint8 for weight_layout 'x86_v1'"
    require(ok, op, "w13", expected, w13)
    num_experts, intermediate_size = w13.shape[0], w13.shape[1] * TILE_ROWS
    multiple = f"a multiple of {BLOCK}"
    require(hidden_size > 0 and hidden_size % BLOCK == 0, op, "hidden_size", multiple, str(hidden_size))
    require(
        intermediate_size > 0 and intermediate_size % BLOCK == 0,
        op,
        "intermediate_size",
        multiple,
        str(intermediate_size),
    )
    require(num_experts > 0, op, "w13", "of at least one expert", w13)
    shapes = _x86_v1_shapes(num_experts, hidden_size, intermediate_size)
    for name, tensor in (("w13", w13), ("w13_scale", w13_scale), ("w2", w2), ("w2_scale", w2_scale)):
        check_u8(op, name, tensor, shapes[name])
    return num_experts, intermediate_size


PREPARED_LAYOUTS[X86_V1] = PreparedLayout("cpu", x86_v1_geometry)


def _x86_v1_shapes(num_experts: int, hidden_size: int, intermediate_size: int) -> dict[str, tuple[int, ...]]:
    w13 = (num_experts, intermediate_size // TILE_ROWS, 2, hidden_size // BLOCK)
    w2 = (num_experts, hidden_size // TILE_ROWS, intermediate_size // BLOCK)
    return {
        "w13": (*w13, TILE_BLOCK_BYTES),
        "w13_scale": (*w13, TILE_ROWS),
        "w2": (*w2, TILE_BLOCK_BYTES),
        "w2_scale": (*w2, TILE_ROWS),
    }


@dataclass(repr=False, eq=False)
class Mxfp4Experts:
    """The experts of one layer, in the shapes that fused_mxfp4_moe takes as weight_layout "checkpoint".

    w13: [E, 2I, H / 2] uint8, w13_scale: [E, 2I, H / 32] uint8.
    w2: [E, H, I / 2] uint8, w2_scale: [E, H, I / 32] uint8.
    w13_layout: "gate_up", "up_gate" or "interleaved".
    w13_bias, w2_bias: [E, 2I] and [E, H] float, or None.
    """

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor
    w13_layout: str
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None

    def __post_init__(self) -> None:
        op = type(self).__name__
        _check_row_order(op, self.w13_layout)
        require(rank(self.w2) == 3, op, "w2", "[num_experts, hidden_size, intermediate_size / 2] uint8", self.w2)
        self.hidden_size = self.w2.shape[1]
        self.num_experts, self.intermediate_size = checkpoint_geometry(
            op, self.hidden_size, self.w13, self.w13_scale, self.w2, self.w2_scale
        )
        check_bias(op, "w13_bias", self.w13_bias, self.num_experts, 2 * self.intermediate_size)
        check_bias(op, "w2_bias", self.w2_bias, self.num_experts, self.hidden_size)
        self._used = False

    @classmethod
    def from_float(
        cls, w13: Tensor, w2: Tensor, *, w13_layout: str, w13_bias: Tensor | None = None, w2_bias: Tensor | None = None
    ) -> Mxfp4Experts:
        """Quantise float weights [E, 2I, H] and [E, H, I], an expert at a time."""
        for name, weights, expected in (("w13", w13, "[E, 2I, H] float"), ("w2", w2, "[E, H, I] float")):
            ok = rank(weights) == 3 and weights.dtype.is_floating_point
            require(ok, "Mxfp4Experts.from_float", name, expected, weights)

        def quantize(weights: Tensor) -> tuple[Tensor, Tensor]:
            experts, rows, size = weights.shape
            codes = torch.empty(experts, rows, size // 2, dtype=torch.uint8)
            scales = torch.empty(experts, rows, size // BLOCK, dtype=torch.uint8)
            for expert in range(experts):
                codes[expert], scales[expert] = quantize_mxfp4(weights[expert].cpu())
            return codes, scales

        return cls(*quantize(w13), *quantize(w2), w13_layout=w13_layout, w13_bias=w13_bias, w2_bias=w2_bias)

    def __repr__(self) -> str:
        return f"Mxfp4Experts({sizes_text(self)}, {self.w13_layout})"

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles of repacked bytes would pass for checkpoint bytes.
        self._require_unused()
        return self.__dict__

    def tensors(self) -> dict[str, Tensor]:
        """Those of the tensors that are there, by name."""
        self._require_unused()
        values = {name: getattr(self, name) for name in (*WEIGHTS, *BIASES)}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def select(self, experts: Sequence[int]) -> Mxfp4Experts:
        """A copy of the named experts, in that order."""
        index = torch.tensor(list(experts), dtype=torch.int64, device=self.w13.device)
        return Mxfp4Experts(
            **{name: tensor[index] for name, tensor in self.tensors().items()}, w13_layout=self.w13_layout
        )

    def to(self, device: torch.device | str) -> Mxfp4Experts:
        moved = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return Mxfp4Experts(**moved, w13_layout=self.w13_layout)

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of fused_mxfp4_moe that describe these weights."""
        self._require_unused()
        return {name: getattr(self, name) for name in (*WEIGHTS, *BIASES, "w13_layout")}

    def prepare(self, layout: str = X86_V1) -> PreparedExperts:
        """Repack into `layout`, in the memory of the source tensors: peak memory is the weights and one expert.
        For the CPU, that memory is moved to 2 MiB pages where the system allows it ("never" in
        /sys/kernel/mm/transparent_hugepage/enabled and MOE_OPS_HUGE_PAGES=0 do not).

        "x86_v1" is for the CPU, "sm90_v1" for Hopper cards (`moe_ops.cuda.prepare` asks first whether it applies), as
        is "sm90_v1_e4m3", whose large batches may round activations to e4m3 (docs/cuda.md). The
        source is used up: its tensors (and every other view of their memory) no longer hold checkpoint bytes, and a
        second call raises.
        """
        self._require_unused()
        if layout in (SM90_V1, SM90_V1_E4M3):
            packed = self._prepare_sm90(layout)
            self._used = True
            return packed
        known = f"'{X86_V1}', '{SM90_V1}' or '{SM90_V1_E4M3}'"
        require(layout == X86_V1, "prepare", "layout", known, f"'{layout}'")
        for tensor in (self.w13, self.w13_scale, self.w2, self.w2_scale):
            require(tensor.device.type == "cpu", "prepare", "the weights", "on cpu", str(tensor.device))
        _repacked.mark(self.w13, self.w13_scale, self.w2, self.w2_scale)
        self._used = True
        for expert in range(self.num_experts):
            _pack_w13(self.w13[expert], self.w13_scale[expert], self.w13_layout)
            w2, w2_scale = _tiles(self.w2[expert], self.w2_scale[expert])
            self.w2[expert].view(-1).copy_(w2.view(-1))
            self.w2_scale[expert].view(-1).copy_(w2_scale.view(-1))
            del w2, w2_scale
        move_to_huge_pages((self.w13, self.w13_scale, self.w2, self.w2_scale))
        shapes = _x86_v1_shapes(self.num_experts, self.hidden_size, self.intermediate_size)
        return self._prepared({name: getattr(self, name).view(shape) for name, shape in shapes.items()}, layout)

    def _prepare_sm90(self, layout: str) -> PreparedExperts:
        from moe_ops.cuda import layout_for, prepare_sm90
        from moe_ops.cuda.prepare import e4m3_outside

        raw = (self.w13, self.w13_scale, self.w2, self.w2_scale)
        if layout == SM90_V1_E4M3:
            outside = e4m3_outside(*raw[:2]) + e4m3_outside(*raw[2:])
            if outside:
                layout = SM90_V1
                text = f"moe_ops: activations stay exact: e4m3 does not hold {outside} blocks of these weights"
                warnings.warn(text, stacklevel=3)
        if layout == SM90_V1:
            layout = layout_for(*raw)
        packed = prepare_sm90(*raw, w13_layout=self.w13_layout, weight_layout=layout)
        # The kernels read float32 biases; others would be widened in every call.
        biases = {name: None if (bias := getattr(self, name)) is None else bias.to(torch.float32) for name in BIASES}
        return self._prepared(dict(zip(("w13", "w13_scale", "w2", "w2_scale"), packed, strict=True)) | biases, layout)

    def _prepared(self, packed: dict[str, Tensor | None], layout: str) -> PreparedExperts:
        tensors: dict[str, Any] = {name: getattr(self, name) for name in BIASES} | packed
        return PreparedExperts(
            **tensors, weight_layout=layout, w13_layout=self.w13_layout, hidden_size=self.hidden_size
        )

    def _require_unused(self) -> None:
        # Compiled code cannot look memory up, but is guarded by this object's attributes.
        if self._used or any(map(_repacked.is_marked, (self.w13, self.w13_scale, self.w2, self.w2_scale))):
            raise RuntimeError(
                "Mxfp4Experts: the weights have been prepared and no longer hold checkpoint bytes; "
                "use what prepare() returned"
            )


@dataclass(repr=False, eq=False)
class PreparedExperts:
    """Packed weights and the tag of their layout; what Mxfp4Experts.prepare returns."""

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor
    weight_layout: str
    w13_layout: str
    hidden_size: int
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None

    def __post_init__(self) -> None:
        layout = PREPARED_LAYOUTS.get(self.weight_layout)
        known = ", ".join(f"'{name}'" for name in sorted(PREPARED_LAYOUTS))
        require(layout is not None, "PreparedExperts", "weight_layout", f"one of {known}", f"'{self.weight_layout}'")
        assert layout is not None
        self.num_experts, self.intermediate_size = layout.geometry(
            "PreparedExperts", self.hidden_size, self.w13, self.w13_scale, self.w2, self.w2_scale
        )
        _check_row_order("PreparedExperts", self.w13_layout)
        check_bias("PreparedExperts", "w13_bias", self.w13_bias, self.num_experts, 2 * self.intermediate_size)
        check_bias("PreparedExperts", "w2_bias", self.w2_bias, self.num_experts, self.hidden_size)

    def __repr__(self) -> str:
        return f"PreparedExperts({sizes_text(self)}, {self.weight_layout})"

    @property
    def nbytes(self) -> int:
        tensors = (getattr(self, name) for name in (*WEIGHTS, *BIASES))
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of fused_mxfp4_moe that describe these weights."""
        return {name: getattr(self, name) for name in (*WEIGHTS, *BIASES, "w13_layout", "weight_layout")}

    def to(self, device: torch.device | str) -> PreparedExperts:
        """The same weights on another device."""
        tensors = {name: getattr(self, name) for name in (*WEIGHTS, *BIASES)}
        moved: dict[str, Any] = {
            name: None if tensor is None else tensor.to(device) for name, tensor in tensors.items()
        }
        return PreparedExperts(
            **moved, weight_layout=self.weight_layout, w13_layout=self.w13_layout, hidden_size=self.hidden_size
        )

    def checkpoint_expert(self, expert: int) -> dict[str, Tensor]:
        """One expert's w13, w13_scale, w2 and w2_scale in checkpoint form, copied. "sm90_v1" has given blocks of zeros
        another scale where theirs was outside 2^-126 to 2."""
        if self.weight_layout.startswith(SM90_V1):
            from moe_ops.cuda.slots import unpack_expert

            return unpack_expert({name: getattr(self, name)[expert] for name in WEIGHTS}, self.w13_layout)
        layouts = f"'{X86_V1}' or '{SM90_V1}'"
        require(self.weight_layout == X86_V1, "checkpoint_expert", "weight_layout", layouts, f"'{self.weight_layout}'")
        gate, gate_scale = _rows(self.w13[expert][:, 0], self.w13_scale[expert][:, 0])
        up, up_scale = _rows(self.w13[expert][:, 1], self.w13_scale[expert][:, 1])
        w2, w2_scale = _rows(self.w2[expert], self.w2_scale[expert])
        return {
            "w13": _join(gate, up, self.w13_layout),
            "w13_scale": _join(gate_scale, up_scale, self.w13_layout),
            "w2": w2,
            "w2_scale": w2_scale,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file whose data begins at a page, so that it can be mapped and used as it is."""
        tensors = {name: getattr(self, name) for name in (*WEIGHTS, *BIASES)}
        tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        header: dict[str, Any] = {
            "__metadata__": {
                "format": FILE_FORMAT,
                "version": FILE_VERSION,
                "weight_layout": self.weight_layout,
                "w13_layout": self.w13_layout,
                "hidden_size": str(self.hidden_size),
            }
        }
        end = 0
        for name, tensor in tensors.items():
            begin, end = end, end + tensor.numel() * tensor.element_size()
            header[name] = {
                "dtype": _DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header).encode()
        text += b" " * (-(len(text) + 8) % FILE_ALIGNMENT)
        target = Path(path)
        partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
        try:
            with partial.open("wb") as file:
                file.write(struct.pack("<Q", len(text)) + text)
                for tensor in tensors.values():
                    # An expert at a time: no second copy of the weights.
                    for part in tensor.contiguous():
                        file.write(bytes(part.contiguous().cpu().view(torch.uint8).numpy().data))
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PreparedExperts:
        """Map a file that `save` wrote. Nothing is read or repacked; processes that map it share its pages."""
        size = Path(path).stat().st_size
        with Path(path).open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            _require_file(size >= 8 and 8 + length <= size, path, "a safetensors file", f"{size} bytes")
            try:
                header = json.loads(file.read(length))
                metadata = header.pop("__metadata__", None) or {}
            except (ValueError, AttributeError, TypeError) as error:
                raise ValueError(f"PreparedExperts.load: {path} must be a safetensors file, got {error}") from error
        _require_file(metadata.get("format") == FILE_FORMAT, path, f"of format '{FILE_FORMAT}'", metadata.get("format"))
        _require_file(
            metadata.get("version") == FILE_VERSION, path, f"of version '{FILE_VERSION}'", metadata.get("version")
        )
        data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        missing = [name for name in WEIGHTS if name not in header]
        missing += [name for name in ("weight_layout", "w13_layout", "hidden_size") if name not in metadata]
        _require_file(not missing, path, "complete", f"no {', '.join(missing)}")
        tensors: dict[str, Any] = {}
        try:
            for name, entry in header.items():
                begin, end = (8 + length + offset for offset in entry["data_offsets"])
                _require_file(8 + length <= begin <= end <= size, path, f"complete at '{name}'", f"{size} bytes")
                tensors[name] = data[begin:end].view(_TORCH_DTYPES[entry["dtype"]]).view(entry["shape"])
            names = {name: metadata[name] for name in ("weight_layout", "w13_layout")}
            return cls(**tensors, **names, hidden_size=int(metadata["hidden_size"]))
        except (KeyError, TypeError, RuntimeError) as error:  # a header that says what is not so
            raise ValueError(
                f"PreparedExperts.load: {path} must be a file that save wrote, got {type(error).__name__}: {error}"
            ) from error


def _check_row_order(op: str, w13_layout: str) -> None:
    require(w13_layout in W13_LAYOUTS, op, "w13_layout", "'gate_up', 'up_gate' or 'interleaved'", f"'{w13_layout}'")


def sizes_text(experts: Any) -> str:
    return (
        f"{experts.num_experts} experts, hidden_size={experts.hidden_size}, "
        f"intermediate_size={experts.intermediate_size}"
    )


_DTYPES = {torch.uint8: "U8", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_TORCH_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}


def _require_file(condition: bool, path: str | os.PathLike[str], expected: str, actual: object) -> None:
    require(condition, "PreparedExperts.load", str(path), expected, str(actual))


def _words(codes: Tensor) -> Tensor:
    """Contiguous bytes as int32; a copy where their place in the storage is no multiple of four."""
    codes = codes.contiguous()
    return (codes if codes.storage_offset() % 4 == 0 else codes.clone()).view(torch.int32)


def _tiles(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [n, K / 2] and [n, K / 32] to tiles [n / 16, K / 32, 256] and [n / 16, K / 32, 16]."""
    rows, blocks = scales.shape
    words = _words(codes).view(rows // TILE_ROWS, TILE_ROWS, blocks, 4)
    packed = words.permute(0, 2, 3, 1).contiguous().view(torch.uint8)
    packed_scales = scales.view(rows // TILE_ROWS, TILE_ROWS, blocks).transpose(1, 2).contiguous()
    return packed.view(rows // TILE_ROWS, blocks, TILE_BLOCK_BYTES), packed_scales


def _rows(tiles: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of _tiles."""
    count, blocks = tiles.shape[:2]
    words = _words(tiles).view(count, blocks, 4, TILE_ROWS)
    codes = words.permute(0, 3, 1, 2).contiguous().view(torch.uint8).view(count * TILE_ROWS, blocks * BLOCK // 2)
    return codes, scales.transpose(1, 2).contiguous().view(count * TILE_ROWS, blocks)


def _pack_w13(codes: Tensor, scales: Tensor, w13_layout: str) -> None:
    """One expert's w13 and w13_scale to tiles, in place; a copy of w13 and a tiled half of it live besides."""
    rows, blocks = scales.shape
    halves = [
        (c.clone(), s.clone()) for c, s in zip(_split(codes, w13_layout), _split(scales, w13_layout), strict=True)
    ]
    packed = codes.view(rows // 2 // TILE_ROWS, 2, blocks, TILE_BLOCK_BYTES)
    packed_scales = scales.view(rows // 2 // TILE_ROWS, 2, blocks, TILE_ROWS)
    for part, half in enumerate(halves):
        tiles, tile_scales = _tiles(*half)
        packed[:, part].copy_(tiles)
        packed_scales[:, part].copy_(tile_scales)
        del tiles, tile_scales


def _split(rows: Tensor, w13_layout: str) -> tuple[Tensor, Tensor]:
    """(gate, up) of [2I, ...] rows."""
    if w13_layout == "interleaved":
        return rows[0::2], rows[1::2]
    first, second = rows.chunk(2)
    return (first, second) if w13_layout == "gate_up" else (second, first)


def _join(gate: Tensor, up: Tensor, w13_layout: str) -> Tensor:
    """The inverse of _split."""
    if w13_layout == "interleaved":
        return torch.stack((gate, up), dim=1).flatten(0, 1)
    return torch.cat((gate, up) if w13_layout == "gate_up" else (up, gate))
