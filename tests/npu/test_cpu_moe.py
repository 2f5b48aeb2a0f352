"""CPU experts beside an NPU stream: order, capture, the callback mechanisms, and what happens without one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

import moe_ops
from moe_ops import reference
from moe_ops.engine import set_synchronous
from tests.npu.device import slow_device
from tests.support import assert_close, assert_same, make_experts, make_routing, make_rows

torch_npu = pytest.importorskip("torch_npu")
from moe_ops.npu import _callbacks, _native, _staging  # noqa: E402

TOKENS, TOP_K, EXPERTS, HIDDEN, INTER = 9, 3, 6, 64, 32
WEIGHTS = make_experts(EXPERTS, INTER, HIDDEN)
OPTIONS = {"w13_layout": "gate_up", "activation": "silu"}


@pytest.fixture(scope="module")
def engine():
    with moe_ops.CpuMoeEngine("npu-tests", threads=1, numa_nodes=0) as engine:
        yield engine


@pytest.fixture(scope="module")
def experts(engine):
    experts = engine.add_experts("layer", EXPERTS, HIDDEN, INTER, **OPTIONS)
    for index in range(EXPERTS):
        experts.load_expert(index, *(tensor[index] for tensor in WEIGHTS.values()))
    return experts


def inputs(seed: int = 0, tokens: int = TOKENS, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    ids, weights = make_routing(tokens, TOP_K, EXPERTS, seed=seed, invalid=0.2)
    return make_rows(tokens, HIDDEN, dtype, seed=seed), ids, weights, make_rows(tokens, HIDDEN, dtype, seed=seed + 1)


def expected(x, ids, weights, device_out) -> torch.Tensor:
    part = reference.fused_mxfp4_moe(x, ids, weights, *WEIGHTS.values(), out_dtype=torch.float32, **OPTIONS)
    return (device_out.float() + part).to(device_out.dtype)


def close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    assert_close(actual, wanted, max_tol=2.5e-2, rms_tol=5e-3)


def layer(experts, x, ids, weights, device_out, **options):
    ticket, _ = torch.ops.moe_ops.cpu_moe_submit(x, ids, weights, experts.handle)
    return torch.ops.moe_ops.cpu_moe_sync(ticket, device_out + 0, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [0, 1, TOKENS])
def test_matches_reference(experts, dtype, tokens):
    host = inputs(tokens=tokens, dtype=dtype)
    actual = layer(experts, *(tensor.npu() for tensor in host))
    assert actual.dtype == dtype and actual.device.type == "npu"
    close(actual, expected(*host))


def test_strided_inputs_and_int32_ids(experts):
    x, ids, weights, device_out = inputs()
    wide = torch.cat([x, x], 1).npu()[:, ::2]
    host = torch.cat([x, x], 1)[:, ::2]
    moved = ids.to(torch.int32).t().contiguous().npu().t(), weights.bfloat16().t().contiguous().npu().t()
    close(layer(experts, wide, *moved, device_out.npu()), expected(host, ids, weights.bfloat16(), device_out))


def test_submit_copies_its_inputs(experts):
    host = inputs()
    x, ids, weights, device_out = (tensor.npu() for tensor in host)
    with slow_device():
        ticket, _ = torch.ops.moe_ops.cpu_moe_submit(x, ids, weights, experts.handle)
        x.fill_(float("nan")), ids.fill_(-1), weights.zero_()
        actual = torch.ops.moe_ops.cpu_moe_sync(ticket, device_out)
    close(actual, expected(*host))


def test_many_calls_in_flight(experts):
    """More than there are eager slots, none waited for in between."""
    hosts = [inputs(seed) for seed in range(5)]
    moved = [[tensor.npu() for tensor in host] for host in hosts]
    results = [layer(experts, *moved[i % 5]) for i in range(90)]
    for i, result in enumerate(results):
        close(result, expected(*hosts[i % 5]))


def test_handle_in_device_memory(experts):
    host = inputs()
    x, ids, weights, device_out = (tensor.npu() for tensor in host)
    ticket, _ = torch.ops.moe_ops.cpu_moe_submit(x, ids, weights, experts.handle.npu())
    close(torch.ops.moe_ops.cpu_moe_sync(ticket, device_out), expected(*host))


def test_deferred(experts):
    host = inputs()
    x, ids, weights, device_out = (tensor.npu() for tensor in host)
    ticket, deferred = torch.ops.moe_ops.cpu_moe_submit(x, ids, weights, experts.handle, max_deferred=1)
    both = torch.ops.moe_ops.cpu_moe_sync(ticket, device_out, deferred_ticket=deferred)
    close(both, expected(*host))
    ticket, deferred = torch.ops.moe_ops.cpu_moe_submit(x, ids, weights, experts.handle, max_deferred=1)
    first = torch.ops.moe_ops.cpu_moe_sync(ticket, device_out, out_dtype=torch.float32)
    ids = torch.where((host[1] >= 0) & (host[1] < EXPERTS), host[1], -1)
    now, later = moe_ops.select_deferred_experts(ids, host[2], 1)
    close(first, expected(host[0], now, host[2], host[3].float()))
    rest = torch.ops.moe_ops.cpu_moe_sync(deferred, torch.zeros_like(first))
    close(rest, expected(host[0], later, host[2], torch.zeros(TOKENS, HIDDEN)))


def test_device_work_overlaps(engine, experts):
    """While the engine is held the stream goes on to the device's own work; only the sync waits."""
    x, ids, weights, device_out = (tensor.npu() for tensor in inputs())
    after = torch.npu.Event()
    with engine.hold():
        ticket, _ = torch.ops.moe_ops.cpu_moe_submit(x, ids, weights, experts.handle)
        work = x * 2
        after.record()
        after.synchronize()
        assert torch.equal(work.cpu(), x.cpu() * 2)
    torch.ops.moe_ops.cpu_moe_sync(ticket, device_out)
    torch.npu.synchronize()


