"""MXFP4 expert weights in GGUF files.

A GGUF block of 32 elements is 17 bytes: the scale, then 16 bytes of which byte i holds element i in its low nibble and
element i + 16 in its high one. The table of values there is doubled and the scale halved, so a byte of scale means the
same power of two as here, but for 255: GGUF reads it as 2^128, which no E8M0 byte can say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from moe_ops.experts import Mxfp4Experts
from moe_ops.integrations._names import OneExpert
from moe_ops.integrations.checkpoints import fill_experts

BLOCK_BYTES = 17


def unpack_blocks(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """GGUF MXFP4 rows to this package's codes and scales.

    blocks: [..., n / 32 * 17] uint8. Returns (codes [..., n / 2] uint8, scales [..., n / 32] uint8).
    """
    if blocks.dtype != torch.uint8 or blocks.shape[-1] % BLOCK_BYTES:
        raise ValueError(
            f"unpack_blocks: blocks must be uint8 rows of whole {BLOCK_BYTES}-byte blocks, "
            f"got {list(blocks.shape)} {str(blocks.dtype).removeprefix('torch.')}"
        )
    per_block = blocks.unflatten(-1, (-1, BLOCK_BYTES))  # [..., n / 32, 17]
    scales = per_block[..., 0].contiguous()
    if bool((scales == 255).any()):
        raise ValueError("unpack_blocks: scales must be below 255 (2^128 has no E8M0 byte), got 255")
    packed = per_block[..., 1:]  # [..., n / 32, 16]
    elements = torch.cat((packed & 0xF, packed >> 4), dim=-1)  # [..., n / 32, 32], in element order
    codes = elements[..., 0::2] | (elements[..., 1::2] << 4)
    return codes.flatten(-2), scales


def pack_blocks(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The inverse of `unpack_blocks`."""
    if bool((scales == 255).any()):
        raise ValueError("pack_blocks: scales must be below 255 (NaN has no GGUF byte), got 255")
    pairs = codes.unflatten(-1, (-1, 16))  # [..., n / 32, 16]
    elements = torch.stack((pairs & 0xF, pairs >> 4), dim=-1).flatten(-2)  # [..., n / 32, 32]
    packed = elements[..., :16] | (elements[..., 16:] << 4)
    return torch.cat((scales.unsqueeze(-1), packed), dim=-1).flatten(-2)


class GgufFile:
    """MXFP4 experts of a GGUF file, read with the `gguf` package.

    Layers are numbers; the tensors of layer N are `blk.N.ffn_{gate,up,down}_exps`.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise ImportError("moe_ops reads GGUF files through the package `gguf`, which is not installed") from error
        self.path = Path(path)
        self._tensors: dict[str, Any] = {tensor.name: tensor for tensor in GGUFReader(str(path)).tensors}

    def layers(self) -> list[int]:
        """Numbers of the layers whose three expert tensors are MXFP4."""
        found = []
        for name in self._tensors:
            match = re.fullmatch(r"blk\.(\d+)\.ffn_down_exps\.weight", name)
            if match and all(
                self._is_mxfp4(f"blk.{match[1]}.ffn_{part}_exps.weight") for part in ("gate", "up", "down")
            ):
                found.append(int(match[1]))
        return sorted(found)

    def _is_mxfp4(self, name: str) -> bool:
        return name in self._tensors and self._tensors[name].tensor_type.name == "MXFP4"

    def load_experts(
        self,
        layer: int,
        experts: Sequence[int] | None = None,
        *,
        device: torch.device | str = "cpu",
        progress: Callable[[int], None] | None = None,
    ) -> Mxfp4Experts:
        """One layer's experts; the arguments are those of `Checkpoint.load_experts`. Rows come out as [gate; up]."""
        if layer not in self.layers():
            raise ValueError(f"load_experts: layer must be one with MXFP4 experts ({self.layers()}), got {layer}")
        num_experts = self._tensors[f"blk.{layer}.ffn_down_exps.weight"].data.shape[0]
        slots = list(range(num_experts)) if experts is None else [int(expert) for expert in experts]
        bad = [expert for expert in slots if not 0 <= expert < num_experts]
        if bad or not slots:
            raise ValueError(f"load_experts: experts must be some in [0, {num_experts}), got {bad[:1] or 'none'}")
        return fill_experts(slots, lambda expert: self._expert(layer, expert), "gate_up", device, progress)

    def _expert(self, layer: int, expert: int) -> OneExpert:
        codes, scales, biases = {}, {}, {}
        for part in ("gate", "up", "down"):
            base = f"blk.{layer}.ffn_{part}_exps"
            # The reader's arrays are maps of the file: only this expert's pages are touched.
            codes[part], scales[part] = unpack_blocks(_copy(self._tensors[f"{base}.weight"].data[expert]))
            if f"{base}.bias" in self._tensors:
                biases[part] = _copy(self._tensors[f"{base}.bias"].data[expert])
        return OneExpert(
            torch.cat((codes["gate"], codes["up"])),
            torch.cat((scales["gate"], scales["up"])),
            codes["down"],
            scales["down"],
            torch.cat((biases["gate"], biases["up"])) if "gate" in biases else None,
            biases.get("down"),
        )


def _copy(array: Any) -> torch.Tensor:
    return torch.from_numpy(array.copy())
