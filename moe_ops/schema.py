"""THE list of operators: name, schema and, per dispatch key, the file that holds its kernel.

Everything that iterates over operators (registration, tests, docs, benchmarks, `python -m moe_ops info`) reads this
table. A `.py` kernel file holds a function named like the op, with the op's signature; a `.cpp` or `.cu` file holds an
`STABLE_TORCH_LIBRARY_IMPL` block. Schemas only grow: arguments are added at the end, with defaults (docs/policy.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

NAMESPACE = "moe_ops"

# Raised when an argument is added; `info` prints it and prepared-weight files record it.
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Op:
    """One operator.

    schema:  arguments and returns, without the name.
    kernels: dispatch key -> file of the kernel, relative to the package.
    ordered: carries an ORDERED effect, so that torch.compile neither drops, merges nor reorders its calls.
    """

    name: str
    schema: str
    kernels: Mapping[str, str] = field(default_factory=dict)
    ordered: bool = False

    @property
    def public(self) -> bool:
        return not self.name.startswith("_")

    @property
    def fake(self) -> str:
        return f"meta/{self.name}.py"

    @property
    def reference(self) -> str:
        return f"reference/{self.name}.py"


def _kernels(name: str, *, cpu: str = "", cuda: str = "", npu: str = "") -> dict[str, str]:
    """The usual three files of an op, each of which can be named otherwise."""
    return {
        "CPU": cpu or f"csrc/cpu/{name}.cpp",
        "CUDA": cuda or f"triton/{name}.py",
        "PrivateUse1": npu or f"npu/{name}.py",
    }


_MOE_TENSORS = (
    "Tensor hidden_states, Tensor topk_ids, Tensor topk_weights, "
    "Tensor w13, Tensor w13_scale, Tensor w2, Tensor w2_scale"
)
_MOE_OPTIONS = (
    "str w13_layout, Tensor? w13_bias=None, Tensor? w2_bias=None, str activation='silu', float? swiglu_limit=None, "
    "float? swiglu_alpha=None, Tensor? expert_map=None"
)

# Internal ops by which moe_ops/engine.py manages engines. They take host values and are called outside graphs.
_ENGINE_OPS: dict[str, str] = {
    "create": "(str name, int threads, int node_count, int[] nodes, int max_jobs, str sysfs) -> int",
    "close": "(int engine, bool drain) -> ()",
    "close_all": "() -> ()",
    "plan": "(int engine) -> Tensor",
    "add_experts": "(int engine, str name, int num_experts, int hidden_size, int intermediate_size, bool bfloat16,"
    " str w13_layout, bool swiglu_oai, float? limit, float alpha, bool w13_bias, bool w2_bias, bool batch_invariant)"
    " -> int",
    "remove_experts": "(int handle, int engine) -> ()",
    "load": "(int handle, int expert, Tensor? w13, Tensor? w13_scale, Tensor? w2, Tensor? w2_scale, Tensor? w13_bias,"
    " Tensor? w2_bias) -> ()",
    "unload": "(int handle, int expert) -> ()",
    "read": "(int handle, int expert) -> Tensor[]",
    "present": "(int handle) -> Tensor",
    "bytes_per_expert": "(int handle) -> int",
    "stats": "(int engine) -> Tensor",
    "trace": "(int engine) -> (Tensor numbers, Tensor names)",
    "set_repeatable": "(int engine, bool on) -> ()",
    "hold": "(int engine, bool held) -> ()",
    "wait_idle": "(int engine) -> ()",
    "discard": "(int ticket) -> ()",
    "discard_unsynced": "(int engine) -> int",
    "is_done": "(int ticket) -> bool",
    "check": "(int engine) -> ()",
    "handle": "(str qualified_name) -> int",
    "inject_failures": "(int handle, int count) -> ()",
    "set_synchronous": "(bool on) -> ()",
    "synchronous": "() -> bool",
}

OPS: tuple[Op, ...] = (
    Op(
        "topk_permute",
        "(Tensor hidden_states, Tensor topk_ids, SymInt num_experts, *, SymInt? num_out_tokens=None,"
        " Tensor? after=None) -> (Tensor permuted_hidden_states, Tensor row_map, Tensor tokens_per_expert)",
        _kernels("topk_permute"),
    ),
    Op(
        "topk_permute_out",
        "(Tensor hidden_states, Tensor topk_ids, SymInt num_experts, *, Tensor(a!) out)"
        " -> (Tensor row_map, Tensor tokens_per_expert)",
        _kernels("topk_permute_out", cpu="csrc/cpu/topk_permute.cpp"),
    ),
    Op(
        "topk_unpermute",
        "(Tensor permuted_hidden_states, Tensor row_map, Tensor? topk_weights=None) -> Tensor",
        _kernels("topk_unpermute"),
    ),
    Op(
        "topk_unpermute_backward",
        "(Tensor grad_output, Tensor permuted_hidden_states, Tensor row_map, Tensor? topk_weights=None)"
        " -> (Tensor grad_permuted_hidden_states, Tensor grad_topk_weights)",
        _kernels("topk_unpermute_backward", cpu="csrc/cpu/topk_unpermute.cpp"),
    ),
    Op(
        "route_metadata",
        "(Tensor tokens_per_source, int ep_rank, *, str mode='push') -> (Tensor dispatch_src, Tensor dispatch_dst,"
        " Tensor dispatch_size, Tensor combine_src, Tensor combine_dst, Tensor combine_size, Tensor group_ends,"
        " Tensor loads)",
        _kernels("route_metadata"),
    ),
    Op(
        "ep_remap",
        "(Tensor topk_ids, Tensor topk_weights, *, SymInt? expert_offset=None, SymInt? num_local_experts=None,"
        " Tensor? expert_map=None, str fill='reuse') -> (Tensor local_ids, Tensor local_weights)",
        _kernels("ep_remap"),
    ),
    Op(
        "fused_mxfp4_moe",
        f"({_MOE_TENSORS}, *, {_MOE_OPTIONS}, ScalarType? out_dtype=None, bool batch_invariant=False,"
        " str weight_layout='checkpoint', Tensor? after=None) -> Tensor",
        _kernels("fused_mxfp4_moe"),
    ),
    Op(
        "fused_mxfp4_moe_out",
        f"({_MOE_TENSORS}, *, {_MOE_OPTIONS}, bool batch_invariant=False, str weight_layout='checkpoint',"
        " Tensor? after=None, Tensor(a!) out) -> ()",
        _kernels("fused_mxfp4_moe_out", cpu="csrc/cpu/fused_mxfp4_moe.cpp"),
    ),
    Op(
        "fused_mxfp4_moe_backward",
        f"(Tensor grad_output, {_MOE_TENSORS}, *, {_MOE_OPTIONS}, str weight_layout='checkpoint')"
        " -> (Tensor grad_hidden_states, Tensor grad_topk_weights)",
        _kernels("fused_mxfp4_moe_backward", cpu="csrc/cpu/fused_mxfp4_moe.cpp"),
    ),
    Op(
        "cpu_moe_submit",
        "(Tensor hidden_states, Tensor topk_ids, Tensor topk_weights, Tensor engine, *, int? max_deferred=None)"
        " -> (Tensor ticket, Tensor deferred_ticket)",
        _kernels("cpu_moe_submit", cpu="csrc/cpu/cpu_moe.cpp", cuda="csrc/cuda/cpu_moe.cpp"),
        ordered=True,
    ),
    Op(
        "cpu_moe_sync",
        "(Tensor ticket, Tensor device_out, *, Tensor? deferred_ticket=None, ScalarType? out_dtype=None) -> Tensor",
        _kernels("cpu_moe_sync", cpu="csrc/cpu/cpu_moe.cpp", cuda="csrc/cuda/cpu_moe.cpp"),
        ordered=True,
    ),
    Op("_engine_staging", "(int device) -> Tensor", {"CompositeExplicitAutograd": "csrc/cuda/cpu_moe.cpp"}),
    *(
        Op(f"_engine_{name}", schema, {"CompositeExplicitAutograd": "csrc/cpu/engine_admin.cpp"})
        for name, schema in _ENGINE_OPS.items()
    ),
    # Native parts of the CUDA kernels in triton/: arguments are checked and outputs allocated there.
    Op(
        "_permutation_map",
        "(Tensor topk_ids, Tensor? expert_map, Tensor? topk_weights, SymInt num_rows, Tensor(a!) row_map,"
        " Tensor(b!) tokens_per_expert, Tensor(c!)? placement, Tensor(d!)? row_slot) -> ()",
        {"CUDA": "csrc/cuda/permutation_map.cu"},
    ),
    Op(
        "_permute_rows",
        "(Tensor hidden_states, Tensor placement, Tensor(a!) out) -> ()",
        {"CUDA": "csrc/cuda/permute_rows.cu"},
    ),
    # Hopper: what fused_mxfp4_moe calls for weight_layout "sm90_v1", and its kernels.
    Op(
        "_fused_mxfp4_moe_sm90",
        f"({_MOE_TENSORS}, *, {_MOE_OPTIONS}, bool batch_invariant=False, str weight_layout='sm90_v1', Tensor(a!) out)"
        " -> ()",
        {"CUDA": "cuda/_fused_mxfp4_moe_sm90.py"},
    ),
    Op(
        "_sm90_decode",
        f"({_MOE_TENSORS}, Tensor? w13_bias, Tensor? w2_bias, Tensor? expert_map, int[] row_places, bool oai,"
        " float limit, float alpha, bool one_order, bool all_scales, Tensor(a!) out) -> ()",
        {"CUDA": "csrc/cuda/fused_mxfp4_moe_sm90.cpp"},
    ),
    Op(
        "_sm90_grouped",
        "(Tensor hidden_states, Tensor topk_weights, Tensor row_map, Tensor row_slot, Tensor tokens_per_expert,"
        " Tensor w13, Tensor w13_scale, Tensor w2, Tensor w2_scale, Tensor? w13_bias, Tensor? w2_bias,"
        " int[] row_places, bool oai, float limit, float alpha, bool wide, bool e4m3, Tensor(a!) out) -> ()",
        {"CUDA": "csrc/cuda/fused_mxfp4_moe_sm90.cpp"},
    ),
    Op(
        "_sm90_quantize_rows",
        "(Tensor rows, Tensor(a!) quantized, Tensor(b!) scale) -> ()",
        {"CUDA": "csrc/cuda/fused_mxfp4_moe_sm90.cpp"},
    ),
    Op(
        "_ep_remap",
        "(Tensor topk_ids, Tensor topk_weights, SymInt expert_offset, SymInt num_local_experts, Tensor? expert_map,"
        " bool reuse, Tensor(a!) local_ids, Tensor(b!) local_weights) -> ()",
        {"CUDA": "csrc/cuda/ep_remap.cu"},
    ),
)

BY_NAME: dict[str, Op] = {op.name: op for op in OPS}
