"""The experts of one layer as a module, for models."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moe_ops import _repacked
from moe_ops._errors import argument_error, require
from moe_ops.experts import BIASES, WEIGHTS, X86_V1, Mxfp4Experts, PreparedExperts, sizes_text
from moe_ops.integrations._names import scale_bytes
from moe_ops.meta.fused_mxfp4_moe import resolve_activation


class FusedMxfp4Experts(nn.Module):
    """MXFP4 experts that run in `fused_mxfp4_moe`; the tensors are buffers under the names that the op gives them.

        experts = FusedMxfp4Experts(Mxfp4Experts(w13, w13_scale, w2, w2_scale, w13_layout="gate_up"))
        experts = experts.to(device).prepare()
        out = experts(hidden_states, topk_ids, topk_weights)

    Args:
        experts: checkpoint tensors (`Mxfp4Experts`) or packed ones (`PreparedExperts`).
        activation, swiglu_limit, swiglu_alpha: as in `fused_mxfp4_moe`.
        batch_invariant: a token's result does not depend on the other tokens.

    `forward(hidden_states [T, H], topk_ids [T, K], topk_weights [T, K]) -> [T, H]`, differentiable in hidden_states and
    topk_weights; the weights are frozen. It serves as experts of `moe_ops.distributed.ExpertParallelMoE`.
    """

    def __init__(
        self,
        experts: Mxfp4Experts | PreparedExperts,
        *,
        activation: str = "silu",
        swiglu_limit: float | None = None,
        swiglu_alpha: float | None = None,
        batch_invariant: bool = False,
    ) -> None:
        super().__init__()
        resolve_activation(type(self).__name__, activation, swiglu_limit, swiglu_alpha)
        self.options: dict[str, Any] = {
            "activation": activation,
            "swiglu_limit": swiglu_limit,
            "swiglu_alpha": swiglu_alpha,
            "batch_invariant": batch_invariant,
        }
        self._hold(experts)

    def _hold(self, experts: Mxfp4Experts | PreparedExperts) -> None:
        self.num_experts = experts.num_experts
        self.hidden_size = experts.hidden_size
        self.intermediate_size = experts.intermediate_size
        arguments = experts.arguments()
        self.w13_layout: str = arguments["w13_layout"]
        self.weight_layout: str = arguments.get("weight_layout", "checkpoint")
        for name in (*WEIGHTS, *BIASES):
            self.register_buffer(name, arguments[name])

    def forward(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        self._require_bytes()
        return torch.ops.moe_ops.fused_mxfp4_moe(
            hidden_states,
            topk_ids,
            topk_weights,
            **self._buffers,
            w13_layout=self.w13_layout,
            weight_layout=self.weight_layout,
            out_dtype=out_dtype,
            **self.options,
        )

    def prepare(self) -> FusedMxfp4Experts:
        """Pack the weights, in their own memory, for the processor that they are on; returns self.

        "x86_v1" on an x86 CPU, "sm90_v1" on a Hopper card; elsewhere the checkpoint bytes stay, and on a CUDA device
        one warning says why. Call it after `to(device)` and after loading a state dict: packed tensors have other
        shapes, and serve the kind of device that they were packed for.
        """
        require(self.weight_layout == "checkpoint", "prepare", "the weights", "in 'checkpoint'", self.weight_layout)
        raw = Mxfp4Experts(**{name: getattr(self, name) for name in (*WEIGHTS, *BIASES)}, w13_layout=self.w13_layout)
        if self.w13.is_cuda:
            from moe_ops.cuda import prepare

            self._hold(prepare(raw))
        elif self.w13.device.type == "cpu" and platform.machine() in ("x86_64", "AMD64"):
            self._hold(raw.prepare(X86_V1))
        return self

    def extra_repr(self) -> str:
        return f"{sizes_text(self)}, {self.weight_layout}, {self.options['activation']}"

    # A state dict holds tensors alone, and rows in another order have the same shapes: their names travel in its
    # metadata, where nothing that reads the tensors sees them. What has lost the metadata (safetensors) is not checked.

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            names = {"w13_layout": self.w13_layout, "weight_layout": self.weight_layout}
            destination._metadata.setdefault(prefix[:-1], {}).update(names)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for name in ("w13_layout", "weight_layout"):
            mine, given = getattr(self, name), local_metadata.get(name)
            if given not in (None, mine):
                error_msgs.append(f"{prefix}{name} must be '{mine}', got '{given}'")
                return
        state_dict = dict(state_dict)
        try:
            state_dict.update(self._given_bytes(state_dict, prefix))
        except ValueError as error:
            error_msgs.append(str(error))
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _given_bytes(self, state_dict: Mapping[str, Any], prefix: str) -> dict[str, Tensor]:
        """The packed tensors of a state dict as bytes, which a copy into the buffers would convert by value."""
        given = {}
        for name in WEIGHTS:
            tensor, mine = state_dict.get(prefix + name), getattr(self, name)
            if not isinstance(tensor, Tensor) or tensor.dtype == mine.dtype:
                continue
            if self.weight_layout != "checkpoint" or not name.endswith("scale"):
                raise argument_error("load_state_dict", prefix + name, str(mine.dtype), str(tensor.dtype))
            given[prefix + name] = scale_bytes(prefix + name, tensor, "load_state_dict")
        if self.weight_layout == "checkpoint":
            tensors = {name: state_dict.get(prefix + name) for name in WEIGHTS}
            _repacked.require_unmarked("load_state_dict", **tensors)
        return given

    def _require_bytes(self) -> None:
        """Another module or container over the same memory may have repacked it."""
        if self.weight_layout == "checkpoint":
            _repacked.require_unmarked(type(self).__name__, **{name: self._buffers[name] for name in WEIGHTS})

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles of repacked bytes would pass for checkpoint bytes.
        self._require_bytes()
        return self.__dict__
