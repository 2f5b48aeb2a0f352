"""MXFP4 expert weights in safetensors checkpoints.

Reading understands the names of gpt-oss, DeepSeek-V4, compressed-tensors and ModelOpt; writing uses those of gpt-oss.
Experts are read one at a time into their place, so that peak memory is the wanted weights plus one expert.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_ops.experts import Mxfp4Experts
from moe_ops.integrations._names import SCHEMES, OneExpert, Scheme

FORMAT = "mxfp4-experts-1"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class ExpertLayer:
    """One layer of routed experts found in a checkpoint."""

    prefix: str
    scheme: Scheme
    num_experts: int


class Checkpoint:
    """A safetensors file, or a folder of them with or without an index, opened for reading tensor by tensor."""

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        if path.is_file():
            files = [path]
        elif (path / _INDEX).is_file():
            weight_map = json.loads((path / _INDEX).read_text(encoding="utf-8"))["weight_map"]
            files = [path / name for name in sorted(set(weight_map.values()))]
        else:
            files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ValueError(f"Checkpoint: path must be a safetensors file or a folder with some, got '{path}'")
        from safetensors import safe_open

        self.path = path
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._layers: dict[str, ExpertLayer] | None = None
        for file in files:
            opened = self._stack.enter_context(safe_open(str(file), framework="pt", device="cpu"))
            self._files.update(dict.fromkeys(opened.keys(), opened))

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._files = {}
        self._stack.close()

    def names(self) -> Iterable[str]:
        return self._files.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> list[int]:
        return list(self._file(name).get_slice(name).get_shape())

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        """A tensor, or one slice of its first dimension, of which only that slice is read."""
        file = self._file(name)
        return file.get_tensor(name) if index is None else file.get_slice(name)[index]

    def _file(self, name: str) -> Any:
        if name not in self._files:
            raise KeyError(f"'{name}' is not in {self.path}")
        return self._files[name]

    def layers(self) -> dict[str, ExpertLayer]:
        """Every layer of MXFP4 experts, by the prefix of its tensors' names, in natural order."""
        if self._layers is None:
            self._layers = self._find_layers()
        return self._layers

    def _find_layers(self) -> dict[str, ExpertLayer]:
        names = list(self._files)
        found: dict[str, ExpertLayer] = {}
        for scheme in SCHEMES:
            for prefix, counted in scheme.layers(names).items():
                if prefix not in found:
                    found[prefix] = ExpertLayer(prefix, scheme, scheme.num_experts(prefix, self.shape, counted))
        return dict(sorted(found.items(), key=lambda item: _natural(item[0])))

    def layer(self, prefix: str) -> ExpertLayer:
        layers = self.layers()
        if prefix not in layers:
            raise ValueError(
                f"load_experts: prefix must be a layer with MXFP4 experts ({', '.join(layers) or 'none here'}), "
                f"got '{prefix}'"
            )
        return layers[prefix]

    def read_expert(self, prefix: str, expert: int) -> dict[str, torch.Tensor]:
        """One expert's tensors, [2I, H / 2] and so on; for `CpuExperts.load`, which keeps no second copy."""
        one = self.layer(prefix).scheme.expert(prefix, expert, self.read, self.__contains__)
        _check_expert(expert, one)
        return {name: part for name, part in one._asdict().items() if part is not None}

    def load_experts(
        self,
        prefix: str,
        experts: Sequence[int] | None = None,
        *,
        device: torch.device | str = "cpu",
        progress: Callable[[int], None] | None = None,
    ) -> Mxfp4Experts:
        """Read one layer's experts.

        prefix:   the part of the names before the scheme's own, such as "model.layers.0.mlp.experts".
        experts:  the expert of each slot of the result; all of them in order where None. An expert may be named twice
                  (replicas) or not at all: what is not named is not read.
        progress: called with the number of experts read so far.
        """
        layer = self.layer(prefix)
        slots = list(range(layer.num_experts)) if experts is None else [int(expert) for expert in experts]
        bad = [expert for expert in slots if not 0 <= expert < layer.num_experts]
        if bad:
            raise ValueError(f"load_experts: experts must be in [0, {layer.num_experts}), got {bad[0]}")
        if not slots:
            raise ValueError("load_experts: experts must be at least one expert, got none")
        return fill_experts(
            slots,
            lambda expert: layer.scheme.expert(prefix, expert, self.read, self.__contains__),
            layer.scheme.w13_layout,
            device,
            progress,
        )


def _natural(text: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in text.split(".")]


