"""The one form of every argument error: `<op>: <argument> must be <expected>, got <actual>`."""

from __future__ import annotations

import torch


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe(value: object) -> str:
    """`[5, 3] int64` for a tensor, `repr` for anything else."""
    if isinstance(value, torch.Tensor):
        shape = ", ".join(str(size) for size in value.shape)
        return f"[{shape}] {dtype_name(value.dtype)}"
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return repr(value)


def rank(tensor: torch.Tensor | None) -> int:
    """Its number of dimensions, -1 for None: so that a check of the shape is one of presence too."""
    return -1 if tensor is None else tensor.dim()


def argument_error(op: str, argument: str, expected: str, actual: object) -> ValueError:
    got = actual if isinstance(actual, str) else describe(actual)
    return ValueError(f"{op}: {argument} must be {expected}, got {got}")


def require(condition: bool, op: str, argument: str, expected: str, actual: object) -> None:
    """Raise the argument error unless `condition` holds. A string `actual` is printed as it is.

    A symbolic condition that cannot be decided while tracing (a size read from data) becomes a check at run time.
    """
    if isinstance(condition, torch.SymBool):
        torch._check_value(condition, lambda: str(argument_error(op, argument, expected, actual)))
    elif not condition:
        raise argument_error(op, argument, expected, actual)
