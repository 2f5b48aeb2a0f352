"""Expert parallelism over torch.distributed: prepare a route, exchange rows, or use the layer that does both."""

from moe_ops.distributed.exchange import ReceivedRows, combine, dispatch
from moe_ops.distributed.layer import ExpertParallelMoE
from moe_ops.distributed.placement import ExpertShards, ReplicaTable, local_experts
from moe_ops.distributed.route import prepare_topk_route
from moe_ops.distributed.spec import Route, RouteMetadata, RouteSpec
from moe_ops.distributed.static import (
    StaticRoute,
    pair_capacity,
    prepare_static_route,
    static_combine,
    static_dispatch,
)
from moe_ops.distributed.tensor_parallel import ExpertSlice, slice_tensor_parallel
from moe_ops.distributed.workspace import Workspace

__all__ = [
    "ExpertParallelMoE",
    "ExpertShards",
    "ExpertSlice",
    "ReceivedRows",
    "ReplicaTable",
    "Route",
    "RouteMetadata",
    "RouteSpec",
    "StaticRoute",
    "Workspace",
    "combine",
    "dispatch",
    "local_experts",
    "pair_capacity",
    "prepare_static_route",
    "prepare_topk_route",
    "slice_tensor_parallel",
    "static_combine",
    "static_dispatch",
]
