"""What the processes of the layer tests run, on every rank of a gloo group."""

from __future__ import annotations

import copy
import itertools
import os
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from moe_ops import ops
from moe_ops.distributed import ExpertParallelMoE, ExpertShards, ReplicaTable, Workspace, slice_tensor_parallel
from moe_ops.distributed import workspace as workspace_module
from moe_ops.reference.fused_mxfp4_moe import moe_float32
from moe_ops.reference.mxfp4 import quantize_mxfp4

HIDDEN, INTERMEDIATE = 8, 6


class RowExperts(nn.Module):
    """Dense experts, row by row: the same bits whatever the batch. An empty batch loses its autograd edge here."""

    def __init__(self, w13: torch.Tensor, w2: torch.Tensor) -> None:
        super().__init__()
        self.w13, self.w2 = nn.Parameter(w13.clone()), nn.Parameter(w2.clone())

    def forward(
        self, rows: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, *, out_dtype: torch.dtype
    ) -> torch.Tensor:
        outputs = []
        for row, expert, weight in zip(rows, topk_ids[:, 0].tolist(), topk_weights[:, 0], strict=True):
            if expert < 0:
                outputs.append(torch.zeros(rows.shape[1], dtype=out_dtype))
                continue
            gate, up = (self.w13[expert] @ row.float()).chunk(2)
            outputs.append((self.w2[expert] @ (torch.nn.functional.silu(gate) * up) * weight).to(out_dtype))
        return torch.stack(outputs) if outputs else torch.zeros(0, rows.shape[1], dtype=out_dtype)