def fill_experts(
    slots: Sequence[int],
    read: Callable[[int], OneExpert],
    w13_layout: str,
    device: torch.device | str,
    progress: Callable[[int], None] | None,
) -> Mxfp4Experts:
    """Read experts one by one into tensors allocated once."""
    filled: dict[str, torch.Tensor] = {}
    for slot, expert in enumerate(slots):
        one = read(expert)
        _check_expert(expert, one)
        for name, part in one._asdict().items():
            if part is None:
                if name in filled:
                    raise ValueError(f"load_experts: {name} must be present for every expert, got none for {expert}")
                continue
            if slot == 0:
                filled[name] = torch.empty((len(slots), *part.shape), dtype=part.dtype, device=device)
            if name not in filled or filled[name].shape[1:] != part.shape:
                raise ValueError(
                    f"load_experts: {name} must have one shape for all experts, got {list(part.shape)} for {expert}"
                )
            filled[name][slot].copy_(part)
        if progress is not None:
            progress(slot + 1)
    return Mxfp4Experts(**filled, w13_layout=w13_layout)


def _check_expert(expert: int, one: OneExpert) -> None:
    rows = one.w13.shape[0]
    hidden, half_intermediate = one.w2.shape
    expected = {
        "w13": [4 * half_intermediate, hidden // 2],
        "w13_scale": [rows, hidden // 32],
        "w2_scale": [hidden, rows // 64],
        "w13_bias": [rows],
        "w2_bias": [hidden],
    }
    for name, shape in expected.items():
        part = getattr(one, name)
        if part is not None and list(part.shape) != shape:
            raise ValueError(f"load_experts: {name} of expert {expert} must be {shape}, got {list(part.shape)}")


def interleave_rows(rows: torch.Tensor, w13_layout: str) -> torch.Tensor:
    """Rows of [E, 2I, ...] from `w13_layout` to the interleaved order of gpt-oss."""
    if w13_layout == "interleaved":
        return rows
    first, second = rows.chunk(2, dim=1)
    gate, up = (first, second) if w13_layout == "gate_up" else (second, first)
    return torch.stack((gate, up), dim=2).flatten(1, 2)


class CheckpointWriter:
    """Writes expert layers under the names of gpt-oss, and any other tensors as they are; closing it writes the index.

    A file is written as soon as `max_shard_bytes` are waiting, so that memory stays bounded.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        max_shard_bytes: int = 4 << 30,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        if any(self.path.glob("*.safetensors")):
            raise ValueError(f"CheckpointWriter: path must be a folder without safetensors files, got '{self.path}'")
        self.max_shard_bytes = max_shard_bytes
        self.metadata = {"format": "pt", "moe_ops.format": FORMAT, **(metadata or {})}
        self.total_bytes = 0
        self._waiting: dict[str, torch.Tensor] = {}
        self._shards: list[tuple[Path, list[str]]] = []

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, exception_type: object, *exception: object) -> None:
        if exception_type is None:
            self.close()

    def add_experts(self, prefix: str, experts: Mxfp4Experts) -> None:
        """One layer; `prefix` such as "model.layers.0.mlp.experts"."""
        layout = experts.w13_layout
        w13, w13_scale = interleave_rows(experts.w13, layout), interleave_rows(experts.w13_scale, layout)
        self.add(f"{prefix}.gate_up_proj_blocks", w13.unflatten(-1, (-1, 16)))
        self.add(f"{prefix}.gate_up_proj_scales", w13_scale)
        self.add(f"{prefix}.down_proj_blocks", experts.w2.unflatten(-1, (-1, 16)))
        self.add(f"{prefix}.down_proj_scales", experts.w2_scale)
        if experts.w13_bias is not None:
            self.add(f"{prefix}.gate_up_proj_bias", interleave_rows(experts.w13_bias, layout))
        if experts.w2_bias is not None:
            self.add(f"{prefix}.down_proj_bias", experts.w2_bias)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if name in self._waiting or any(name in names for _, names in self._shards):
            raise ValueError(f"CheckpointWriter: name must be new, got '{name}' twice")
        waiting = sum(other.nbytes for other in self._waiting.values())
        if self._waiting and waiting + tensor.nbytes > self.max_shard_bytes:
            self._flush()
        # A copy: what is written is what was given, whatever becomes of it (prepare() repacks in place).
        self._waiting[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        self.total_bytes += tensor.nbytes

    def close(self) -> None:
        """Write what is waiting, give the files their final names and write the index."""
        self._flush()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for number, (file, names) in enumerate(self._shards, start=1):
            final = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            file.rename(file.with_name(final))
            weight_map.update(dict.fromkeys(names, final))
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        (self.path / _INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")

    def _flush(self) -> None:
        if not self._waiting:
            return
        from safetensors.torch import save_file

        file = self.path / f"part-{len(self._shards):05d}.safetensors"
        save_file(self._waiting, str(file), metadata=self.metadata)
        self._shards.append((file, list(self._waiting)))
        self._waiting = {}
