"""How published checkpoints name and lay out MXFP4 expert weights.

A scheme knows the names of one layer's tensors and how to get one expert's part of them. Everything it returns is in
this package's form: uint8 codes with the even element in the low nibble, uint8 E8M0 scales, rows in the order that
`w13_layout` says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

# Reads a tensor; with an index, only that slice of its first dimension.
Read = Callable[..., torch.Tensor]


class OneExpert(NamedTuple):
    """The weights of one expert; the shapes are those of `fused_mxfp4_moe` without the first dimension."""

    w13: torch.Tensor  # [2I, H / 2]
    w13_scale: torch.Tensor  # [2I, H / 32]
    w2: torch.Tensor  # [H, I / 2]
    w2_scale: torch.Tensor  # [H, I / 32]
    w13_bias: torch.Tensor | None  # [2I]
    w2_bias: torch.Tensor | None  # [H]


class Scheme(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def w13_layout(self) -> str: ...

    def layers(self, names: Iterable[str]) -> dict[str, int]:
        """Prefix of every layer that has all the tensors of this scheme -> its number of experts (0: ask the file)."""

    def num_experts(self, prefix: str, shape: Callable[[str], list[int]], counted: int) -> int: ...

    def expert(self, prefix: str, expert: int, read: Read, has: Callable[[str], bool]) -> OneExpert: ...


def code_bytes(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Packed codes as uint8: files hold them as uint8, int8 or float4_e2m1fn_x2, always the same bytes."""
    if tensor.dtype in (torch.uint8, torch.int8, torch.float4_e2m1fn_x2):
        return tensor.view(torch.uint8)
    raise ValueError(f"load_experts: {name} must be packed uint8, int8 or float4_e2m1fn_x2, got {_dtype(tensor)}")


def scale_bytes(name: str, tensor: torch.Tensor, op: str = "load_experts") -> torch.Tensor:
    """Scales as E8M0 bytes. Bytes are exponents; a float is a value, which must be a power of two."""
    if tensor.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return tensor.view(torch.uint8)
    if tensor.dtype in (torch.float32, torch.bfloat16):
        value = tensor.to(torch.float32)
        encoded = value.to(torch.float8_e8m0fnu)
        same = (encoded.to(torch.float32) == value) | (value.isnan() & encoded.to(torch.float32).isnan())
        if not bool(same.all()):
            raise ValueError(f"{op}: {name} must be powers of two from 2^-127 to 2^127, got other values")
        return encoded.view(torch.uint8)
    raise ValueError(f"{op}: {name} must be uint8, float8_e8m0fnu, float32 or bfloat16 scales, got {_dtype(tensor)}")


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class GptOss:
    """All experts of a layer in one tensor, 16 bytes to a block, gate and up rows interleaved."""

    name = "gpt-oss"
    w13_layout = "interleaved"
    tensors = ("gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales")

    def layers(self, names: Iterable[str]) -> dict[str, int]:
        names = set(names)
        ends = "." + self.tensors[0]
        prefixes = [name.removesuffix(ends) for name in names if name.endswith(ends)]
        return {p: 0 for p in prefixes if all(f"{p}.{tensor}" in names for tensor in self.tensors)}

    def num_experts(self, prefix: str, shape: Callable[[str], list[int]], counted: int) -> int:
        return shape(f"{prefix}.{self.tensors[0]}")[0]

    def expert(self, prefix: str, expert: int, read: Read, has: Callable[[str], bool]) -> OneExpert:
        parts = []
        for projection in ("gate_up_proj", "down_proj"):
            blocks, scales = f"{prefix}.{projection}_blocks", f"{prefix}.{projection}_scales"
            codes = code_bytes(blocks, read(blocks, expert))
            parts.append(codes.flatten(1))  # [rows, columns / 32, 16] -> [rows, columns / 2]
            parts.append(scale_bytes(scales, read(scales, expert)))
        biases = []
        for projection in ("gate_up_proj", "down_proj"):
            bias = f"{prefix}.{projection}_bias"
            biases.append(read(bias, expert) if has(bias) else None)
        return OneExpert(*parts, *biases)


@dataclass(frozen=True)
class PerExpert:
    """One tensor per expert and projection; gate and up are stacked here, gate first."""

    name: str
    gate: str
    up: str
    down: str
    weight: str
    scale: str
    w13_layout = "gate_up"

    def layers(self, names: Iterable[str]) -> dict[str, int]:
        names = set(names)
        found: dict[str, set[int]] = {}
        pattern = re.compile(rf"(.+)\.(\d+)\.{re.escape(self.gate)}\.{re.escape(self.weight)}")
        for name in names:
            match = pattern.fullmatch(name)
            # Without its scale it is some other format (FP8 or bf16 experts under the same names).
            if match and f"{match[1]}.{match[2]}.{self.gate}.{self.scale}" in names:
                found.setdefault(match[1], set()).add(int(match[2]))
        return {prefix: len(ids) for prefix, ids in found.items() if ids == set(range(len(ids)))}

    def num_experts(self, prefix: str, shape: Callable[[str], list[int]], counted: int) -> int:
        return counted

    def expert(self, prefix: str, expert: int, read: Read, has: Callable[[str], bool]) -> OneExpert:
        codes, scales, biases = {}, {}, {}
        for projection in (self.gate, self.up, self.down):
            base = f"{prefix}.{expert}.{projection}"
            weight, scale, bias = f"{base}.{self.weight}", f"{base}.{self.scale}", f"{base}.bias"
            for name in (weight, scale):
                if not has(name):
                    raise ValueError(f"load_experts: {name} must be in the checkpoint, got no such tensor")
            codes[projection] = code_bytes(weight, read(weight))
            scales[projection] = scale_bytes(scale, read(scale))
            if has(bias):
                biases[projection] = read(bias)
        w13_bias = torch.cat((biases[self.gate], biases[self.up])) if self.gate in biases else None
        return OneExpert(
            torch.cat((codes[self.gate], codes[self.up])),
            torch.cat((scales[self.gate], scales[self.up])),
            codes[self.down],
            scales[self.down],
            w13_bias,
            biases.get(self.down),
        )


SCHEMES: tuple[Scheme, ...] = (
    GptOss(),
    PerExpert("deepseek", "w1", "w3", "w2", "weight", "scale"),
    PerExpert("compressed-tensors", "gate_proj", "up_proj", "down_proj", "weight_packed", "weight_scale"),
    PerExpert("modelopt", "gate_proj", "up_proj", "down_proj", "weight", "weight_scale"),
)
