"""A mixture-of-experts layer over several ranks: router output in, combined rows out."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moe_ops import ops
from moe_ops._errors import argument_error, require
from moe_ops.distributed import collectives
from moe_ops.distributed.exchange import combine, dispatch
from moe_ops.distributed.placement import ReplicaTable
from moe_ops.distributed.route import prepare_topk_route
from moe_ops.distributed.spec import RouteSpec
from moe_ops.distributed.static import StaticRoute, check_flags, prepare_static_route, static_combine, static_dispatch
from moe_ops.distributed.workspace import Workspace

Experts = Callable[..., torch.Tensor]
_OP = "ExpertParallelMoE"


class ExpertParallelMoE(nn.Module):
    """Routed experts spread over the ranks of a process group.

    `forward(hidden_states [T, H], topk_ids [T, K], topk_weights [T, K]) -> [T, H]` is a collective: every rank calls
    it, with any number of tokens, also none. The result is that of one process with all experts; the sum over a
    token's slots is in slot order whatever the ranks.

    - `experts(hidden_states [N, H], topk_ids [N, 1] int32, topk_weights [N, 1] float32) -> [N, H]`: this rank's
      experts, with local ids and weights of 1. Anything callable; it is given `out_dtype=combine_dtype` if it takes
      that.
    - `num_experts` over all ranks; experts in order, the first `num_experts % R` ranks own one more. With `replicas`
      these are physical experts, and `topk_ids` name logical ones.
    - `group`: a process group (gloo, NCCL, HCCL); None is a single process, with the same code and the same results.
    - `capacity`: rows that a pair of ranks exchanges at most. With it nothing is read on the host: the layer can be
      captured and compiled whole. Tokens that do not fit become NaN, and `check()` raises. None: exact sizes, read on
      the host.
    - `workspace`: shared by the layers of a model; None makes one for this layer.
    - `tp_group`: ranks that hold slices of the same experts (`slice_tensor_parallel`) and have the same tokens.
    - `combine_dtype`: how expert rows travel back; float32 keeps one rounding in all, the activations' dtype halves the
      traffic and rounds each row once more.
    """

    def __init__(
        self,
        experts: Experts,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        *,
        group: dist.ProcessGroup | None = None,
        mode: str = "push",
        tokens: str = "dynamic",
        max_local_tokens: int | None = None,
        capacity: int | None = None,
        workspace: Workspace | None = None,
        replicas: ReplicaTable | None = None,
        tp_group: dist.ProcessGroup | None = None,
        combine_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.experts = experts
        self.replicas = replicas
        if replicas is not None and replicas.num_physical != num_experts:
            expected = f"{replicas.num_physical}, the physical experts of replicas,"
            raise argument_error(_OP, "num_experts", expected, num_experts)
        if capacity is not None and capacity < 1:
            raise argument_error(_OP, "capacity", "None or at least 1", capacity)
        _check_hybrid(experts)
        self.spec = RouteSpec(num_experts, top_k, hidden_size, group, mode, tokens, max_local_tokens)
        self.capacity = capacity
        self.tp_group = tp_group
        self.combine_dtype = combine_dtype
        self.workspace = workspace
        self._own_workspace: Workspace | None = None
        self._out_dtype = _takes_out_dtype(experts)
        self._flags: tuple[torch.Tensor, torch.Tensor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertParallelMoE:
        """Experts are copied; process groups and a workspace given by the caller are shared."""
        state = {**self.__dict__, "_own_workspace": None, "_flags": None}
        for shared in (self.spec, self.tp_group, self.workspace):
            memo[id(shared)] = shared
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(state, memo))
        return copied

    def extra_repr(self) -> str:
        spec = self.spec
        return f"num_experts={spec.num_experts}, top_k={spec.top_k}, ep_rank={spec.ep_rank}, ep_size={spec.ep_size}"

    def forward(self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        recorded = torch.is_grad_enabled() and (hidden_states.requires_grad or topk_weights.requires_grad)
        if recorded and _is_hybrid(self.experts):
            raise RuntimeError(f"{_OP}: hybrid experts are forward only; use torch.inference_mode or detached inputs")
        if self.replicas is not None:
            topk_ids = self.replicas(topk_ids, self.spec.ep_rank)
        if self.tp_group is not None:
            hidden_states = collectives.share(hidden_states, self.tp_group)
            topk_weights = collectives.share(topk_weights, self.tp_group)
        run = self._dynamic if self.capacity is None else self._static
        output = run(hidden_states, topk_ids, topk_weights)
        if self.tp_group is not None:
            output = collectives.sum_parts(output, self.tp_group)
        return output.to(hidden_states.dtype)

    def check(self) -> None:
        """With `capacity`: raise if the last forward (or replay) lost rows on any rank. Reads the device."""
        if self.capacity is not None and self._flags is not None:
            check_flags(self.spec, self.capacity, *self._flags)

    # -- exact sizes -----------------------------------------------------------------------------------------------

    @torch.compiler.disable(reason="exact sizes are read on the host; give the layer a capacity to compile it whole")
    def _dynamic(self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        workspace = self._workspace(hidden_states.device)
        with workspace.lease(self):
            route = prepare_topk_route(
                hidden_states,
                topk_ids,
                topk_weights,
                self.spec,
                workspace=workspace,
                autograd_mask=self._autograd_mask(hidden_states, topk_weights),
                combine_dtype=self.combine_dtype,
                prepare_workspace=lambda plan_tokens, maximum: workspace.grow(
                    plan_tokens,
                    maximum,
                    top_k=self.spec.top_k,
                    hidden_size=self.spec.hidden_size,
                    dtype=hidden_states.dtype,
                    combine_dtype=self.combine_dtype,
                ),
            )
            received = dispatch(route, workspace, grouped=False)
            expert_rows = self._run_experts(received.hidden_states, received.expert_ids)
            returned = combine(route, received, expert_rows, workspace)
            return ops.topk_unpermute(returned, route.row_map, topk_weights)

    def _workspace(self, device: torch.device) -> Workspace:
        if self.workspace is not None:
            return self.workspace
        if self._own_workspace is None or self._own_workspace.device != device:  # the module may have been moved
            self._own_workspace = Workspace(device)
        return self._own_workspace

    def _autograd_mask(self, hidden_states: torch.Tensor, topk_weights: torch.Tensor) -> int:
        if not torch.is_grad_enabled():
            return 0
        return hidden_states.requires_grad | topk_weights.requires_grad << 1 | self._trained() << 2

    # -- fixed sizes -----------------------------------------------------------------------------------------------

    def _static(self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        assert self.capacity is not None
        route = prepare_static_route(
            hidden_states, topk_ids, self.spec, self.capacity, combine_dtype=self.combine_dtype
        )
        self._remember(route)
        expert_rows = self._run_experts(static_dispatch(route), route.expert_ids)
        return static_combine(route, expert_rows, topk_weights)

    def _remember(self, route: StaticRoute) -> None:
        # Not while compiling: a graph may not leave tensors behind. Use prepare_static_route to see the flags there.
        if not torch.compiler.is_compiling():
            self._flags = route.overflow, route.disagree

    # -- experts ---------------------------------------------------------------------------------------------------

    def _run_experts(self, rows: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(rows.shape[0], 1, dtype=torch.float32, device=rows.device)
        options = {"out_dtype": self.combine_dtype} if self._out_dtype else {}
        output = self.experts(rows, expert_ids[:, None], ones, **options)
        if isinstance(output, tuple):  # HybridExperts: the second is a ticket of deferred work, of which there is none
            output = output[0]
        require(output.shape == rows.shape, _OP, "experts", f"a function to {list(rows.shape)}", output)
        return self._attached(rows, output).to(self.combine_dtype)

    def _attached(self, rows: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """`output` with the autograd edges that it has on the other ranks: experts without a valid row may have dropped
        them, and the others' backward would wait for this rank's part of the exchange."""
        if output.requires_grad or not torch.is_grad_enabled():
            return output
        if rows.requires_grad:
            if rows.shape[0] and self.capacity is None:
                raise RuntimeError(f"{_OP}: experts must be differentiable where hidden_states requires a gradient")
            return torch.where(torch.zeros_like(output, dtype=torch.bool), rows.to(output.dtype), output)
        return output.detach().requires_grad_() if self._trained() else output

    def _trained(self) -> bool:
        parameters = self.experts.parameters() if isinstance(self.experts, nn.Module) else ()
        return any(parameter.requires_grad for parameter in parameters)


def _takes_out_dtype(experts: Experts) -> bool:
    function = experts.forward if isinstance(experts, nn.Module) else experts
    parameters = inspect.signature(function).parameters
    return "out_dtype" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _is_hybrid(experts: Experts) -> bool:
    """HybridExperts: a part of its experts runs on the CPU and passes no gradient."""
    return hasattr(experts, "cpu_experts")


def _check_hybrid(experts: Experts) -> None:
    deferred = getattr(experts, "max_deferred", 0)
    if deferred:
        # The rows of the next layer are other tokens.
        raise argument_error(_OP, "experts", "without deferred work (max_deferred=0)", str(deferred))
    if getattr(experts, "shared_experts", None) is not None:
        raise argument_error(_OP, "experts", "without shared_experts, which belong outside the exchange", "some")
