"""What every launch needs: the native twin of a kernel, alignment, the interpreter's limits."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from moe_ops._register import MISSING

# Decided before the kernels are defined, as Triton does. The interpreter stores bfloat16 by truncation and has no
# bfloat16 arithmetic: kernels get the flag as a constant and round by hand, or compute in float32.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

ALIGNMENT = 16  # bytes of the widest load


def native(op: str, tensor: torch.Tensor) -> Callable[..., Any] | None:
    """The native CUDA kernel `op`, where it was built and `tensor` is on a device that has it."""
    if not tensor.is_cuda or (op, "CUDA") in MISSING:
        return None
    return getattr(torch.ops.moe_ops, op).default


# Kernels that have been launched outside a capture, by what Triton compiles separately.
_COMPILED: set[tuple[Any, ...]] = set()


def kernel(*, sizes: Sequence[str] = (), indices: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """triton.jit for a kernel that is compiled once for all values.

    sizes: integers, no value of which is special.
    indices: pointers to ids, maps, weights and the like, whose alignment does not matter.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        jitted = triton.jit(function, do_not_specialize=list(sizes), do_not_specialize_on_alignment=list(indices))
        names = list(inspect.signature(function).parameters)
        jitted.index_positions = frozenset(names.index(name) for name in indices)
        return jitted

    return decorate


def _variant(position: int, argument: Any, index_positions: frozenset[int]) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument.dtype, position in index_positions or argument.data_ptr() % ALIGNMENT == 0
    if isinstance(argument, int):
        return -(2**31) <= argument < 2**31
    return type(argument)


def launch(jitted: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run a Triton kernel on the device of its first argument.

    A kernel that is not compiled yet is refused inside a capture, where loading it could invalidate the capture.
    """
    device = arguments[0].device
    if device.type != "cuda":
        jitted[grid](*arguments, **constants)
        return
    variants = (_variant(i, argument, jitted.index_positions) for i, argument in enumerate(arguments))
    key = (id(jitted), device.index, *variants, *constants.values())
    if key not in _COMPILED and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"moe_ops: the kernel {jitted.__name__.strip('_')} is used for the first time inside a graph capture: "
            "call the op once before capturing, with the dtypes, top_k, batch size and options of the capture"
        )
    with contextlib.nullcontext() if torch.cuda.current_device() == device.index else torch.cuda.device(device):
        jitted[grid](*arguments, **constants)
    _COMPILED.add(key)


def refuse_hip() -> None:
    if torch.version.hip is not None:
        raise RuntimeError("moe_ops: the CUDA kernels are for NVIDIA devices; this build of PyTorch is for HIP")


def vector_width(*tensors: torch.Tensor | None) -> int:
    """Elements of the widest load that fits the addresses, row strides and row lengths of row-major tensors: 16 bytes'
    worth, or 1. Sizes are passed to kernels in this unit, which is how the compiler learns that they divide."""
    given = [tensor for tensor in tensors if tensor is not None]
    width = ALIGNMENT // min(tensor.element_size() for tensor in given)
    for tensor in given:
        if tensor.data_ptr() % ALIGNMENT or tensor.shape[-1] % width:
            return 1
        if any(stride % width for stride in tensor.stride()[:-1]):
            return 1
    return width


def dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Rows whose elements are adjacent; the rows themselves may be apart."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()


def as_float32(weights: torch.Tensor) -> torch.Tensor:
    return weights.to(torch.float32).contiguous()


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: copies keep every bit, and one kernel serves all dtypes of a width."""
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


@triton.jit
def rounded(value, dtype: tl.constexpr, EMULATED: tl.constexpr):
    """float32 to `dtype`, to the nearest even value."""
    if EMULATED and dtype == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        value = tl.where(value == value, even.to(tl.float32, bitcast=True), value)
    return value.to(dtype)
