"""A layer of llama.cpp's ggml on the CPU, to be timed beside ours (benchmarks/peer_ggml.cpp)."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("peer_ggml.cpp")


@cache
def load(include: Path, libraries: Path) -> ctypes.CDLL:
    """`include` holds ggml.h, `libraries` libggml.so, libggml-base.so and libggml-cpu.so."""
    out = Path(tempfile.mkdtemp()) / "peer_ggml.so"
    command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O2", "-shared", "-fPIC", f"-I{include}", str(SOURCE)]
    found = [str(next(libraries.rglob(f"lib{name}.so"))) for name in ("ggml", "ggml-base", "ggml-cpu")]
    paths = [f"-Wl,-rpath,{Path(path).parent}" for path in found]
    subprocess.run([*command, *found, *paths, "-o", str(out)], check=True)
    library = ctypes.CDLL(str(out))
    library.ggml_layer_new.restype = ctypes.c_void_p
    library.ggml_layer_buffer_name.restype = ctypes.c_char_p
    return library


def blocks(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """uint8 [E, rows, K/2] and [E, rows, K/32] as [E, rows, K/32, 17]: a scale, then elements j, j + 16."""
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).view(*scales.shape, 2, 16)
    return torch.cat((scales[..., None], nibbles[..., 0, :] | nibbles[..., 1, :] << 4), dim=-1).contiguous()


class Ggml:
    """Activations are float32 at the interface and 8-bit integers inside."""

    def __init__(self, layer: dict[str, torch.Tensor], top_k: int, include: Path, libraries: Path) -> None:
        self.library = load(include, libraries)
        experts, rows, half = layer["w13"].shape
        inter, self.hidden = rows // 2, 2 * half
        parts = [
            blocks(layer["w13"][:, :inter], layer["w13_scale"][:, :inter]),
            blocks(layer["w13"][:, inter:], layer["w13_scale"][:, inter:]),
            blocks(layer["w2"], layer["w2_scale"]),
        ]
        sizes = [ctypes.c_int64(n) for n in (self.hidden, inter, experts, top_k)]
        self.layer = ctypes.c_void_p(
            self.library.ggml_layer_new(*sizes, *(ctypes.c_void_p(p.data_ptr()) for p in parts))
        )
        self.buffer_name = self.library.ggml_layer_buffer_name(self.layer).decode()

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=torch.float32)
        arguments = [x.float(), ids.int(), weights.float().contiguous(), out]
        self.library.ggml_layer_call(
            self.layer,
            ctypes.c_int64(len(x)),
            torch.get_num_threads(),
            *(ctypes.c_void_p(tensor.data_ptr()) for tensor in arguments),
        )
        return out.to(x.dtype)