def dense_weights(num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    w13 = torch.randn(num_experts, 2 * INTERMEDIATE, HIDDEN, generator=generator)
    return w13, torch.randn(num_experts, HIDDEN, INTERMEDIATE, generator=generator)


def batch(
    seed: int, tokens: int, num_experts: int, top_k: int, dtype: torch.dtype, hidden: int = HIDDEN
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden_states, ids with -1 and duplicates, weights (some exactly 0), gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, num_experts, (tokens, top_k), generator=generator)
    weights = torch.rand(tokens, top_k, generator=generator)
    weights[torch.rand(tokens, top_k, generator=generator) < 0.1] = 0
    hidden_states = torch.randn(tokens, hidden, generator=generator).to(dtype)
    return hidden_states, ids, weights, torch.randn(tokens, hidden, generator=generator).to(dtype)


def run(
    layer: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output and the gradients to hidden_states and topk_weights."""
    hidden_states, ids, weights, grad = inputs
    hidden_states, weights = hidden_states.clone().requires_grad_(), weights.clone().requires_grad_()
    output = layer(hidden_states, ids, weights)
    output.backward(grad)
    assert hidden_states.grad is not None and weights.grad is not None
    return output.detach(), hidden_states.grad, weights.grad


def equals_single_process(
    seed: int, tokens: list[int], num_experts: int, top_k: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Forward and backward, bit for bit; the experts' own gradients within tolerance (their sums are over rows)."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    options = dict(options)
    replicated = options.pop("replicas", False)
    w13, w2 = dense_weights(num_experts)
    replicas, physical = None, list(range(num_experts))
    if replicated:
        physical += [(3 * copy) % num_experts for copy in range(ranks + 1)]
        replicas = ReplicaTable(physical, num_experts)
    mine = list(ExpertShards(len(physical), ranks).owned(rank))
    held = [physical[expert] for expert in mine]
    layer = ExpertParallelMoE(
        RowExperts(w13[held], w2[held]),
        len(physical),
        top_k,
        HIDDEN,
        group=dist.group.WORLD,
        replicas=replicas,
        **options,
    )
    single = ExpertParallelMoE(
        RowExperts(w13, w2), num_experts, top_k, HIDDEN, combine_dtype=options.get("combine_dtype", torch.float32)
    )
    batches = [batch(seed + 1000 * r, tokens[r], num_experts, top_k, dtype) for r in range(ranks)]
    found, expected = run(layer, batches[rank]), run(single, batches[rank])
    for name, left, right in zip(("output", "grad_hidden_states", "grad_topk_weights"), found, expected, strict=True):
        assert left.dtype == right.dtype
        assert torch.equal(left, right), (name, (left.float() - right.float()).abs().max())
    check_expert_gradients(layer, batches, held, num_experts, top_k, (w13, w2), options.get("combine_dtype"))
    with torch.no_grad():
        inferred = layer(*batches[rank][:3])
    assert torch.equal(inferred, found[0])
    coarse = dtype != torch.float32 or options.get("combine_dtype") == torch.bfloat16
    assert_close_to_oracle(found[0], batches[rank], w13, w2, coarse)


def assert_close_to_oracle(
    output: torch.Tensor, inputs: tuple[torch.Tensor, ...], w13: torch.Tensor, w2: torch.Tensor, coarse: bool
) -> None:
    """A loop over tokens and slots in float64."""
    hidden_states, ids, weights, _ = inputs
    expected = torch.zeros(hidden_states.shape, dtype=torch.float64)
    for t, k in itertools.product(range(ids.shape[0]), range(ids.shape[1])):
        if ids[t, k] >= 0:
            gate, up = (w13[ids[t, k]].double() @ hidden_states[t].double()).chunk(2)
            expected[t] += weights[t, k] * (w2[ids[t, k]].double() @ (torch.nn.functional.silu(gate) * up))
    # Rows of magnitude 10 rounded to bfloat16 (2^-9) before the sum of up to 4 of them: 0.08.
    limit = 8e-2 if coarse else 1e-4
    torch.testing.assert_close(output.double(), expected, rtol=limit / 8, atol=limit)


def check_expert_gradients(
    layer: ExpertParallelMoE,
    batches: list[tuple[torch.Tensor, ...]],
    held: list[int],
    num_experts: int,
    top_k: int,
    weights: tuple[torch.Tensor, torch.Tensor],
    combine_dtype: torch.dtype | None,
) -> None:
    """An expert's gradient is that over the tokens of all ranks; copies of one expert share it."""
    single = ExpertParallelMoE(
        RowExperts(*weights), num_experts, top_k, HIDDEN, combine_dtype=combine_dtype or torch.float32
    )
    run(single, tuple(torch.cat(parts) for parts in zip(*batches, strict=True)))
    total = torch.zeros_like(weights[0])
    for place, expert in enumerate(held):
        if layer.experts.w13.grad is not None:
            total[expert] += layer.experts.w13.grad[place]
    dist.all_reduce(total)
    expected = torch.zeros_like(total) if single.experts.w13.grad is None else single.experts.w13.grad
    torch.testing.assert_close(total, expected, rtol=2e-2, atol=2e-2)


def shared_workspace() -> None:
    """Two layers, one workspace, inference: outputs stay what they were, and the same input gives the same bits."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    workspace = Workspace()
    w13, w2 = dense_weights(2 * ranks)
    mine = slice(2 * rank, 2 * rank + 2)
    layers = [
        ExpertParallelMoE(
            RowExperts(scale * w13[mine], w2[mine]), 2 * ranks, 2, HIDDEN,
            group=dist.group.WORLD, workspace=workspace, mode=mode,
        )
        for scale, mode in ((1.0, "push"), (2.0, "pull"))
    ]  # fmt: skip
    inputs = batch(rank, 5 + rank, 2 * ranks, 2, torch.bfloat16)[:3]
    with torch.inference_mode():
        first = layers[0](*inputs)
        kept = first.clone()
        second = layers[1](*inputs)
        for _ in range(3):
            assert torch.equal(layers[0](*inputs), kept)
        assert torch.equal(first, kept) and not torch.equal(second, kept)
        assert torch.equal(layers[1](*inputs), second)
    with torch.no_grad():  # buffers and cached routes of inference mode serve outside of it
        assert torch.equal(layers[0](*inputs), kept) and torch.equal(layers[1](*inputs), second)
    for layer, expected in zip(layers, (kept, second), strict=True):
        assert torch.equal(run(layer, (*inputs, torch.ones_like(kept)))[0], expected)
    assert workspace.generation >= 1 and not workspace.claimed


def copies_share_the_group() -> None:
    """A deep copy has experts of its own, and the process groups and the workspace of the original."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    w13, w2 = dense_weights(ranks)
    for capacity, workspace in ((None, Workspace()), (None, None), (16, None)):
        experts = RowExperts(w13[rank : rank + 1], w2[rank : rank + 1])
        options = {"group": dist.group.WORLD, "capacity": capacity, "workspace": workspace}
        layer = ExpertParallelMoE(experts, ranks, 2, HIDDEN, **options)
        inputs = batch(rank, 4, ranks, 2, torch.float32)[:3]
        with torch.no_grad():
            expected = layer(*inputs)
            twin = copy.deepcopy(layer)
            assert torch.equal(twin(*inputs), expected) and expected.any()
            assert twin.spec.group is layer.spec.group and twin.workspace is workspace
            for parameter in twin.parameters():
                parameter.zero_()
            assert not twin(*inputs).any() and torch.equal(layer(*inputs), expected)


def only_the_experts_are_trained(capacity: int | None) -> None:
    """Inputs without gradients, and all rows for rank 0: the others' experts see nothing, and no backward waits."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    w13, w2 = dense_weights(ranks)
    experts = RowExperts(w13[rank : rank + 1], w2[rank : rank + 1])
    layer = ExpertParallelMoE(experts, ranks, 1, HIDDEN, group=dist.group.WORLD, capacity=capacity)
    hidden_states = batch(rank, 3, ranks, 1, torch.float32)[0]
    layer(hidden_states, torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)).sum().backward()
    assert (experts.w13.grad is not None) == (rank == 0)


def tensor_parallel(combine_dtype: torch.dtype) -> None:
    """EP times TP: slices of MXFP4 experts on pairs of ranks add up, forward and backward."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ep_size, tp_rank, ep_rank = ranks // 2, rank % 2, rank // 2
    tp_groups = [dist.new_group([2 * pair, 2 * pair + 1]) for pair in range(ep_size)]
    ep_groups = [dist.new_group(list(range(part, ranks, 2))) for part in range(2)]
    hidden, intermediate, num_experts = 64, 96, 3
    generator = torch.Generator().manual_seed(9)
    w13, w13_scale = quantize_mxfp4(torch.randn(num_experts, 2 * intermediate, hidden, generator=generator) * 0.3)
    w2, w2_scale = quantize_mxfp4(torch.randn(num_experts, hidden, intermediate, generator=generator) * 0.3)
    w2_bias = torch.randn(num_experts, hidden, generator=generator)
    mine = ExpertShards(num_experts, ep_size).owned(ep_rank)
    own = slice(mine.start, mine.stop)
    differentiable: dict[str, Any] = {"select_zero_weights": False}
    part = slice_tensor_parallel(
        w13[own], w13_scale[own], w2[own], w2_scale[own],
        w13_layout="gate_up", tp_rank=tp_rank, tp_size=2, w2_bias=w2_bias[own],
    )  # fmt: skip

    def experts(rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return moe_float32(rows, ids, weights, *part[:4], w13_layout="gate_up", w2_bias=part.w2_bias, **differentiable)

    def whole(rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tensors = (w13, w13_scale, w2, w2_scale)
        return moe_float32(rows, ids, weights, *tensors, w13_layout="gate_up", w2_bias=w2_bias, **differentiable)

    layer = ExpertParallelMoE(
        experts,
        num_experts,
        2,
        hidden,
        group=ep_groups[tp_rank],
        tp_group=tp_groups[ep_rank],
        combine_dtype=combine_dtype,
    )
    inputs = batch(ep_rank, 6, num_experts, 2, torch.float32, hidden)
    for found, expected in zip(run(layer, inputs), run(whole, inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# -- fixed capacity ------------------------------------------------------------------------------------------------


def static_equals_dynamic(seed: int, tokens: int, num_experts: int, top_k: int) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    w13, w2 = dense_weights(num_experts)
    mine = ExpertShards(num_experts, ranks).owned(rank)
    experts = RowExperts(w13[mine.start : mine.stop], w2[mine.start : mine.stop])
    make = lambda capacity: ExpertParallelMoE(  # noqa: E731
        experts, num_experts, top_k, HIDDEN, group=dist.group.WORLD, capacity=capacity
    )
    inputs = batch(seed + rank, tokens, num_experts, top_k, torch.bfloat16)
    static = make(max(1, tokens * top_k))
    for left, right in zip(run(static, inputs), run(make(None), inputs), strict=True):
        assert torch.equal(left, right)
    static.check()


def overflow() -> list[Any]:
    """Rank 1 has 3 rows for rank 0 where 2 fit: one token is NaN, the others are right; check raises everywhere."""
    rank = dist.get_rank()
    w13, w2 = dense_weights(4)
    experts = RowExperts(w13[2 * rank : 2 * rank + 2], w2[2 * rank : 2 * rank + 2])
    layer = ExpertParallelMoE(experts, 4, 1, HIDDEN, group=dist.group.WORLD, capacity=2)
    ids = torch.tensor([[[0], [3], [2], [-1]], [[1], [0], [0], [2]]][rank])
    hidden_states = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(rank))
    with torch.no_grad():
        output = layer(hidden_states, ids, torch.ones(4, 1))
        full = ExpertParallelMoE(RowExperts(w13, w2), 4, 1, HIDDEN)(hidden_states, ids, torch.ones(4, 1))
    lost = output.isnan().all(1)
    assert torch.equal(output[~lost], full[~lost]) and not output[~lost].isnan().any()
    try:
        layer.check()
    except RuntimeError as error:
        return [lost.tolist(), str(error)]
    return [lost.tolist(), ""]


def compiled(backend: str, train: bool) -> None:
    """fullgraph, one graph for two batches; equal to eager bit for bit, collectives and all."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    w13, w2 = dense_weights(ranks)

    def experts(rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate, up = (rows.float() @ w13[rank].t()).chunk(2, dim=-1)
        output = (torch.nn.functional.silu(gate) * up) @ w2[rank].t()
        return torch.where(ids == 0, output * weights, 0.0)

    layer = ExpertParallelMoE(experts, ranks, 2, HIDDEN, group=dist.group.WORLD, capacity=8)
    graph = torch.compile(layer, fullgraph=True, backend=backend)
    for seed in (rank, 100 + rank):
        inputs = batch(seed, 4, ranks, 2, torch.float32)
        if train:
            for left, right in zip(run(graph, inputs), run(layer, inputs), strict=True):
                torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)
        else:
            with torch.no_grad():
                torch.testing.assert_close(graph(*inputs[:3]), layer(*inputs[:3]), rtol=1e-5, atol=1e-5)


def compiled_around() -> str:
    """Exact sizes in a compiled model: a graph break around the layer, the same bits; fullgraph says what to do."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    w13, w2 = dense_weights(ranks)
    experts = RowExperts(w13[rank : rank + 1], w2[rank : rank + 1])
    layer = ExpertParallelMoE(experts, ranks, 2, HIDDEN, group=dist.group.WORLD)

    def model(hidden_states: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return layer(hidden_states * 2, ids, weights) + 1

    for tokens in (3, rank):
        inputs = batch(rank, tokens, ranks, 2, torch.float32)
        for left, right in zip(run(torch.compile(model, backend="aot_eager"), inputs), run(model, inputs), strict=True):
            assert torch.equal(left, right)
    try:
        torch.compile(model, backend="aot_eager", fullgraph=True)(*inputs[:3])
    except Exception as error:
        return str(error)
    return ""


# -- pull through shared memory ------------------------------------------------------------------------------------


class FileBuffers:
    """`PeerBuffers` for processes of one host without CUDA: a shared file per rank. Exercises the same pull path."""

    def __init__(self, nbytes: int, device: torch.device, group: dist.ProcessGroup) -> None:
        names: list[Any] = [None] * group.size()
        handle, name = tempfile.mkstemp(prefix="moe_ops_peer_")
        os.truncate(handle, nbytes)
        os.close(handle)
        dist.all_gather_object(names, name, group=group)
        self._group, self._name = group, name
        self._buffers = [torch.from_file(n, shared=True, size=nbytes, dtype=torch.uint8) for n in names]
        self.local = self._buffers[group.rank()]
        dist.barrier(group)
        os.unlink(name)

    def peer(self, rank: int) -> torch.Tensor:
        return self._buffers[rank]

    def barrier(self) -> None:
        dist.barrier(self._group)


def pulls_from_peers(tokens: list[list[int]], dtype: torch.dtype) -> None:
    """The pull path of symmetric memory gives the rows and results of the all-to-all, also while it grows."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    num_experts = 2 * ranks + 1
    w13, w2 = dense_weights(num_experts)
    mine = ExpertShards(num_experts, ranks).owned(rank)
    experts = RowExperts(w13[mine.start : mine.stop], w2[mine.start : mine.stop])
    with mock.patch.object(workspace_module, "open_peer_buffers", FileBuffers):
        workspace = Workspace(group=dist.group.WORLD, symmetric=True)
        make = lambda **options: ExpertParallelMoE(  # noqa: E731
            experts, num_experts, 3, HIDDEN, group=dist.group.WORLD, **options
        )
        pull, plain = make(mode="pull", workspace=workspace), make()
        with torch.no_grad(), mock.patch.object(workspace, "barrier", wraps=workspace.barrier) as barrier:
            for call, counts in enumerate(tokens):
                inputs = batch(10 * call + rank, counts[rank], num_experts, 3, dtype)[:3]
                assert torch.equal(pull(*inputs), plain(*inputs))
                assert barrier.call_count == 2 * (call + 1)
        trained = batch(77 + rank, 3, num_experts, 3, dtype)
        for left, right in zip(run(pull, trained), run(plain, trained), strict=True):
            assert torch.equal(left, right)


# -- fused MXFP4 experts -------------------------------------------------------------------------------------------


def fused_equals_single_process(seed: int, tokens: list[int], dtype: torch.dtype, batch_invariant: bool) -> None:
    """MXFP4 experts over ranks, against the layer on one process and against one call of the op with all experts: bits
    where batch_invariant asks for them, else within tolerance."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    num_experts, top_k, hidden, intermediate = ranks + 1, 4, 64, 96
    generator = torch.Generator().manual_seed(11)
    w13 = quantize_mxfp4(torch.randn(num_experts, 2 * intermediate, hidden, generator=generator) * 0.3)
    w2 = quantize_mxfp4(torch.randn(num_experts, hidden, intermediate, generator=generator) * 0.3)
    mine = ExpertShards(num_experts, ranks).owned(rank)

    def experts(owned: range) -> Callable[..., torch.Tensor]:
        held = tuple(tensor[owned.start : owned.stop] for tensor in (*w13, *w2))

        def call(rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, **more: Any) -> torch.Tensor:
            options = {"w13_layout": "up_gate", "swiglu_limit": 7.0, "batch_invariant": batch_invariant}
            return ops.fused_mxfp4_moe(rows, ids, weights, *held, **options, **more)

        return call

    hidden_states, ids, weights, grad = batch(seed + rank, tokens[rank], num_experts, top_k, dtype, hidden)
    # One call of the op sums a token's slots in the order of experts: the order of slots where those ascend.
    inputs = hidden_states, ids.sort(1).values, weights, grad
    every = experts(range(num_experts))
    references = run(ExpertParallelMoE(every, num_experts, top_k, hidden), inputs), run(every, inputs)
    for capacity in (None, 5 * top_k):
        layer = ExpertParallelMoE(
            experts(mine), num_experts, top_k, hidden, group=dist.group.WORLD, capacity=capacity
        )  # fmt: skip
        found = run(layer, inputs)
        with torch.inference_mode():
            inferred = layer(*inputs[:3]).clone()
        for expected in references:
            if batch_invariant:
                assert torch.equal(found[0], expected[0]), (found[0].float() - expected[0].float()).abs().max()
                assert torch.equal(inferred, expected[0])
            for left, right in zip((*found, inferred), (*expected, expected[0]), strict=True):
                # Rounding of the activations' dtype, relative to the largest value of the tensor.
                limit = (1e-5 if dtype == torch.float32 else 2e-2) * max([1.0, *right.abs().reshape(-1).tolist()])
                torch.testing.assert_close(left, right, rtol=0, atol=limit)
