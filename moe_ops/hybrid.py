"""One layer of routed experts, some on the device and the others in host memory, in one call.

The device's experts live in a pool of slots whose addresses never change, so that captured graphs stay valid when
residents change between steps. Which experts are residents is one device tensor, `expert_map`, from which both
sides' ids are made in stream order: an expert is never counted twice or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from moe_ops._errors import argument_error, require
from moe_ops.cpu_experts import EXPERT_TENSORS, CpuExperts
from moe_ops.cuda import slots
from moe_ops.cuda.prepare import LAYOUT
from moe_ops.integrations._names import scale_bytes

OP = "HybridExperts"
LAYOUTS = ("auto", "checkpoint", LAYOUT)
_ops = torch.ops.moe_ops


class HybridExperts(nn.Module):
    """Device experts by `fused_mxfp4_moe`, CPU experts by the engine, shared experts if given; one rounding.

    Args:
        cpu_experts: the layer's experts in the engine ("mxfp4"), loaded as far as they live there.
        num_slots: experts that the device holds at once, possibly 0.
        device: of the slots.
        max_deferred: up to this many of a token's CPU slots run one layer late (0 for the model's last layer).
        routed_scaling_factor: multiplied into the router weights, once, for both sides.
        shared_experts: a module on hidden_states whose result is added.
        weight_layout: of the slots. "auto": "sm90_v1" where the Hopper kernels serve the device, else "checkpoint".
            Slots in "sm90_v1" hold no expert with a scale outside 2^-126 to 2: for these ask for "checkpoint". Experts
            are packed when they move in and unpacked when they leave, exactly.

    The layers of a model pass deferred work on:

        deferred = layers[0].no_deferred()
        for layer in layers:
            y, deferred = layer(x, topk_ids, topk_weights, deferred)

    Layers of equal sizes share one compilation, and those with max_deferred=0 a second one.
    """

    expert_map: Tensor

    def __init__(
        self,
        cpu_experts: CpuExperts,
        num_slots: int,
        *,
        device: torch.device | str = "cpu",
        max_deferred: int = 0,
        routed_scaling_factor: float = 1.0,
        shared_experts: nn.Module | None = None,
        weight_layout: str = "auto",
    ) -> None:
        super().__init__()
        shared = cpu_experts.shared
        require(shared.weight_format == "mxfp4", OP, "cpu_experts", "experts in 'mxfp4'", f"'{shared.weight_format}'")
        count = shared.num_experts
        require(0 <= num_slots <= count, OP, "num_slots", f"in [0, {count}]", str(num_slots))
        require(max_deferred >= 0, OP, "max_deferred", "at least 0", str(max_deferred))
        self.cpu_experts = cpu_experts
        self.num_slots = num_slots
        self.max_deferred = max_deferred
        self.routed_scaling_factor = routed_scaling_factor
        self.shared_experts = shared_experts
        self._options: dict[str, Any] = {"w13_layout": shared.w13_layout, **shared.options}
        self._residents: list[int] = []  # expert of each slot in use
        require(weight_layout in LAYOUTS, OP, "weight_layout", "'auto', 'checkpoint' or 'sm90_v1'", repr(weight_layout))
        if weight_layout == "auto":
            weight_layout = LAYOUT if slots.slots_reason(torch.device(device)) is None else "checkpoint"
        self.weight_layout = weight_layout
        rows, hidden, inter = 2 * shared.intermediate_size, shared.hidden_size, shared.intermediate_size
        shapes: dict[str, tuple[int, ...] | None] = {
            "w13": (rows, hidden // 2),
            "w13_scale": (rows, hidden // 32),
            "w2": (hidden, inter // 2),
            "w2_scale": (hidden, inter // 32),
            "w13_bias": (rows,) if shared.has_w13_bias else None,
            "w2_bias": (hidden,) if shared.has_w2_bias else None,
        }
        self._expert_shapes = dict(shapes)
        if weight_layout == LAYOUT:
            shapes.update(slots.slot_shapes(hidden, inter))
        for name in EXPERT_TENSORS:
            shape = shapes[name] if num_slots else None
            dtype = torch.float32 if name.endswith("bias") else torch.uint8
            value = None if shape is None else torch.zeros(num_slots, *shape, dtype=dtype, device=device)
            self.register_buffer(name, value, persistent=False)
        self.register_buffer("expert_map", torch.full((count,), -1, dtype=torch.int32, device=device), persistent=False)
        cpu_experts.to(device)

    def no_deferred(self) -> Tensor:
        """The deferred ticket of a layer that has no layer before it."""
        return torch.zeros(1, dtype=torch.int64, device=self.expert_map.device)

    def forward(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        deferred_ticket: Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(the layer's output, in out_dtype or that of hidden_states, and the deferred ticket for the next layer).

        Gradients flow through the device experts and the shared experts; the CPU experts pass none.
        """
        weights = topk_weights.to(torch.float32)
        if self.routed_scaling_factor != 1.0:
            weights = weights * self.routed_scaling_factor
        known = topk_ids.clamp(0, self.expert_map.shape[0] - 1).to(torch.int64)
        cpu_ids = torch.where(self.expert_map[known] >= 0, -1, topk_ids)
        ticket, deferred = _ops.cpu_moe_submit(
            hidden_states.detach(), cpu_ids, weights.detach(), self.cpu_experts.handle, max_deferred=self.max_deferred
        )
        if self.num_slots:
            out = _ops.fused_mxfp4_moe(
                hidden_states,
                topk_ids,
                weights,
                self.w13,
                self.w13_scale,
                self.w2,
                self.w2_scale,
                w13_bias=self.w13_bias,
                w2_bias=self.w2_bias,
                expert_map=self.expert_map,
                out_dtype=torch.float32,
                weight_layout=self.weight_layout,
                after=ticket,
                **self._options,
            )
        else:
            out = torch.zeros(hidden_states.shape, dtype=torch.float32, device=hidden_states.device)
        if self.shared_experts is not None:
            out = out + self.shared_experts(hidden_states).to(torch.float32)
        dtype = out_dtype or hidden_states.dtype
        out = _ops.cpu_moe_sync(ticket, out, deferred_ticket=deferred_ticket, out_dtype=dtype)
        return out, deferred

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> HybridExperts:
        before = self.expert_map
        # to_empty, also of a model that holds this layer, comes here with a function that keeps no values.
        probe = torch.tensor(list(os.urandom(32)), dtype=torch.uint8, device=before.device)
        moved = fn(probe)
        super()._apply(fn, recurse)
        if self.expert_map is before or self.expert_map.device.type == "meta":
            return self
        if before.device.type == "meta" or not torch.equal(moved.cpu(), probe.cpu()):
            self._residents.clear()
        self.expert_map.fill_(-1)
        for slot, expert in enumerate(self._residents):
            self.expert_map[expert] = slot
        return self

    # --- residency: between steps ---

    def residents(self) -> list[int]:
        """The experts on the device, by slot."""
        return list(self._residents)

    def place(self, experts: Iterable[int]) -> None:
        """Make these experts the device's residents, between two steps; the others live on the CPU.

        Slots change in place and host memory is given back expert by expert, so that captured graphs stay valid and no
        more than two experts exist twice at a time. Waits for the device and the engine. Copies of the layer name the
        same CPU experts: change the residents of one of them only.
        """
        wanted = [int(expert) for expert in experts]
        count = self.cpu_experts.num_experts
        require(len(set(wanted)) == len(wanted), OP, "experts", "distinct", str(wanted))
        require(len(wanted) <= self.num_slots, OP, "experts", f"at most {self.num_slots}", f"{len(wanted)}")
        for expert in wanted:
            require(0 <= expert < count, OP, "experts", f"in [0, {count})", str(expert))
        self._wait()
        leaving = [expert for expert in self._residents if expert not in wanted]
        arriving = [expert for expert in wanted if expert not in self._residents]
        for expert in arriving if self.weight_layout == LAYOUT else ():  # before anything is changed
            self._check_fits(expert, self.cpu_experts.read_expert(expert))
        with torch.no_grad():
            # Pairwise, so that the host needs room for one more expert at most.
            while leaving or arriving:
                if leaving and (len(leaving) >= len(arriving) or len(self._residents) == self.num_slots):
                    self._evict(leaving.pop())
                else:
                    self._admit(arriving.pop(0))
        self._wait()

    def load_resident(self, expert: int, **tensors: Tensor) -> None:
        """Load an expert that is not in the engine straight into a free slot (at start-up)."""
        count = self.cpu_experts.num_experts
        require(0 <= expert < count, OP, "expert", f"in [0, {count})", str(expert))
        require(expert not in self._residents, OP, "expert", "none of the residents", str(expert))
        require(len(self._residents) < self.num_slots, OP, "expert", "loaded while a slot is free", str(expert))
        tensors = self._checked(tensors)
        if self.weight_layout == LAYOUT:
            self._check_fits(expert, tensors)
        with torch.no_grad():
            self._fill(expert, tensors)

    def _checked(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """One expert in checkpoint layout: all of its tensors and no others, scales as bytes."""
        unknown = sorted(set(given) - set(EXPERT_TENSORS))
        require(not unknown, OP, "tensors", f"among {', '.join(EXPERT_TENSORS)}", ", ".join(unknown))
        tensors = {}
        for name, shape in self._expert_shapes.items():
            tensor = given.get(name)
            if shape is None:
                require(tensor is None, OP, name, "None, as the experts have none", tensor)
                continue
            bias = name.endswith("bias")
            expected = f"{list(shape)} {'float' if bias else 'uint8'}"
            if tensor is None or tuple(tensor.shape) != shape:
                raise argument_error(OP, name, expected, tensor)
            if name.endswith("scale"):
                tensor = scale_bytes(name, tensor, OP)
            fits = tensor.dtype.is_floating_point if bias else tensor.dtype == torch.uint8
            require(fits, OP, name, expected, tensor)
            tensors[name] = tensor
        return tensors

    def _wait(self) -> None:
        if self.expert_map.device.type != "cpu":
            torch.accelerator.synchronize(self.expert_map.device)
        self.cpu_experts.engine.wait_idle()

    def _check_fits(self, expert: int, tensors: dict[str, Tensor]) -> None:
        reason = slots.expert_reason(tensors)
        if reason is not None:
            layouts = f"representable in weight_layout '{LAYOUT}' ('checkpoint' holds every expert)"
            raise argument_error(OP, "experts", layouts, f"{expert}: {reason}")

    def _fill(self, expert: int, tensors: dict[str, Tensor]) -> None:
        slot = len(self._residents)
        if self.weight_layout == LAYOUT:
            tensors = tensors | slots.pack_expert(tensors, self._options["w13_layout"], self.expert_map.device)
        for name in EXPERT_TENSORS:
            buffer = getattr(self, name)
            if buffer is not None:
                buffer[slot].copy_(tensors[name])
        self._residents.append(expert)
        self.expert_map[expert] = slot

    def _admit(self, expert: int) -> None:
        self._fill(expert, self.cpu_experts.read_expert(expert))
        self.cpu_experts.unload_expert(expert)

    def _evict(self, expert: int) -> None:
        slot = self._residents.index(expert)
        buffers = {name: getattr(self, name) for name in EXPERT_TENSORS if getattr(self, name) is not None}
        tensors = {name: buffer[slot] for name, buffer in buffers.items()}
        if self.weight_layout == LAYOUT:
            tensors |= slots.unpack_expert(tensors, self._options["w13_layout"])
        self.cpu_experts.load_expert(expert, **{name: tensor.cpu() for name, tensor in tensors.items()})
        self.expert_map[expert] = -1
        # The last slot in use closes the gap.
        last = len(self._residents) - 1
        if slot != last:
            for buffer in buffers.values():
                buffer[slot].copy_(buffer[last].clone())
            self._residents[slot] = self._residents[last]
            self.expert_map[self._residents[slot]] = slot
        self._residents.pop()
