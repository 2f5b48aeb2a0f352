"""submit and sync on CUDA streams: eager, captured, compiled.

Every result is compared bit by bit with the same engine on CPU tensors.
"""

from __future__ import annotations

import gc
import threading

import psutil
import pytest
import torch

import moe_ops
from tests.engine.support import E, H, K, add_layer, make_batch, new_engine
from tests.support import assert_same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.unpoisoned,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ops = torch.ops.moe_ops
L = 4


@pytest.fixture(scope="module")
def engine():
    with new_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def layers(engine):
    return torch.nn.ModuleList([add_layer(engine, f"layer{i}", seed=i).cuda() for i in range(L)])


def cpu_handle(layer) -> torch.Tensor:
    return torch.tensor([layer.shared.handle])


def run(layers, x, ids, weights, *, max_deferred=0, on_cpu=False):
    """A small model: the device part of a layer is tanh, exact to the bit on both devices is only what we feed it."""
    deferred = torch.zeros(1, dtype=torch.int64, device=x.device)
    outs = []
    for i, layer in enumerate(layers):
        handle = cpu_handle(layer) if on_cpu else layer.handle
        last = i == len(layers) - 1
        ticket, later = ops.cpu_moe_submit(x, ids, weights, handle, max_deferred=0 if last else max_deferred)
        x = ops.cpu_moe_sync(ticket, x * 0.5, deferred_ticket=deferred)
        deferred = later
        outs.append(x)
    return torch.stack(outs)


def batch_of(seed: int, tokens: int = 5, dtype=torch.float32):
    return make_batch(tokens, seed=seed, dtype=dtype)


def to_cuda(batch):
    return tuple(tensor.cuda() for tensor in batch)


def warm_up(function) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [0, 1, 5, 130])
@pytest.mark.parametrize("max_deferred", [0, 1])
def test_eager_gives_the_bits_of_the_cpu(layers, dtype, tokens, max_deferred):
    batch = batch_of(tokens, tokens, dtype)
    wanted = run(layers, *batch, max_deferred=max_deferred, on_cpu=True)
    assert_same(run(layers, *to_cuda(batch), max_deferred=max_deferred), wanted)
    assert_same(run(layers, *to_cuda(batch), max_deferred=max_deferred, on_cpu=True), wanted)  # a CPU handle


def test_strides_and_dtypes(layers):
    x, ids, weights = batch_of(1, 7)
    layer = layers[0]
    wanted = layer.sync(ops.cpu_moe_submit(x, ids, weights, cpu_handle(layer))[0], x, out_dtype=torch.bfloat16)
    wide = torch.full((7, 3 * H), float("nan"), device="cuda")
    wide[:, 2 : 2 + H] = x.cuda()
    turned = ids.int().cuda().t().contiguous().t()
    for rows in (wide[:, 2 : 2 + H], x.cuda().t().contiguous().t()):
        ticket, _ = layer.submit(rows, turned, weights.double().cuda())
        assert_same(layer.sync(ticket, rows, out_dtype=torch.bfloat16), wanted)


@pytest.mark.parametrize("max_deferred", [0, 1])
@pytest.mark.parametrize("device_handle", [True, False])
def test_graph_replays(layers, max_deferred, device_handle):
    """1000 replays with changing inputs, rows of -1 among them."""
    batches = [batch_of(seed) for seed in range(20)]
    for batch in batches[::3]:
        batch[1][seed_row(batch)] = -1
    wanted = [run(layers, *batch, max_deferred=max_deferred, on_cpu=True) for batch in batches]
    static = [tensor.clone() for tensor in to_cuda(batches[0])]
    function = lambda: run(layers, *static, max_deferred=max_deferred, on_cpu=not device_handle)  # noqa: E731
    warm_up(function)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function()
    outs = []
    for step in range(1000):
        for tensor, value in zip(static, batches[step % 20], strict=True):
            tensor.copy_(value)
        graph.replay()
        if step % 50 < 20:  # replays are not waited for one by one
            outs.append((step % 20, out.clone()))
    for index, value in outs:
        assert_same(value, wanted[index])


