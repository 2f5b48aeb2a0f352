"""The transformers library: an experts implementation "moe_ops", and MXFP4 experts in place of a model's own.

    import moe_ops.integrations.transformers as moe_transformers            # registers "moe_ops"
    model = AutoModelForCausalLM.from_pretrained(..., experts_implementation="moe_ops")
    moe_transformers.quantize_experts(model)                                # or
    moe_transformers.load_experts(model, "folder of an MXFP4 checkpoint")

"moe_ops" runs a model's own weights through `topk_permute`, grouped matrix products and `topk_unpermute`; ids outside
the experts, which transformers uses as sentinels under expert parallelism, are skipped. The two functions put
`moe_ops.FusedMxfp4Experts` in the place of the experts modules, which run in `fused_mxfp4_moe`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import moe_ops
from moe_ops.experts import Mxfp4Experts
from moe_ops.integrations.checkpoints import Checkpoint
from moe_ops.modules import FusedMxfp4Experts
from moe_ops.reference.mxfp4 import quantize_mxfp4

NAME = "moe_ops"


def moe_ops_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts function: `self` is the model's experts module; [T, H], [T, K], [T, K] -> [T, H]."""
    rows, row_map, tokens_per_expert = moe_ops.topk_permute(hidden_states, top_k_index, self.num_experts)
    ends = tokens_per_expert.cumsum(0, dtype=torch.int32)  # [E]
    # Rows past the last end belong to no expert. Grouped products leave them, and their gradients, unwritten, which
    # biases and norms would sum up: there they are selected away.
    expert_of_row, valid = None, None
    if self.has_bias or self.has_post_expert_norm:
        position = torch.arange(rows.shape[0], device=rows.device, dtype=torch.int32)
        valid = (position < ends[-1]).unsqueeze(-1)
    if self.has_bias:
        expert_of_row = torch.searchsorted(ends, position, right=True).clamp(max=self.num_experts - 1)
    projection = "gate_up_proj" if self.has_gate else "up_proj"
    rows = _grouped_linear(self, projection, rows, ends, expert_of_row, valid)
    rows = self._apply_gate(rows) if self.has_gate else self.act_fn(rows)
    rows = _grouped_linear(self, "down_proj", rows, ends, expert_of_row, valid)
    if self.has_post_expert_norm:
        rows = self.post_expert_norm(rows)
    return moe_ops.topk_unpermute(rows.to(hidden_states.dtype), row_map, top_k_weights)


def _grouped_linear(
    module: Any,
    name: str,
    rows: torch.Tensor,
    ends: torch.Tensor,
    expert_of_row: torch.Tensor | None,
    valid: torch.Tensor | None,
) -> torch.Tensor:
    weight = getattr(module, name)
    weight = weight if module.is_transposed else weight.transpose(-2, -1)  # [E, in, out]
    rows = rows.to(weight.dtype)
    if torch.compiler.is_compiling() and weight.dtype != torch.bfloat16:
        # Inductor lowers grouped_mm for bfloat16 alone; transformers has an op for the rest.
        out = torch.ops.transformers.grouped_mm_fallback(rows, weight, offs=ends)
    else:
        out = F.grouped_mm(rows, weight, offs=ends)
    if expert_of_row is not None:
        out = out + getattr(module, f"{name}_bias")[expert_of_row]
    return out if valid is None else torch.where(valid, out, 0.0)


ALL_EXPERTS_FUNCTIONS.register(NAME, moe_ops_experts)


