"""The same layer on CUDA over NCCL, world size 1: every collective runs, as does capture and symmetric memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import oracle
import pytest
import torch
import torch.distributed as dist

from moe_ops.distributed import ExpertParallelMoE, RouteSpec, Workspace, prepare_static_route, prepare_topk_route
from moe_ops.distributed.descriptors import FIELDS, compute, upload
from moe_ops.distributed.symmetric import unavailable
from moe_ops.reference.route_metadata import route_metadata as reference_metadata

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

E, K, H = 8, 2, 64


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    torch.cuda.set_device(0)
    store = tempfile.mktemp(prefix="moe_ops_nccl_")
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


class BatchedExperts(torch.nn.Module):
    """Dense experts without a host read: every expert on every row, then a choice. The sums are float64, so that their
    order, which may follow the number of rows, does not show in float32."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.register_buffer("w", torch.randn(E, H, H, generator=generator) / H**0.5)

    def forward(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        every = (rows.double()[None, :, None, :] * self.w[:, None]).sum(-1).float()  # [E, N, H]
        place = ids.clamp(0, E - 1).to(torch.int64)[None].expand(1, -1, H)
        return torch.where(ids >= 0, every.gather(0, place)[0] * weights, 0.0)


def batch(seed: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden_states = torch.randn(tokens, H, generator=generator).bfloat16()
    ids = torch.randint(-1, E, (tokens, K), generator=generator)
    weights = torch.rand(tokens, K, generator=generator)
    return hidden_states.cuda(), ids.cuda(), weights.cuda()


def expected(inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """On the CPU, by the formula."""
    hidden_states, ids, weights = (tensor.cpu() for tensor in inputs)
    rows = torch.einsum("eij,tj->tei", BatchedExperts().w.double(), hidden_states.double())
    chosen = rows.gather(1, ids.clamp(min=0)[..., None].expand(-1, -1, H))
    return (chosen * torch.where(ids >= 0, weights.double(), 0.0)[..., None]).sum(1)


def layer(group: dist.ProcessGroup | None, **options: object) -> ExpertParallelMoE:
    return ExpertParallelMoE(BatchedExperts(), E, K, H, group=group, **options).cuda()


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("capacity", [None, 64])
def test_forward_and_backward(group: dist.ProcessGroup, mode: str, capacity: int | None) -> None:
    over_nccl, alone = layer(group, mode=mode, capacity=capacity), layer(None)
    for tokens in (32, 0, 5):
        found = []
        for moe in (over_nccl, alone):
            hidden_states, ids, weights = batch(tokens, tokens)
            hidden_states.requires_grad_(), weights.requires_grad_()
            output = moe(hidden_states, ids, weights)
            output.backward(torch.ones_like(output))
            found.append((output.detach(), hidden_states.grad, weights.grad))
        for left, right in zip(*found, strict=True):
            assert torch.equal(left, right)
        reference = expected(batch(tokens, tokens))
        torch.testing.assert_close(found[0][0].cpu().double(), reference, rtol=2e-2, atol=2e-2)
        with torch.inference_mode():
            assert torch.equal(over_nccl(*batch(tokens, tokens)), found[0][0])


@pytest.mark.parametrize("num_experts", [4, 1024, 1025, 2048, 2049])
def test_host_and_device_descriptors_agree(group: dist.ProcessGroup, num_experts: int) -> None:
    counts = torch.randint(0, 5, (1, num_experts))
    table = torch.cat((torch.zeros(1, 3, dtype=torch.int64), counts), dim=1).int()
    spec = RouteSpec(num_experts, K, H, group)
    by_host, by_device = upload(compute(table, spec), torch.device("cuda")), compute(table.cuda(), spec)
    golden = oracle.metadata(counts.tolist(), 0, "push") if num_experts < 64 else {}
    for name in FIELDS:
        assert by_host[name].is_cuda and by_host[name].data_ptr() % 512 == 0
        assert torch.equal(by_host[name], by_device[name]) and by_host[name].dtype == by_device[name].dtype
        assert by_host[name].tolist() == golden.get(name, by_host[name].tolist())


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_device_metadata_of_many_ranks(mode: str) -> None:
    """The CUDA kernel against the reference, for shapes of groups that are not here."""
    for ep_size, num_experts in ((2, 4), (8, 30), (3, 256), (64, 512), (4, 2)):
        counts = torch.randint(0, 9, (ep_size, num_experts), dtype=torch.int32)
        for ep_rank in (0, ep_size - 1):
            found = torch.ops.moe_ops.route_metadata(counts.cuda(), ep_rank, mode=mode)
            for left, right in zip(found, reference_metadata(counts, ep_rank, mode=mode), strict=True):
                assert torch.equal(left.cpu(), right)


def test_cached_metadata_reaches_another_stream(group: dist.ProcessGroup) -> None:
    spec, workspace = RouteSpec(E, K, H, group), Workspace("cuda")
    inputs = batch(3, 16)
    routes = []
    with torch.inference_mode():
        for stream in (None, None, None, torch.cuda.Stream(), torch.cuda.Stream(), None):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream), workspace.lease("test"):
                routes.append(prepare_topk_route(*inputs, spec, workspace=workspace).metadata.dispatch_size.clone())
        torch.cuda.synchronize()
    assert workspace.route_cache.hits == 4
    assert all(torch.equal(route, routes[0]) for route in routes)


def test_fixed_capacity_is_captured(group: dist.ProcessGroup) -> None:
    """A graph of the whole layer, replayed with other ids, -1 and an overflow; nothing is read on the host."""
    moe, tokens = layer(group, capacity=20), 12
    static = [tensor.clone() for tensor in batch(0, tokens)]
    static[1].clamp_(min=-1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode(), torch.cuda.stream(side):
        for _ in range(2):
            moe(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        output = moe(*static)
    for seed in (1, 2):
        fresh = batch(seed, tokens)
        fresh[1][seed] = -1
        fresh[1][6::2] = -1
        for held, new in zip(static, fresh, strict=True):
            held.copy_(new)
        graph.replay()
        torch.testing.assert_close(output.cpu().double(), expected(fresh), rtol=2e-2, atol=2e-2)
        assert not output[seed].any()
        moe.check()
    static[1].fill_(3)  # 24 rows for 20 places
    graph.replay()
    assert output.isnan().any(1).sum() == 4 // K
    with pytest.raises(RuntimeError, match="capacity overflow: more than 20 rows"):
        moe.check()


def test_static_routes_read_nothing_on_the_host(group: dist.ProcessGroup) -> None:
    spec, inputs = RouteSpec(E, K, H, group), batch(5, 9)
    prepare_static_route(*inputs[:2], spec, 18)  # agrees on sizes, compiles kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        route = prepare_static_route(*inputs[:2], spec, 18)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert route.loads.tolist() == [int((inputs[1] >= 0).sum())]


def test_compiles_whole(group: dist.ProcessGroup) -> None:
    moe = layer(group, capacity=64)
    graph = torch.compile(moe, fullgraph=True)
    with torch.inference_mode():
        for seed in (0, 1):
            inputs = batch(seed, 16)
            torch.testing.assert_close(graph(*inputs), moe(*inputs), rtol=2e-2, atol=2e-2)


def test_pull_through_symmetric_memory(group: dist.ProcessGroup) -> None:
    reason = unavailable(torch.device("cuda"))
    if reason:
        pytest.skip(reason)
    workspace = Workspace("cuda", group=group, symmetric=True)
    moe, plain = layer(group, mode="pull", workspace=workspace), layer(group)
    with torch.inference_mode():
        for tokens in (16, 0, 200, 16):
            inputs = batch(tokens, tokens)
            assert torch.equal(moe(*inputs), plain(*inputs))
    assert workspace.generation == 2
