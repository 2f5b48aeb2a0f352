"""Captured graphs, host synchronisation, repeated runs and recompilation, for every op of the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from moe_ops import reference
from tests.support import assert_close, assert_same, make_experts, make_routing, make_rows

pytestmark = pytest.mark.gpu
E, K, H, INTER = 16, 4, 256, 128
CUDA = torch.device("cuda")


class Case:
    """A call whose inputs live in fixed tensors that `refill` overwrites."""

    def __init__(self, tokens: int = 37, dtype: torch.dtype = torch.bfloat16) -> None:
        self.tokens, self.dtype = tokens, dtype
        self.x = torch.empty(tokens, H, dtype=dtype, device=CUDA)
        self.grad = torch.empty(tokens, H, dtype=dtype, device=CUDA)
        self.ids = torch.empty(tokens, K, dtype=torch.int64, device=CUDA)
        self.weights = torch.empty(tokens, K, device=CUDA)
        self.counts = torch.empty(4, E, dtype=torch.int32, device=CUDA)
        self.experts = {name: value.to(CUDA) for name, value in make_experts(E, INTER, H).items()}
        self.refill(0)

    def refill(self, seed: int) -> None:
        ids, weights = make_routing(self.tokens, K, E, seed, invalid=0.3 if seed % 2 else 0.0)
        if seed == 3:
            ids.fill_(-1)
        self.x.copy_(make_rows(self.tokens, H, self.dtype, seed))
        self.grad.copy_(make_rows(self.tokens, H, self.dtype, seed + 50))
        self.ids.copy_(ids)
        self.weights.copy_(weights)
        self.counts.copy_(torch.randint(0, 99, (4, E), generator=torch.Generator().manual_seed(seed)))

    def row_map(self) -> torch.Tensor:
        return torch.ops.moe_ops.topk_permute(self.x, self.ids, E)[1]


def moe(case: Case, name: str = "fused_mxfp4_moe", **options):
    op = getattr(torch.ops.moe_ops, name)
    first = (case.grad,) if name.endswith("backward") else ()
    return op(*first, case.x, case.ids, case.weights, *case.experts.values(), w13_layout="gate_up", **options)


def unpermute(case: Case, name: str):
    permuted, row_map, _ = torch.ops.moe_ops.topk_permute(case.x, case.ids, E)
    op = getattr(torch.ops.moe_ops, name)
    return op(*((case.grad,) if name.endswith("backward") else ()), permuted, row_map, case.weights)


CALLS: dict[str, Callable[[Case], object]] = {
    "topk_permute": lambda c: torch.ops.moe_ops.topk_permute(c.x, c.ids, E),
    "topk_permute_capacity": lambda c: torch.ops.moe_ops.topk_permute(c.x, c.ids, E, num_out_tokens=50),
    "topk_unpermute": lambda c: unpermute(c, "topk_unpermute"),
    "topk_unpermute_backward": lambda c: unpermute(c, "topk_unpermute_backward"),
    "route_metadata_push": lambda c: torch.ops.moe_ops.route_metadata(c.counts, 1, mode="push"),
    "route_metadata_pull": lambda c: torch.ops.moe_ops.route_metadata(c.counts, 1, mode="pull"),
    "ep_remap": lambda c: torch.ops.moe_ops.ep_remap(c.ids, c.weights, expert_offset=4, num_local_experts=4),
    "fused_mxfp4_moe": moe,
    "fused_mxfp4_moe_invariant": lambda c: moe(c, batch_invariant=True),
    "fused_mxfp4_moe_backward": lambda c: moe(c, "fused_mxfp4_moe_backward"),
}


def leaves(result: object) -> list[torch.Tensor]:
    return [value for value in torch.utils._pytree.tree_leaves(result) if isinstance(value, torch.Tensor)]


@pytest.fixture(params=list(CALLS))
def call(request: pytest.FixtureRequest) -> Callable[[Case], object]:
    return CALLS[request.param]


@pytest.mark.unpoisoned  # the fills of poisoned memory are not part of the library
@pytest.mark.parametrize("tokens", [1, 37, 2500])  # 2,500 * 4 slots take the form of the map with several blocks
def test_replay_sees_new_inputs(call, tokens):
    case = Case(tokens)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(case)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = leaves(call(case))
    for seed in (1, 2, 3, 4):
        case.refill(seed)
        graph.replay()
        replayed = [value.clone() for value in captured]
        for actual, expected in zip(replayed, leaves(call(case)), strict=True):
            assert_same(actual, expected.cpu())
        graph.replay()
        for actual, again in zip(replayed, captured, strict=True):
            assert_same(again, actual.cpu())


@pytest.mark.unpoisoned
def test_no_host_synchronisation(call):
    case = Case(2500)
    call(case)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(case)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_same_bits_in_every_run(call):
    case = Case(300)
    case.refill(1)
    first = leaves(call(case))
    different = torch.zeros((), dtype=torch.int64, device=CUDA)
    for _ in range(100):
        for value, expected in zip(leaves(call(case)), first, strict=True):
            different += (value.contiguous().view(torch.uint8) != expected.contiguous().view(torch.uint8)).sum()
    assert int(different) == 0


def test_new_sizes_and_strides_compile_nothing(call):
    knobs = pytest.importorskip("triton").knobs
    for tokens in (1, 8, 40, 400):
        call(Case(tokens))
    compiled: list[str] = []
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda **info: compiled.append(info["repr"])
    try:
        for tokens in (2, 3, 5, 16, 17, 33, 129, 401, 1000):
            case = Case(tokens)
            case.ids = case.ids.t().contiguous().t()
            case.weights = torch.cat([case.weights, case.weights], dim=1)[:, :K]
            case.x = torch.cat([case.x, case.x], dim=1)[:, :H]
            case.ids = torch.cat([case.ids[:1], case.ids])[1:]  # an address that no vector load takes
            call(case)
    finally:
        knobs.runtime.jit_post_compile_hook = before
    assert compiled == []


def test_first_use_inside_a_capture_is_refused():
    """top_k 11 is used nowhere else, so its kernel has not been compiled."""
    rows = make_rows(22, 64, torch.float16).to(CUDA)
    row_map = torch.arange(22, dtype=torch.int32, device=CUDA).view(2, 11)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="first time inside a graph capture"), torch.cuda.graph(graph):
        torch.ops.moe_ops.topk_unpermute(rows, row_map)
    torch.cuda.synchronize()
    assert_same(torch.ops.moe_ops.topk_unpermute(rows, row_map), reference.topk_unpermute(rows.cpu(), row_map.cpu()))


@pytest.mark.unpoisoned
def test_out_forms_keep_their_addresses_in_replay():
    case = Case(40)
    rows = torch.empty(40 * K + 3, H, dtype=torch.bfloat16, device=CUDA)
    result = torch.empty(40, H, dtype=torch.float32, device=CUDA)

    def run():
        maps = torch.ops.moe_ops.topk_permute_out(case.x, case.ids, E, out=rows)
        moe(case, "fused_mxfp4_moe_out", out=result)
        return maps

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        row_map, _ = run()
    for seed in (1, 2):
        case.refill(seed)
        rows.fill_(float("nan"))
        result.fill_(float("nan"))
        graph.replay()
        expected = reference.topk_permute(case.x.cpu(), case.ids.cpu(), E, num_out_tokens=rows.shape[0])
        assert_same(rows, expected[0])
        assert_same(row_map, expected[1])
        assert_same(result, moe(case, out_dtype=torch.float32).cpu())


def test_streams_of_several_threads_do_not_share_state():
    cases = [Case(200 + 10 * i) for i in range(3)]
    for i, case in enumerate(cases):
        case.refill(i + 4)
    torch.cuda.synchronize()
    expected = [moe(case).clone() for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    results: list[list[torch.Tensor]] = [[] for _ in cases]
    for _ in range(20):
        for case, stream, into in zip(cases, streams, results, strict=True):
            with torch.cuda.stream(stream):
                into.append(moe(case))
    torch.cuda.synchronize()
    for wanted, values in zip(expected, results, strict=True):
        for value in values:
            assert_same(value, wanted.cpu())


@pytest.mark.unpoisoned
def test_a_graph_replayed_a_thousand_times():
    case = Case(8)

    def run():
        return moe(case) + unpermute(case, "topk_unpermute")

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    graph.replay()
    first = out.clone()
    for _ in range(1000):
        graph.replay()
    assert_same(out, first.cpu())
    allocated = torch.cuda.memory_allocated()
    for _ in range(1000):
        moe(case)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= allocated


def test_float16_keeps_its_bits():
    """Weights of 2^-20 to 2^20 and float16 activations: neither fits the other's format."""
    x = make_rows(20, H, torch.float16)
    ids, weights = make_routing(20, K, E)
    experts = make_experts(E, INTER, H)
    experts["w13_scale"] = (experts["w13_scale"].to(torch.int32) - 30).to(torch.uint8)
    experts["w2_scale"] = (experts["w2_scale"].to(torch.int32) + 40).to(torch.uint8)
    actual = torch.ops.moe_ops.fused_mxfp4_moe(
        x.to(CUDA), ids.to(CUDA), weights.to(CUDA), *(value.to(CUDA) for value in experts.values()),
        w13_layout="gate_up", out_dtype=torch.float32,
    )  # fmt: skip
    expected = reference.fused_mxfp4_moe(
        x, ids, weights, *experts.values(), w13_layout="gate_up", out_dtype=torch.float32
    )
    assert_close(actual, expected, max_tol=4e-3, rms_tol=7e-4)