def test_syncs_in_any_order(layers):
    """A sync may come before the host function of its submit, which runs beside the stream."""
    batches = [batch_of(seed, 1 + seed % 3) for seed in range(12)]
    layer = layers[0]
    wanted = [layer.sync(ops.cpu_moe_submit(*b, cpu_handle(layer))[0], b[0]) for b in batches]
    static = [to_cuda(batch) for batch in batches]
    torch.cuda.synchronize()
    for step in range(60):
        streams = [torch.cuda.current_stream(), torch.cuda.Stream()] if step % 2 else [torch.cuda.current_stream()]
        order = torch.randperm(12).tolist()
        tickets = [layer.submit(*batch)[0] for batch in static]
        for stream in streams[1:]:
            stream.wait_stream(streams[0])
        for place, index in enumerate(order):
            with torch.cuda.stream(streams[place % len(streams)]):
                out = layer.sync(tickets[index], static[index][0])
            streams[place % len(streams)].synchronize()
            assert_same(out, wanted[index])


def test_a_submit_outside_and_a_sync_inside_a_graph_and_the_other_way_round(layers):
    batches = [batch_of(seed) for seed in range(6)]
    layer = layers[2]
    wanted = [layer.sync(ops.cpu_moe_submit(*b, cpu_handle(layer))[0], b[0] * 0.5) for b in batches]
    static = [tensor.clone() for tensor in to_cuda(batches[0])]
    warm_up(lambda: layer.sync(layer.submit(*static)[0], static[0]))
    ticket, submits, syncs = (
        torch.zeros(1, dtype=torch.int64, device="cuda"),
        torch.cuda.CUDAGraph(),
        torch.cuda.CUDAGraph(),
    )
    with torch.cuda.graph(submits):
        captured, _ = layer.submit(*static)
    with torch.cuda.graph(syncs):
        out = layer.sync(ticket, static[0] * 0.5)
    for step in range(60):
        for tensor, value in zip(static, batches[step % 6], strict=True):
            tensor.copy_(value)
        if step % 3:
            ticket.copy_(layer.submit(*static)[0])
        else:
            submits.replay()
            ticket.copy_(captured)
        if step % 2:
            syncs.replay()
            assert_same(out, wanted[step % 6])
        else:
            assert_same(layer.sync(ticket, static[0] * 0.5), wanted[step % 6])


def test_deferral_of_ids_that_name_nothing(engine, layers):
    """The device cannot know the number of experts: it may hand out a deferred ticket of no work."""
    x, ids, weights = to_cuda(batch_of(1))
    layer = layers[0]
    for value in (-1, E, E + 7):
        ticket, deferred = layer.submit(x, torch.full_like(ids, value), weights, max_deferred=2)
        assert_same(layer.sync(ticket, x, deferred_ticket=deferred), x)
    torch.cuda.synchronize()
    engine.check()
    stats = engine.stats()
    assert (
        stats["deferred_untaken"] == 0
        and stats["submitted"] == stats["completed"] + stats["failed"] + stats["cancelled"]
    )


def seed_row(batch) -> int:
    return int(batch[0].shape[0]) // 2


def test_capture_on_a_side_stream_and_across_streams(layers):
    batch = batch_of(3)
    static = to_cuda(batch)
    wanted = run(layers, *batch, on_cpu=True)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run(layers, *static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        out = run(layers, *static)
    graph.replay()
    assert_same(out, wanted)
    # Two branches of one graph, forked and joined, in parallel.
    forked = torch.cuda.CUDAGraph()
    other = torch.cuda.Stream()
    with torch.cuda.graph(forked, stream=side):
        other.wait_stream(side)
        with torch.cuda.stream(other):
            second = run(layers, *static)
        first = run(layers, *static)
        side.wait_stream(other)
    for _ in range(20):
        forked.replay()
    assert_same(first, wanted)
    assert_same(second, wanted)


def test_two_graphs_replayed_on_two_streams(layers):
    graphs = []
    for seed in (1, 2):
        batch = batch_of(seed)
        static = to_cuda(batch)
        warm_up(lambda static=static: run(layers, *static))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(layers, *static)
        graphs.append((graph, out, run(layers, *batch, on_cpu=True), torch.cuda.Stream(), static))
    for _ in range(50):
        for graph, _, _, stream, _ in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for _, out, wanted, _, _ in graphs:
        assert_same(out, wanted)


def test_first_use_inside_a_capture_is_refused(layers):
    big = to_cuda(batch_of(0, 5000))
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match=r"the first call with \[5000, 64\] rows on cuda:0 must be outside"),
        torch.cuda.graph(graph),
    ):
        layers[0].submit(*big)
    torch.cuda.synchronize()
    batch = batch_of(2)
    assert_same(run(layers, *to_cuda(batch)), run(layers, *batch, on_cpu=True))