def test_failed_job_is_nan_and_raises_later(engine, experts):
    x, ids, weights, device_out = (tensor.npu() for tensor in inputs())
    torch.npu.synchronize()
    torch.ops.moe_ops._engine_inject_failures(int(experts.handle), 1)
    assert layer(experts, x, ids, weights, device_out).isnan().all()
    with pytest.raises(RuntimeError, match="npu-tests"):
        layer(experts, x, ids, weights, device_out)
    engine.check()


def test_unknown_handle_is_an_argument_error(experts):
    x, ids, weights, _ = (tensor.npu() for tensor in inputs())
    with pytest.raises(ValueError, match=r"^cpu_moe_submit: engine must be the handle of experts in a living"):
        torch.ops.moe_ops.cpu_moe_submit(x, ids, weights, torch.tensor([12345]))
    with pytest.raises(
        ValueError, match=r"^cpu_moe_submit: hidden_states must be as wide as the experts, got \[9, 32\]"
    ):
        torch.ops.moe_ops.cpu_moe_submit(x[:, :32], ids, weights, experts.handle)


def capture(experts, static, stream, calls: int = 1):
    graph = torch.npu.NPUGraph()
    torch.npu.synchronize()
    with torch.npu.graph(graph, stream=stream):
        results = [layer(experts, *static) for _ in range(calls)]
    return graph, results


def test_capture_and_replay_with_new_routing(experts, stream):
    static = [tensor.npu() for tensor in inputs()]
    layer(experts, *static)  # warm-up
    graph, results = capture(experts, static, stream, calls=2)
    for seed in range(1, 8):
        host = inputs(seed)
        for tensor, value in zip(static, host, strict=True):
            tensor.copy_(value)
        with slow_device():
            graph.replay()
        for result in results:
            close(result, expected(*host))


