"""The CUDA library takes from the CPU library only what that exports: else it does not load, which no build shows."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from moe_ops._register import NATIVE_LIBRARIES, PACKAGE

CPU, CUDA = (PACKAGE / NATIVE_LIBRARIES[key] for key in ("CPU", "CUDA"))


def symbols(library, *options: str) -> set[str]:
    listing = subprocess.run(["nm", "-D", *options, str(library)], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1] for line in listing.splitlines()}


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")
@pytest.mark.skipif(not CPU.exists() or not CUDA.exists(), reason="moe_ops/_C_cuda.abi3.so is not built")
def test_cuda_library_finds_its_symbols():
    wanted = {name for name in symbols(CUDA, "--undefined-only") if "moe_ops" in name}
    assert wanted, "the coupling of the engine calls the CPU library"
    assert wanted <= symbols(CPU, "--defined-only"), sorted(wanted - symbols(CPU, "--defined-only"))


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")
@pytest.mark.skipif(not CPU.exists(), reason="moe_ops/_C.abi3.so is not built")
def test_only_the_stable_interface_is_used():
    """No C++ symbol of torch: those change at each minor release."""
    mangled = {name for name in symbols(CPU, "--undefined-only") if name.startswith(("_ZN2at", "_ZN3c10", "_ZN5torch"))}
    assert not mangled, sorted(mangled)
