"""The collectives that routing and exchange use: functional, so that torch.compile sees them."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

# Several releases of torch name one thing differently; the newest name first.
_all_gather: Callable[..., torch.Tensor] = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor


def group_size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


def group_rank(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else group.rank()


def failure(op: str, what: str, error: Exception) -> RuntimeError:
    """The error of a collective that did not end: a rank died, left, or made another call."""
    cause = str(error).split("\n", 1)[0]
    return RuntimeError(
        f"{op}: {what} failed: a rank of the group has died, is late beyond the group's time-out, or made a different"
        f" call. The group cannot be used any more ({type(error).__name__}: {cause})"
    )


def start_all_gather(payload: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Start gathering `payload` [N] into [size * N]. Use the result only through `wait`."""
    return _all_gather(payload, gather_dim=0, group=group)


def wait(pending: torch.Tensor) -> torch.Tensor:
    if isinstance(pending, funcol.AsyncCollectiveTensor):
        return pending.wait()
    return pending


_AGREED: weakref.WeakKeyDictionary[dist.ProcessGroup, set[tuple[int, ...]]] = weakref.WeakKeyDictionary()


def agree(sizes: tuple[int, ...], group: dist.ProcessGroup | None, device: torch.device, op: str, what: str) -> None:
    """Make sure, once per group and sizes, that all ranks have the same ones; raise alike on all if not.

    What follows exchanges messages of these sizes, and a transport may end the process where sizes differ.
    """
    if group is None or sizes in _AGREED.get(group, ()):
        return
    mine = torch.tensor([zlib.crc32(repr(sizes).encode())], dtype=torch.int64, device=device)
    try:
        prints = wait(start_all_gather(mine, group)).tolist()
    except RuntimeError as error:
        raise failure(op, f"the agreement on {what}", error) from error
    require_equal(prints, op, what)
    _AGREED.setdefault(group, set()).add(sizes)


def require_equal(prints: list[int], op: str, what: str) -> None:
    """Raise if a rank's fingerprint differs from that of most ranks (of the lowest ones where there is no majority)."""
    common = max(set(prints), key=lambda value: (prints.count(value), -prints.index(value)))
    others = [rank for rank, value in enumerate(prints) if value != common]
    if others:
        raise RuntimeError(f"{op}: every rank must have the same {what}, ranks {others} differ from the others")


def all_to_all_rows(
    rows: torch.Tensor,
    receive_rows: Sequence[int] | None,
    send_rows: Sequence[int] | None,
    group: dist.ProcessGroup | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Exchange whole rows: the first `send_rows[0]` go to rank 0, the next to rank 1, ...; differentiable.

    Without row counts every rank gets an equal part. `out` (no gradient) takes the received rows, so that a leased
    buffer can be used: functional collectives always allocate.
    """
    if group is None:
        return rows
    if out is not None:
        dist.all_to_all_single(out, rows, _ints(receive_rows), _ints(send_rows), group=group)
        return out
    return _AllToAll.apply(rows, _ints(receive_rows), _ints(send_rows), group)


def _ints(counts: Sequence[int] | None) -> list[int] | None:
    return None if counts is None else list(counts)


class _AllToAll(torch.autograd.Function):
    """Its gradient is the exchange the other way. torch's own differentiable form changed between releases."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        receive_rows: list[int] | None,
        send_rows: list[int] | None,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.back = send_rows, receive_rows, group
        return wait(funcol.all_to_all_single(rows, receive_rows, send_rows, group))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _AllToAll.apply(grads[0].contiguous(), *ctx.back), None, None, None


class _SumForward(torch.autograd.Function):
    """All-reduce whose gradient is the identity: the parts of one sum, used alike on every rank."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return wait(funcol.all_reduce(part, "sum", group))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _SumBackward(torch.autograd.Function):
    """Identity whose gradient is an all-reduce: a value that every rank has, used for a part of a sum."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return wait(funcol.all_reduce(grads[0].contiguous(), "sum", ctx.group)), None


def sum_parts(part: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    return part if group is None else _SumForward.apply(part, group)


def share(value: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    return value if group is None else _SumBackward.apply(value, group)