def experts_modules(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, module) of every experts module that transformers dispatches through its registry."""
    for name, module in model.named_modules():
        if hasattr(module, "_is_expert_parallel") and hasattr(module, "_apply_gate") and hasattr(module, "down_proj"):
            yield name, module


def resolve_activation(module: Any) -> tuple[dict[str, Any], str]:
    """(activation arguments, row order of gate_up_proj) of an experts module, found by trying them on its gate.

    Raises ValueError where `fused_mxfp4_moe` has no such gate.
    """
    limit, alpha = getattr(module, "limit", None), getattr(module, "alpha", None)
    candidates: list[dict[str, Any]] = [{"activation": "silu", "swiglu_limit": None, "swiglu_alpha": None}]
    if limit is not None:
        candidates.append({"activation": "silu", "swiglu_limit": float(limit), "swiglu_alpha": None})
        if alpha is not None:
            candidates.append({"activation": "swiglu_oai", "swiglu_limit": float(limit), "swiglu_alpha": float(alpha)})
    from moe_ops.reference.fused_mxfp4_moe import split_gate_up, swiglu

    # Wide enough to cross any limit in use, on both sides.
    probe = torch.linspace(-40, 40, 64).view(4, 16)[:, torch.randperm(16, generator=torch.Generator().manual_seed(0))]
    if getattr(module, "has_gate", False) and not getattr(module, "has_post_expert_norm", False):
        expected = module._apply_gate(probe)
        for candidate in candidates:
            for layout in ("gate_up", "up_gate", "interleaved"):
                gate, up = split_gate_up(probe, layout)
                alpha = candidate["swiglu_alpha"] or 1.0
                tried = swiglu(gate, up, candidate["activation"], candidate["swiglu_limit"], alpha)
                if torch.allclose(tried, expected, rtol=1e-4, atol=1e-5):
                    return candidate, layout
    raise ValueError(
        f"quantize_experts: experts must be gated by SiLU or the gate of gpt-oss, got {type(module).__name__}"
    )


def quantize_experts(model: torch.nn.Module, *, progress: Callable[[int], None] | None = None) -> int:
    """Put `moe_ops.FusedMxfp4Experts` in the place of every experts module, quantising; returns how many there were.

    The float weights of a layer are freed before the next one is quantised.
    """
    count = 0
    for name, module in list(experts_modules(model)):
        activation, layout = resolve_activation(module)
        replacement = FusedMxfp4Experts(_quantize(module, layout), **activation)
        model.set_submodule(name, replacement.to(module.down_proj.device))
        count += 1
        if progress is not None:
            progress(count)
    return count


@torch.no_grad()
def _quantize(module: Any, layout: str) -> Mxfp4Experts:
    parts: dict[str, list[torch.Tensor]] = {"w13": [], "w13_scale": [], "w2": [], "w2_scale": []}
    for expert in range(module.num_experts):
        for name, projection in (("w13", module.gate_up_proj), ("w2", module.down_proj)):
            weight = projection[expert].t() if module.is_transposed else projection[expert]
            codes, scales = quantize_mxfp4(weight, search=True)
            parts[name].append(codes)
            parts[f"{name}_scale"].append(scales)
    return Mxfp4Experts(
        **{name: torch.stack(part) for name, part in parts.items()},
        w13_layout=layout,
        w13_bias=module.gate_up_proj_bias.detach().clone() if module.has_bias else None,
        w2_bias=module.down_proj_bias.detach().clone() if module.has_bias else None,
    )


def load_experts(
    model: torch.nn.Module,
    path: str | Path,
    *,
    activation: dict[str, Any] | None = None,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Put MXFP4 experts of a checkpoint in the place of the experts modules of the same names; returns how many.

    A module may still be on the meta device. Where it is none that transformers dispatches, `activation` must say what
    its gate is, as keyword arguments of `fused_mxfp4_moe`.
    """
    count = 0
    with Checkpoint(path) as checkpoint:
        for prefix in checkpoint.layers():
            module = model.get_submodule(prefix)
            arguments = activation or resolve_activation(module)[0]
            device = next((p.device for p in module.parameters()), torch.device("cpu"))
            target = "cpu" if device.type == "meta" else device
            model.set_submodule(prefix, FusedMxfp4Experts(checkpoint.load_experts(prefix, device=target), **arguments))
            count += 1
            if progress is not None:
                progress(count)
    if not count:
        raise ValueError(f"load_experts: path must be a checkpoint with MXFP4 experts, got '{path}'")
    return count