def test_two_engines_in_one_graph_keep_their_handles(engine, experts, stream):
    other = engine.add_experts("other", EXPERTS, HIDDEN, INTER, **OPTIONS)
    for index in range(EXPERTS):
        other.load_expert(index, *(tensor[EXPERTS - 1 - index] for tensor in WEIGHTS.values()))
    host = inputs(3)
    static = [tensor.npu() for tensor in host]
    layer(experts, *static), layer(other, *static)
    graph = torch.npu.NPUGraph()
    torch.npu.synchronize()
    with torch.npu.graph(graph, stream=stream):
        first, second = layer(experts, *static), layer(other, *static)
    graph.replay()
    close(first, expected(*host))
    x, ids, weights, device_out = host
    mirrored = torch.where((ids >= 0) & (ids < EXPERTS), EXPERTS - 1 - ids, -1)
    close(second, expected(x, mirrored, weights, device_out))


def test_graph_gives_its_staging_back(experts, stream):
    static = [tensor.npu() for tensor in inputs()]
    layer(experts, *static)
    sizes = []
    for _ in range(4):
        graph, results = capture(experts, static, stream)
        graph.replay()
        torch.npu.synchronize()
        del results
        graph.reset()
        layer(experts, *static)
        torch.npu.synchronize()
        sizes.append(_staging.staging_size(0))
    assert sizes[0] == sizes[-1]


def test_eager_calls_allocate_nothing(experts):
    static = [tensor.npu() for tensor in inputs()]
    layer(experts, *static)
    torch.npu.synchronize()
    before = _staging.staging_size(0)
    for _ in range(200):
        layer(experts, *static)
        torch.npu.synchronize()
    assert _staging.staging_size(0) == before


def test_first_call_of_a_size_inside_a_capture_names_the_warm_up(experts, stream):
    static = [tensor.npu() for tensor in inputs(tokens=4096)]
    with pytest.raises(RuntimeError, match=r"first call with \[4096, 64\] rows on npu:0 must be outside a capture"):
        capture(experts, static, stream)


def test_forced_synchronous_mode_gives_the_same_bits(experts, stream):
    static = [tensor.npu() for tensor in inputs()]
    wanted = layer(experts, *static).cpu()
    set_synchronous(True)
    try:
        assert_same(layer(experts, *static), wanted)
        with pytest.raises(RuntimeError, match="synchronous mode"):
            capture(experts, static, stream)
    finally:
        set_synchronous(False)


def test_stream_that_the_application_has_subscribed(experts):
    """aclrtLaunchHostFunc refuses it (107011); the call goes through its subscriber."""
    host, side = inputs(2), torch.npu.Stream()
    torch_npu.npu._subscribe_report(side)
    try:
        static = [tensor.npu() for tensor in host]
        torch.npu.synchronize()
        with torch.npu.stream(side):
            actual = layer(experts, *static)
        side.synchronize()
        close(actual, expected(*host))
    finally:
        torch_npu.npu._unsubscribe_report(side)


def test_worker_subscribes_where_host_functions_are_left_out(experts, monkeypatch, stream):
    monkeypatch.setenv("MOE_OPS_NPU_CALLBACKS", "callback")
    host = inputs(4)
    static = [tensor.npu() for tensor in host]
    torch.npu.synchronize()
    for _ in range(2):
        with torch.npu.stream(stream):
            close(layer(experts, *static), expected(*host))
    graph, (result,) = capture(experts, static, stream)
    graph.replay()
    close(result, expected(*host))
    _callbacks.stop_workers()
    with torch.npu.stream(stream):  # a stopped worker is started again
        close(layer(experts, *static), expected(*host))


def test_stopping_the_worker_runs_what_is_queued(experts, monkeypatch):
    """Ten callbacks wait, each behind the one before: none may be left, or the stream never moves on."""
    monkeypatch.setenv("MOE_OPS_NPU_CALLBACKS", "callback")
    hosts, side = [inputs(seed) for seed in range(5)], torch.npu.Stream()
    moved = [[tensor.npu() for tensor in host] for host in hosts]
    torch.npu.synchronize()
    with torch.npu.stream(side), slow_device():
        results = [layer(experts, *static) for static in moved]
        _callbacks.stop_workers()
        finished = torch.npu.Event()
        finished.record()
    assert not _callbacks._workers
    deadline = time.monotonic() + 20
    while not finished.query():
        assert time.monotonic() < deadline, "the stream waits for a callback that nobody runs"
        time.sleep(0.01)
    for result, host in zip(results, hosts, strict=True):
        close(result, expected(*host))


