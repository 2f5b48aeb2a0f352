"""Registration: schemas, fakes, native libraries and Python kernels, from the table in schema.py.

A kernel that cannot be had here (no compiler at installation, no Triton) is replaced by one that raises a RuntimeError
with the reason, so that the package always imports and a missing backend is always a clear error.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moe_ops.schema import NAMESPACE, OPS, Op

PACKAGE = Path(__file__).resolve().parent
NATIVE_LIBRARIES = {"CPU": "_C.abi3.so", "CUDA": "_C_cuda.abi3.so"}
_NATIVE_SUFFIXES = (".cpp", ".cu")

# One library owns the namespace; C++ only adds IMPL blocks, so that either may be loaded first.
LIBRARY = torch.library.Library(NAMESPACE, "DEF")

# (op, dispatch key) -> why there is no kernel; `python -m moe_ops info` prints it.
MISSING: dict[tuple[str, str], str] = {}


def has_kernel(op: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{op}", key)


def overload(op: str) -> torch._ops.OpOverload:
    return getattr(getattr(torch.ops, NAMESPACE), op).default


def _module(file: str) -> str:
    return f"moe_ops.{file.removesuffix('.py').replace('/', '.')}"


def define() -> None:
    for op in OPS:
        LIBRARY.define(op.name + op.schema, tags=(torch.Tag.pt2_compliant_tag,))
        if op.ordered:
            torch.library._register_effectful_op(
                f"{NAMESPACE}::{op.name}", torch.library.EffectType.ORDERED, lib=LIBRARY
            )


def register_fakes() -> None:
    for op in OPS:
        if (PACKAGE / op.fake).exists():
            fake = getattr(importlib.import_module(_module(op.fake)), op.name)
            torch.library.register_fake(f"{NAMESPACE}::{op.name}", fake, lib=LIBRARY)


def _hides_installation(library: str) -> bool:
    """Whether an installed distribution has the library that this copy of the package lacks."""
    try:
        installed = importlib.metadata.distribution("torch-moe-ops").locate_file(f"moe_ops/{library}")
    except importlib.metadata.PackageNotFoundError:
        return False
    return Path(str(installed)).exists()


def load_native() -> dict[str, str]:
    """Load the native libraries that are there; dispatch key -> why its library is not."""
    reasons: dict[str, str] = {}
    for key, name in NATIVE_LIBRARIES.items():
        path = PACKAGE / name
        if not path.exists():
            tool = "nvcc" if key == "CUDA" else "a C++ compiler"
            reasons[key] = f"moe_ops/{name} is not installed: it is built where {tool} is found"
            if _hides_installation(name):
                reasons[key] = (
                    f"{PACKAGE.parent} is a source tree without libraries, and hides the installed package: "
                    "run from another folder, or install it with `pip install --no-build-isolation -e .`"
                )
            continue
        if key == "CUDA" and torch.version.cuda is None:
            reasons[key] = "this torch is a build without CUDA"
            continue
        try:
            torch.ops.load_library(str(path))
        except OSError as error:
            reasons[key] = f"moe_ops/{name} could not be loaded: {error.__cause__ or error}"
            # Parts of the CUDA ops have Triton kernels to go on with: slower, which must not happen unsaid.
            warnings.warn(reasons[key], RuntimeWarning, stacklevel=3)
    return reasons


def _raising(op: Op, key: str, reason: str) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{op.name}: no {key} kernel here: {reason}")

    return kernel


def _lazy(op: Op, file: str) -> Callable[..., Any]:
    """A Python kernel whose module is imported at its first call."""
    found: Callable[..., Any] | None = None

    def kernel(*args: Any, **kwargs: Any) -> Any:
        nonlocal found
        if found is None:
            found = getattr(importlib.import_module(_module(file)), op.name)
        return found(*args, **kwargs)

    return kernel


def _python_reason(file: str) -> str:
    """Why the Python kernel of `file` cannot run here, or ''."""
    if not (PACKAGE / file).exists():
        return f"moe_ops/{file} does not exist"
    if file.startswith("triton/") and importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    return ""


def register_kernels(native_reasons: dict[str, str]) -> None:
    for op in OPS:
        for key, file in op.kernels.items():
            if file.endswith(_NATIVE_SUFFIXES):
                if has_kernel(op.name, key):
                    continue
                # Kernels of no device live in the library of their folder.
                home = "CUDA" if file.startswith("csrc/cuda/") else "CPU"
                library = key if key in NATIVE_LIBRARIES else home
                reason = native_reasons.get(library, f"moe_ops/{NATIVE_LIBRARIES[library]} does not contain {file}")
            else:
                reason = _python_reason(file)
                if not reason:
                    LIBRARY.impl(op.name, _lazy(op, file), key)
                    continue
            MISSING[op.name, key] = reason
            LIBRARY.impl(op.name, _raising(op, key, reason), key)
