"""Expert tensors beside FSDP and DTensor, run on every rank of a gloo group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from layer_cases import HIDDEN, RowExperts, dense_weights
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from moe_ops import ops
from moe_ops.distributed import ExpertParallelMoE, local_experts
from moe_ops.reference.mxfp4 import quantize_mxfp4

TOP_K, WIDE = 2, 32


class FrozenExperts(nn.Module):
    """MXFP4 experts of one rank, held in buffers."""

    def __init__(self, num_experts: int, first: int, count: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        w13 = quantize_mxfp4(torch.randn(num_experts, 2 * WIDE, WIDE, generator=generator))
        w2 = quantize_mxfp4(torch.randn(num_experts, WIDE, WIDE, generator=generator))
        for name, tensor in zip(("w13", "w13_scale", "w2", "w2_scale"), (*w13, *w2), strict=True):
            self.register_buffer(name, tensor[first : first + count].clone())

    def forward(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, **options: Any) -> torch.Tensor:
        held = self.w13, self.w13_scale, self.w2, self.w2_scale
        return ops.fused_mxfp4_moe(rows, ids, weights, *held, w13_layout="gate_up", **options)


class Block(nn.Module):
    def __init__(self, hidden: int, num_experts: int, moe: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(hidden, num_experts)
        self.moe = moe

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(hidden_states).softmax(-1).topk(TOP_K)
        return self.moe(hidden_states, ids, weights)


def inputs_of(rank: int, hidden: int) -> torch.Tensor:
    return torch.randn(3 + rank, hidden, generator=torch.Generator().manual_seed(rank))


def frozen_experts_under_fsdp() -> None:
    """Buffers stay this rank's own; output and the router's gradient are those of one process."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    num_experts = 2 * ranks
    every = ExpertParallelMoE(FrozenExperts(num_experts, 0, num_experts), num_experts, TOP_K, WIDE)
    whole = Block(WIDE, num_experts, every)
    experts = FrozenExperts(num_experts, 2 * rank, 2)
    held = experts.w13.data_ptr()
    block = Block(WIDE, num_experts, ExpertParallelMoE(experts, num_experts, TOP_K, WIDE, group=dist.group.WORLD))
    fully_shard(block, mesh=init_device_mesh("cpu", (ranks,)))
    assert isinstance(block.router.weight, DTensor) and type(experts.w13) is torch.Tensor
    output = block(inputs_of(rank, WIDE))
    torch.testing.assert_close(output, whole(inputs_of(rank, WIDE)), rtol=1e-4, atol=1e-4)
    output.square().sum().backward()
    for other in range(ranks):
        whole(inputs_of(other, WIDE)).square().sum().backward()
    expected = whole.router.weight.grad / ranks  # FSDP averages
    torch.testing.assert_close(block.router.weight.grad.full_tensor(), expected, rtol=1e-3, atol=1e-3)
    assert experts.w13.data_ptr() == held


def trained_experts_under_fsdp() -> None:
    """Trained experts must be ignored_params: they stay whole, and their gradient is the sum over all ranks' tokens."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    w13, w2 = dense_weights(2 * ranks)
    own = slice(2 * rank, 2 * rank + 2)
    experts = RowExperts(w13[own], w2[own])
    block = Block(HIDDEN, 2 * ranks, ExpertParallelMoE(experts, 2 * ranks, TOP_K, HIDDEN, group=dist.group.WORLD))
    fully_shard(block, mesh=init_device_mesh("cpu", (ranks,)), ignored_params=set(experts.parameters()))
    block(inputs_of(rank, HIDDEN)).square().sum().backward()
    whole = Block(HIDDEN, 2 * ranks, ExpertParallelMoE(RowExperts(w13, w2), 2 * ranks, TOP_K, HIDDEN))
    for other in range(ranks):
        whole(inputs_of(other, HIDDEN)).square().sum().backward()
    torch.testing.assert_close(experts.w13.grad, whole.moe.experts.w13.grad[own], rtol=1e-4, atol=1e-4)


def experts_from_dtensors() -> list[str]:
    """The local part without a copy; errors for another placement, for uneven experts, and from the op itself."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    whole = torch.arange(2 * ranks * 3, dtype=torch.uint8).reshape(2 * ranks, 3)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    local = local_experts(sharded)
    assert type(local) is torch.Tensor and torch.equal(local, whole[2 * rank : 2 * rank + 2])
    assert local.data_ptr() == sharded.to_local().data_ptr()
    assert local_experts(whole) is whole
    errors = []
    for tensor in (distribute_tensor(whole, mesh, [Replicate()]), distribute_tensor(whole[1:], mesh, [Shard(0)])):
        try:
            local_experts(tensor)
        except ValueError as error:
            errors.append(str(error))
    frozen = FrozenExperts(2 * ranks, 0, 2 * ranks)
    frozen.w13 = distribute_tensor(frozen.w13, mesh, [Shard(0)])
    try:
        frozen(torch.zeros(1, WIDE), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
    except Exception as error:
        errors.append(type(error).__name__ + str(error))
    return errors