def test_no_thread_where_host_functions_do(experts, monkeypatch):
    monkeypatch.delenv("MOE_OPS_NPU_CALLBACKS", raising=False)
    _callbacks.stop_workers()
    layer(experts, *(tensor.npu() for tensor in inputs()))
    assert not _callbacks._workers


@pytest.mark.parametrize("broken", ["start", "subscribe"])
def test_worker_that_does_not_start_degrades(experts, monkeypatch, broken, stream):
    monkeypatch.setenv("MOE_OPS_NPU_CALLBACKS", "callback")
    _callbacks.stop_workers()
    if broken == "start":
        monkeypatch.setattr(_callbacks.ReportWorker, "start", lambda self: False)
    else:
        monkeypatch.setattr(_callbacks.ReportWorker, "subscribe", lambda self, stream: 107011)
    host, side = inputs(5), torch.npu.Stream()
    static = [tensor.npu() for tensor in host]
    torch.npu.synchronize()
    reason = "could not be started" if broken == "start" else r"cannot be subscribed \(ACL error 107011\)"
    told = pytest.warns(RuntimeWarning, match=rf"CPU experts run synchronously on this device: .*{reason}")
    with torch.npu.stream(side), told:
        close(layer(experts, *static), expected(*host))
    with pytest.warns(RuntimeWarning), pytest.raises(RuntimeError, match="without host callbacks cannot be captured"):
        capture(experts, static, stream)
    _callbacks.stop_workers()


@pytest.mark.parametrize("callbacks", ["auto", "callback"])
def test_external_subscriber(experts, monkeypatch, callbacks):
    """No thread of ours, no subscription, nothing synchronous; and the stream stays free for the application."""
    monkeypatch.setenv("MOE_OPS_NPU_CALLBACKS", callbacks)
    monkeypatch.setenv("MOE_OPS_NPU_EXTERNAL_SUBSCRIBER", "1")
    _callbacks.stop_workers()
    host, side = inputs(), torch.npu.Stream()
    static = [tensor.npu() for tensor in host]
    torch.npu.synchronize()
    with torch.npu.stream(side), pytest.raises(RuntimeError, match=r"nobody has subscribed to this stream .*107015"):
        layer(experts, *static)
    torch_npu.npu._subscribe_report(side)
    try:
        with torch.npu.stream(side), warnings.catch_warnings():
            warnings.filterwarnings("error", message="moe_ops")
            result = layer(experts, *static)
        side.synchronize()
        close(result, expected(*host))
    finally:
        torch_npu.npu._unsubscribe_report(side)
    assert not _callbacks._workers


def test_worker_stops_before_the_runtime_does():
    """At exit, also where torch_npu was imported after moe_ops."""
    program = (
        "import moe_ops\n"
        "from tests.npu import device\n"
        "torch_npu = device.load()\n"
        "import torch\n"
        "from moe_ops.npu import _callbacks\n"
        "from tests.npu import test_cpu_moe as t\n"
        "shutdown, stop = torch_npu._C._npu_shutdown, _callbacks.ReportWorker.stop\n"
        "torch_npu._C._npu_shutdown = lambda *a: (print('runtime'), shutdown(*a))\n"
        "_callbacks.ReportWorker.stop = lambda self: (print('worker'), stop(self))\n"
        "engine = moe_ops.CpuMoeEngine('exit', threads=1, numa_nodes=0)\n"
        "experts = engine.add_experts('layer', t.EXPERTS, t.HIDDEN, t.INTER, **t.OPTIONS)\n"
        "for i in range(t.EXPERTS): experts.load_expert(i, *(w[i] for w in t.WEIGHTS.values()))\n"
        "t.layer(experts, *(x.npu() for x in t.inputs()))\n"
    )
    environment = {**os.environ, "MOE_OPS_NPU_CALLBACKS": "callback", "MOE_OPS_TEST_BACKEND": "npu"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(moe_ops.__file__).parents[1], env=environment, timeout=120,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.split() if line in ("worker", "runtime")] == ["worker", "runtime"]


