"""The module that names CPU experts to the ops, and puts weights into the engine that serves them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moe_ops import _repacked
from moe_ops._errors import argument_error, require
from moe_ops.reference.cpu_moe_submit import EXPERTS
from moe_ops.reference.mxfp4 import quantize_mxfp4

if TYPE_CHECKING:
    from moe_ops.engine import CpuMoeEngine

OP = "CpuExperts"
_ops = torch.ops.moe_ops

# The tensors of an expert, in the order of the internal ops.
EXPERT_TENSORS = ("w13", "w13_scale", "w2", "w2_scale", "w13_bias", "w2_bias")


class RegisteredExperts:
    """What the copies of a CpuExperts module share: identity and geometry. The weights live in the engine."""

    engine: CpuMoeEngine

    def __init__(
        self,
        qualified_name: str,
        handle: int,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        w13_layout: str,
        weight_format: str,
        has_w13_bias: bool,
        has_w2_bias: bool,
        options: Mapping[str, Any],
    ) -> None:
        self.qualified_name = qualified_name
        self.handle = handle
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.w13_layout = w13_layout
        self.weight_format = weight_format
        self.has_w13_bias = has_w13_bias
        self.has_w2_bias = has_w2_bias
        self.options = dict(options)

    def read_expert(self, expert: int) -> dict[str, Tensor]:
        tensors = _ops._engine_read(self.handle, expert)
        return {name: tensor for name, tensor in zip(EXPERT_TENSORS, tensors, strict=True) if tensor.numel()}

    def __deepcopy__(self, memo: dict[int, Any]) -> RegisteredExperts:
        return self

    def __reduce__(self) -> Any:
        return _named_experts, (self.qualified_name,)


def _named_experts(qualified_name: str) -> RegisteredExperts:
    """Unpickling: the experts of that name in this process."""
    shared = EXPERTS.get(_ops._engine_handle(qualified_name))
    if shared is None:
        raise RuntimeError(
            f"CpuExperts: '{qualified_name}' must be registered in this process before it is unpickled: create the "
            "engine and add its experts first"
        )
    return shared


class CpuExperts(nn.Module):
    """The experts of one layer in host memory, as a module: it holds the handle by which the ops know them.

    `handle` is an int64[1] buffer outside the state dict. It is written again whenever the module is moved, copied,
    materialised or unpickled, since such steps may leave anything in a buffer. Copies name the same experts.
    """

    handle: Tensor

    def __init__(self, shared: RegisteredExperts) -> None:
        super().__init__()
        self.shared = shared
        self.register_buffer("handle", torch.tensor([shared.handle], dtype=torch.int64), persistent=False)

    def _refill(self) -> None:
        # A fresh tensor where a copy may share its buffer with the original.
        if self.handle.device.type != "meta":
            self._buffers["handle"] = torch.full((1,), self.shared.handle, dtype=torch.int64, device=self.handle.device)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> CpuExperts:
        super()._apply(fn, recurse)
        self._refill()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._refill()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._buffers = dict(self._buffers)
        self._refill()

    def __deepcopy__(self, memo: dict[int, Any]) -> CpuExperts:
        twin = CpuExperts(self.shared)
        memo[id(self)] = twin
        twin.training = self.training
        twin._buffers["handle"] = self.handle.detach().clone()
        for name, value in self.__dict__.items():
            if name not in twin.__dict__:
                twin.__dict__[name] = copy.deepcopy(value, memo)
        twin._refill()
        return twin

    def extra_repr(self) -> str:
        s = self.shared
        return (
            f"{s.qualified_name!r}, {s.num_experts} experts, {s.hidden_size} x {s.intermediate_size}, {s.weight_format}"
        )

    @property
    def engine(self) -> CpuMoeEngine:
        return self.shared.engine

    @property
    def num_experts(self) -> int:
        return self.shared.num_experts

    # --- weights ---

    def load_expert(
        self,
        expert: int,
        w13: Tensor,
        w13_scale: Tensor | None = None,
        w2: Tensor | None = None,
        w2_scale: Tensor | None = None,
        *,
        w13_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
    ) -> None:
        """Copy one expert's weights into the engine, in FIFO order with its jobs.

        "mxfp4": uint8 w13 [2I, H / 2] and w2 [H, I / 2] with their scales; or float w13 [2I, H] and w2 [H, I] without
        scales, which are quantised on the way in. "bfloat16": float w13 [2I, H] and w2 [H, I].
        """
        if w2 is None:
            raise argument_error(OP, "w2", "a tensor", "None")
        _repacked.require_unmarked(OP, w13=w13, w13_scale=w13_scale, w2=w2, w2_scale=w2_scale)
        shared = self.shared
        if shared.weight_format == "bfloat16":
            require(w13_scale is None and w2_scale is None, OP, "w13_scale", "None for bfloat16 experts", "a tensor")
            w13, w2 = w13.to("cpu", torch.bfloat16), w2.to("cpu", torch.bfloat16)
        elif w13.dtype.is_floating_point and w13_scale is None and w2_scale is None:
            w13, w13_scale = quantize_mxfp4(w13.cpu())
            w2, w2_scale = quantize_mxfp4(w2.cpu())
        given = (w13, w13_scale, w2, w2_scale, _float(w13_bias), _float(w2_bias))
        host = [None if tensor is None else tensor.detach().cpu().contiguous() for tensor in given]
        _ops._engine_load(shared.handle, expert, *host)

    def unload_expert(self, expert: int) -> None:
        """Give one expert's memory back, after the jobs submitted so far."""
        _ops._engine_unload(self.shared.handle, expert)

    def read_expert(self, expert: int) -> dict[str, Tensor]:
        """A copy of one loaded expert, in the layout of `load_expert`."""
        return self.shared.read_expert(expert)

    def loaded(self) -> Tensor:
        """[E] bool: which experts are in memory."""
        return _ops._engine_present(self.shared.handle)

    @property
    def bytes_per_expert(self) -> int:
        return _ops._engine_bytes_per_expert(self.shared.handle)

    def load(
        self,
        tensors: Any,
        *,
        on_cpu: Tensor | Sequence[bool] | None = None,
        physical_to_logical: Tensor | Sequence[int] | None = None,
    ) -> CpuExperts:
        """Load experts from stacked tensors, one at a time.

        tensors: a mapping (or an object with `tensors()`, such as a checkpoint layer) with "w13", "w2" and, for MXFP4
            bytes, "w13_scale" and "w2_scale", all with the logical expert as first dimension; or a function from a
            logical expert to such a mapping of that expert's tensors, which reads no more than it is asked for.
        on_cpu: [E] bool, the experts that live here; None: all.
        physical_to_logical: [E], the logical expert whose weights each of this layer's experts has; None: its own.
        """
        count = self.num_experts
        wanted = [True] * count if on_cpu is None else [bool(value) for value in on_cpu]
        require(len(wanted) == count, OP, "on_cpu", f"[{count}] bool", f"{len(wanted)} values")
        source = list(range(count)) if physical_to_logical is None else [int(value) for value in physical_to_logical]
        require(len(source) == count, OP, "physical_to_logical", f"[{count}] int", f"{len(source)} values")
        if callable(getattr(tensors, "tensors", None)):
            layout = getattr(tensors, "w13_layout", self.shared.w13_layout)
            require(layout == self.shared.w13_layout, OP, "w13_layout", repr(self.shared.w13_layout), repr(layout))
            tensors = tensors.tensors()
        if not callable(tensors):
            require(
                isinstance(tensors, Mapping),
                OP,
                "tensors",
                "a mapping, a function or checkpoint weights",
                type(tensors).__name__,
            )
            if physical_to_logical is None:
                given = tensors["w13"].shape[0]
                require(
                    given == count, OP, "tensors", f"{count} experts, or physical_to_logical given", f"{given} experts"
                )
        for physical, logical in enumerate(source):
            if not wanted[physical]:
                continue
            if callable(tensors):
                one = dict(tensors(logical))
            else:
                logical_count = tensors["w13"].shape[0]
                ok = 0 <= logical < logical_count
                require(ok, OP, "physical_to_logical", f"in [0, {logical_count})", str(logical))
                one = {name: tensor[logical] for name, tensor in tensors.items() if tensor is not None}
            self.load_expert(physical, **{name: value for name, value in one.items() if name in EXPERT_TENSORS})
        return self

    # --- the ops ---

    def submit(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, *, max_deferred: int = 0
    ) -> tuple[Tensor, Tensor]:
        """`cpu_moe_submit` on these experts."""
        return _ops.cpu_moe_submit(hidden_states, topk_ids, topk_weights, self.handle, max_deferred=max_deferred)

    def sync(
        self,
        ticket: Tensor,
        device_out: Tensor,
        *,
        deferred_ticket: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """`cpu_moe_sync`."""
        return _ops.cpu_moe_sync(ticket, device_out, deferred_ticket=deferred_ticket, out_dtype=out_dtype)

    def forward(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Submit and sync at once: the CPU experts alone."""
        ticket, _ = self.submit(hidden_states, topk_ids, topk_weights)
        return self.sync(ticket, torch.zeros_like(hidden_states))


def _float(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.to(torch.float32)