def test_reduce_overhead_gives_the_same_bits(layers):
    batches = [batch_of(seed) for seed in range(6)]
    wanted = [run(layers, *batch, on_cpu=True) for batch in batches]
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, mode="reduce-overhead")
    from torch._dynamo.utils import counters

    counters.clear()
    with torch.no_grad():
        for _ in range(3):
            for batch, want in zip(batches, wanted, strict=True):
                torch.compiler.cudagraph_mark_step_begin()
                assert_same(compiled(layers, *to_cuda(batch)).clone(), want)
    assert not counters["inductor"].get("cudagraph_skips")


class Block(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, ids, weights):
        ticket, _ = ops.cpu_moe_submit(x, ids, weights, self.layer.handle)
        return ops.cpu_moe_sync(ticket, x * 0.5)


def test_twelve_layers_compiled_one_by_one(engine):
    blocks = [Block(add_layer(engine, f"twelve{i}", seed=i).cuda()) for i in range(12)]
    batch = batch_of(4)
    wanted = run([block.layer for block in blocks], *batch, on_cpu=True)[-1]
    torch._dynamo.reset()
    for block in blocks:
        block.compile(fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            x, ids, weights = to_cuda(batch)
            for block in blocks:
                x = block(x, ids, weights)
            assert_same(x.clone(), wanted)


def test_a_failure_on_a_stream(engine, layers):
    batch = batch_of(5)
    static = to_cuda(batch)
    layer = layers[1]
    ops._engine_inject_failures(layer.shared.handle, 1)
    out = layer.sync(layer.submit(*static)[0], static[0])
    torch.cuda.synchronize()
    assert torch.isnan(out).all()
    with pytest.raises(RuntimeError, match=rf"job 0x[0-9a-f]+ of '{engine.name}/layer1' failed: injected failure"):
        engine.check()
    engine.check()
    ops._engine_inject_failures(layer.shared.handle, 1)
    layer.sync(layer.submit(*static)[0], static[0])
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="cpu_moe_submit: an earlier call on a stream failed: job"):
        layer.submit(*static)
    # Garbage in a device handle is caught by the worker.
    ticket, _ = ops.cpu_moe_submit(*static, torch.tensor([7], device="cuda"))
    out = ops.cpu_moe_sync(ticket, static[0])
    torch.cuda.synchronize()
    assert torch.isnan(out).all()
    with pytest.raises(RuntimeError, match="engine is not the handle of experts in a living CpuMoeEngine"):
        engine.check()
    # One ticket is good for one sync here too.
    ticket, _ = layer.submit(*static)
    layer.sync(ticket, static[0])
    out = layer.sync(ticket, static[0])
    torch.cuda.synchronize()
    assert torch.isnan(out).all()
    with pytest.raises(RuntimeError, match="ticket must be a ticket that no sync has taken"):
        engine.check()
    with pytest.raises(ValueError, match="engine must be the handle of experts in a living CpuMoeEngine"):
        ops.cpu_moe_submit(*static, torch.tensor([7]))
    assert_same(run(layers, *static), run(layers, *batch, on_cpu=True))


