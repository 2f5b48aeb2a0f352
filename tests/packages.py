"""Whether this torch can load an AOTInductor package at all: asked in a process of its own, which may crash."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch

# Operators of torch alone; moe_ops is not imported.
PROBE = """
import sys
import torch

class Plain(torch.nn.Module):
    def forward(self, x):
        return (x * 2).relu()

device, path = sys.argv[1:]
x = torch.randn(6, 64, device=device)
with torch.no_grad():
    program = torch.export.export(Plain(), (x,))
    package = torch._inductor.aoti_compile_and_package(program, package_path=path)
    print("packaged", flush=True)
    loaded = torch._inductor.aoti_load_package(package)
    torch.testing.assert_close(loaded(x), (x * 2).relu())
    print("ran", flush=True)
"""


@cache
def loader_fault(device: str) -> str | None:
    """Why packages cannot be tested on `device`, or None. Builds of torch without CUDA have not been seen to fail."""
    if not torch.cuda.is_available():
        return None
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", PROBE, device, str(Path(folder) / "plain.pt2")]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        except subprocess.TimeoutExpired:
            return f"torch {torch.__version__} takes minutes for a package of plain operators on {device}"
    if "ran" in done.stdout.split():
        return None
    step = "load" if "packaged" in done.stdout.split() else "make"
    return f"torch {torch.__version__} cannot {step} a package of plain operators on {device}: exit {done.returncode}"