@pytest.mark.simulation
def test_without_callbacks_calls_run_on_the_host(experts, monkeypatch, stream):
    library = _native.runtime()
    for name in ("aclrtLaunchHostFunc", "aclrtLaunchCallback"):
        monkeypatch.delitem(library._functions, name)
    host = inputs(5)
    static = [tensor.npu() for tensor in host]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            close(layer(experts, *static), expected(*host))
    assert len([w for w in seen if "run synchronously" in str(w.message)]) >= 1
    with pytest.raises(RuntimeError, match="without host callbacks cannot be captured"):
        capture(experts, static, stream)


def test_two_host_threads(experts):
    """Each on a stream of its own, the same engine."""
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            torch.npu.set_device(0)
            host = inputs(seed)
            with torch.npu.stream(torch.npu.Stream()):
                static = [tensor.npu() for tensor in host]
                for _ in range(20):
                    close(layer(experts, *static), expected(*host))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (11, 12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_second_device(experts):
    if torch.npu.device_count() < 2:
        pytest.skip("needs two devices")
    host = inputs(6)
    close(layer(experts, *(tensor.to("npu:1") for tensor in host)), expected(*host))


def test_hybrid_layer_eager_captured_and_with_other_residents(engine, stream):
    """Device and CPU experts in one call; residents change in place, under a graph that was captured before."""
    name = "hybrid"
    cpu_experts = engine.add_experts(name, EXPERTS, HIDDEN, INTER, **OPTIONS)
    for index in range(EXPERTS):
        cpu_experts.load_expert(index, *(tensor[index] for tensor in WEIGHTS.values()))
    layer = moe_ops.HybridExperts(cpu_experts, 2, device="npu")
    layer.place([1, 4])
    host = inputs(7)
    static = [tensor.npu() for tensor in host[:3]]
    zeros = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
    with torch.no_grad():
        close(layer(*static)[0], expected(*host[:3], zeros))
        graph = torch.npu.NPUGraph()
        torch.npu.synchronize()
        with torch.npu.graph(graph, stream=stream):
            result = layer(*static)[0]
    for seed, residents in ((8, [1, 4]), (9, [0, 5]), (10, [])):
        layer.place(residents)
        host = inputs(seed)
        for tensor, value in zip(static, host, strict=False):
            tensor.copy_(value)
        graph.replay()
        close(result, expected(*host[:3], zeros))


def test_graph_replayed_many_times(engine, experts, stream):
    """Tickets, blocks and staging are used again: nothing grows, and nothing is lost."""
    host = inputs(1)
    static = [tensor.npu() for tensor in host]
    layer(experts, *static)
    graph, (result,) = capture(experts, static, stream)
    graph.replay()
    torch.npu.synchronize()
    before, staging = engine.stats(), _staging.staging_size(0)
    for _ in range(1000):
        graph.replay()
    torch.npu.synchronize()
    after = engine.stats()
    assert after["submitted"] - before["submitted"] == 1000 and after["failed"] == before["failed"]
    assert after["outstanding"] == before["outstanding"] and _staging.staging_size(0) == staging
    close(result, expected(*host))


def test_engine_closed_under_a_graph(experts, stream):
    """The replay gives NaN rows, and the next call says so once; other engines go on."""
    host = inputs(2)
    static = [tensor.npu() for tensor in host]
    with moe_ops.CpuMoeEngine("npu-closed", threads=1, numa_nodes=0) as closing:
        mine = closing.add_experts("layer", EXPERTS, HIDDEN, INTER, **OPTIONS)
        for index in range(EXPERTS):
            mine.load_expert(index, *(tensor[index] for tensor in WEIGHTS.values()))
        layer(mine, *static)
        graph, (result,) = capture(mine, static, stream)
        graph.replay()
        close(result, expected(*host))
    graph.replay()
    torch.npu.synchronize()
    assert result.isnan().all()
    with pytest.raises(RuntimeError, match="engine is not the handle of experts in a living"):
        layer(experts, *static)
    close(layer(experts, *static), expected(*host))