def test_synchronous_mode(layers):
    batch = batch_of(6)
    static = to_cuda(batch)
    wanted = run(layers, *static, max_deferred=1)
    moe_ops.engine.set_synchronous(True)
    try:
        assert_same(run(layers, *static, max_deferred=1), wanted)
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(RuntimeError, match=r"synchronous mode .* cannot be captured"), torch.cuda.graph(graph):
            layers[0].submit(*static)
    finally:
        moe_ops.engine.set_synchronous(False)
    torch.cuda.synchronize()


def test_tickets_that_nobody_syncs(engine, layers):
    static = to_cuda(batch_of(7))
    torch.cuda.synchronize()
    # The limit is one of the process: tests that ran before may hold a few (tests.samples keeps one).
    submitted = 0
    with pytest.raises(
        RuntimeError, match=rf"256 submissions are in flight \(.*of '{engine.name}'.*\) and no sync is under way"
    ):
        while submitted < 300:
            layers[0].submit(*static)
            submitted += 1
    assert 200 < submitted <= 256
    torch.cuda.synchronize()
    assert engine.discard_unsynced() == submitted
    # In a graph: the tickets of a replay are freed by the next one, and with the graph.
    warm_up(lambda: run(layers, *static))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers[0].submit(*static)
        out = run(layers, *static)
    engine.wait_idle()  # a job that ran while it was discarded is freed when it ends
    before = engine.stats()["never_synced"]
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert engine.stats()["never_synced"] == before + 19
    del graph
    gc.collect()
    torch.cuda.synchronize()
    assert engine.stats()["outstanding"] <= 1
    assert torch.isfinite(out).all()


def test_an_engine_that_closes_under_a_graph():
    engine = moe_ops.CpuMoeEngine("closing", threads=2)
    layer = add_layer(engine).cuda()
    static = to_cuda(batch_of(8))
    function = lambda: layer.sync(layer.submit(*static)[0], static[0])  # noqa: E731
    warm_up(function)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.isfinite(out).all()
    engine.close()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.isnan(out).all()
    with pytest.raises(RuntimeError, match="not the handle of experts in a living CpuMoeEngine"):
        layer.submit(*static)


def resident() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return psutil.Process().memory_info().rss


def report(what: str, grown: int, staged: list[int]) -> None:
    now = list(moe_ops.engine.staging())
    print(f"resident memory over {what}: {grown / 1024:+.0f} KiB; staging [slots, bytes] {staged} -> {now}")


def test_memory_is_flat(engine, layers):
    """10^5 eager calls, then 100 graphs made and dropped."""
    static = to_cuda(batch_of(9))
    layer = layers[0]

    def eager(count: int) -> None:
        with torch.inference_mode():
            for _ in range(count):
                layer.sync(layer.submit(*static)[0], static[0])

    def graphs(count: int) -> None:
        for _ in range(count):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = run(layers, *static, max_deferred=1)
            graph.replay()
            torch.cuda.synchronize()
            del graph, out

    eager(3000)
    before, staged = resident(), list(moe_ops.engine.staging())
    eager(100_000)
    grown = resident() - before
    report("1e5 eager calls", grown, staged)
    assert grown < 2 << 20
    assert list(moe_ops.engine.staging())[1] <= max(staged[1], 2 * 64 * ((64 << 10) + 64))
    warm_up(lambda: run(layers, *static, max_deferred=1))
    graphs(20)
    before, staged = resident(), list(moe_ops.engine.staging())
    graphs(100)
    grown = resident() - before
    report("100 graphs", grown, staged)
    assert grown < 8 << 20
    assert list(moe_ops.engine.staging()) == staged


def test_python_threads_and_the_gil(layers):
    """Launches and waits of several threads, each on a stream of its own, with the garbage collector at work."""
    batch = batch_of(10)
    wanted = run(layers, *batch, on_cpu=True)
    errors = []

    def work() -> None:
        try:
            stream = torch.cuda.Stream()
            static = to_cuda(batch)
            torch.cuda.synchronize()
            for _ in range(30):
                with torch.cuda.stream(stream):
                    out = run(layers, *static)
                stream.synchronize()
                assert_same(out, wanted)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        gc.collect()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert not errors
    assert E and K
