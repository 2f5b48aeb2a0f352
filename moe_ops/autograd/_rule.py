"""How a rule is attached to an op.

torch.library.register_autograd refuses ops with keyword-only tensors, of which ours have several (`after`, biases,
`expert_map`); this is the same mechanism, a kernel on the Autograd key, without that limit.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from moe_ops._errors import argument_error
from moe_ops._register import LIBRARY, overload
from moe_ops.schema import BY_NAME


def _signature(op: str) -> inspect.Signature:
    """The op's arguments with their defaults, from its schema."""
    parameters = []
    for argument in overload(op)._schema.arguments:
        kind = inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
        default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
        parameters.append(inspect.Parameter(argument.name, kind, default=default))
    return inspect.Signature(parameters)


def _wants_gradient(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Cheap: this stands before every call outside inference mode."""
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*args, *kwargs.values())


def _refuse_tangents(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward-mode derivatives are not defined. Without this a tangent would vanish without a word, as if it were 0."""
    if forward_ad._current_level < 0:  # type: ignore[attr-defined]
        return
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise NotImplementedError(f"{op}: forward-mode derivatives are not defined")


def attach(
    op: str,
    differentiable: Sequence[str],
    save: Callable[[Any, dict[str, Any], Any], None],
    backward: Callable[..., Sequence[torch.Tensor | None]],
    frozen: Sequence[str] = (),
) -> None:
    """Give `op` a gradient.

    differentiable: arguments that may require a gradient.
    save(ctx, arguments, result): keeps what the backward needs; `arguments` maps every name to its value.
    backward(ctx, *grads): the gradients of `differentiable`, in that order.
    frozen: tensors that must not require one, since it would be silently lost.
    """
    call = overload(op)
    signature = _signature(op)

    class Rule(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, arguments: dict[str, Any], *tensors: torch.Tensor | None) -> Any:
            arguments = {**arguments, **dict(zip(differentiable, tensors, strict=True))}
            result = _below(keyset, arguments)
            save(ctx, arguments, result)
            return result

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
            return (None, None, *backward(ctx, *grads))

    def _below(keyset: Any, arguments: dict[str, Any]) -> Any:
        bound = inspect.BoundArguments(signature, arguments)  # type: ignore[arg-type]
        with torch._C._AutoDispatchBelowAutograd():
            return call.redispatch(keyset & torch._C._after_autograd_keyset, *bound.args, **bound.kwargs)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_tangents(op, args, kwargs)
        if not _wants_gradient(args, kwargs):
            with torch._C._AutoDispatchBelowAutograd():
                return call.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                f"{op}: gradients inside torch.func transforms are not defined; use torch.autograd"
            )
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        for name in frozen:
            tensor = arguments[name]
            if tensor is not None and tensor.requires_grad:
                raise argument_error(op, name, "frozen (requires_grad=False)", "a tensor that requires grad")
        return Rule.apply(keyset, arguments, *(arguments[name] for name in differentiable))

    LIBRARY.impl(op, kernel, "Autograd", with_keyset=True)


def refuse_gradient(op: str, names: Sequence[str], instead: str, writes: Sequence[str] = ()) -> None:
    """Make `op` raise, before it runs, where one of `names` requires a gradient that it would lose.

    writes: keyword arguments that the op overwrites. Their version is raised, so that a backward that has saved one of
        them says so instead of using what it now holds.
    """
    assert op in BY_NAME
    call = overload(op)
    signature = _signature(op)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_tangents(op, args, kwargs)
        if _wants_gradient(args, kwargs):
            arguments = signature.bind(*args, **kwargs).arguments
            for name in names:
                tensor = arguments.get(name)
                if tensor is not None and tensor.requires_grad:
                    raise argument_error(op, name, f"detached ({instead})", "a tensor that requires grad")
        with torch._C._AutoDispatchBelowAutograd():
            result = call.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)
        for name in writes:
            if not kwargs[name].is_inference():  # those have no version
                torch.autograd.graph.increment_version(kwargs[name])
        return result

    LIBRARY.impl(op, kernel, "Autograd", with_keyset=True)
