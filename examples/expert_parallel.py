"""Experts over two processes: each rank brings its own tokens, also none, and gets its own combined rows back."""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import moe_ops
from moe_ops.distributed import ExpertParallelMoE, ExpertShards, Workspace
from moe_ops.reference.mxfp4 import quantize_mxfp4

K, E, H, I, RANKS = 2, 7, 128, 64, 2  # noqa: E741


def experts_of(owned: range):  # type: ignore[no-untyped-def]
    """A callable for the experts in `owned`, cut out of the same checkpoint on every rank."""
    generator = torch.Generator().manual_seed(0)
    w13 = quantize_mxfp4(torch.randn(E, 2 * I, H, generator=generator) * 0.1)  # rows [gate; up]
    w2 = quantize_mxfp4(torch.randn(E, H, I, generator=generator) * 0.1)
    held = [tensor[owned.start : owned.stop].contiguous() for tensor in (*w13, *w2)]

    def experts(hidden_states, topk_ids, topk_weights, out_dtype):  # type: ignore[no-untyped-def]
        return moe_ops.fused_mxfp4_moe(
            hidden_states,
            topk_ids,
            topk_weights,
            *held,
            w13_layout="gate_up",
            batch_invariant=True,
            out_dtype=out_dtype,
        )

    return experts


def worker(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    owned = ExpertShards(E, RANKS).owned(rank)  # 7 experts over 2 ranks: 4 and 3
    workspace = Workspace()  # one for all layers of a model
    moe = ExpertParallelMoE(experts_of(owned), E, K, H, group=dist.group.WORLD, workspace=workspace)
    alone = ExpertParallelMoE(experts_of(range(E)), E, K, H)
    for tokens in (16 * rank, 5):
        hidden_states = torch.randn(tokens, H, dtype=torch.bfloat16, requires_grad=True)
        topk_weights, topk_ids = torch.rand(tokens, E).softmax(-1).topk(K)
        output = moe(hidden_states, topk_ids, topk_weights)
        output.float().square().sum().backward()  # the exchange runs backwards too
        assert hidden_states.grad is not None
        same = torch.equal(output, alone(hidden_states, topk_ids, topk_weights))
        print(f"rank {rank}: {tokens} tokens, experts {owned.start} to {owned.stop - 1}, as on one process: {same}")
        assert same
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(worker, (tempfile.mktemp(),), nprocs=RANKS)
