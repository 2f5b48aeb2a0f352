"""Engines over their life: threads, memory, failures, shutdown, fork, idling."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

import moe_ops
from tests.engine.support import E, H, I, add_layer, expected, make_batch, new_engine, unused_name
from tests.support import assert_close, assert_same, make_experts

_ops = torch.ops.moe_ops


def close(actual, wanted):
    assert_close(actual, wanted, max_tol=5e-5, rms_tol=5e-6)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


SETUP = """
import os, sys, threading, torch, moe_ops
from tests.engine.support import *
engine = moe_ops.CpuMoeEngine("process", threads=2)
layer = add_layer(engine)
batch = make_batch(4)
"""


# --- threads and nodes ---


def describe_machine(root, nodes: dict[int, str], cpu_max: str = "max 100000") -> str:
    """A /sys and /proc of a machine with these NUMA nodes and this quota."""
    base = root / "sys/devices/system/node"
    base.mkdir(parents=True)
    (base / "online").write_text(",".join(map(str, nodes)) + "\n")
    for node, cpus in nodes.items():
        (base / f"node{node}").mkdir()
        (base / f"node{node}/cpulist").write_text(cpus + "\n")
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/user/me\n")
    (root / "sys/fs/cgroup/user/me").mkdir(parents=True)
    (root / "sys/fs/cgroup/user/cpu.max").write_text(cpu_max + "\n")
    return str(root)


CPUS = sorted(os.sched_getaffinity(0))
needs_two_cpus = pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")


@needs_two_cpus
def test_pools(tmp_path):
    root = describe_machine(tmp_path, {0: str(CPUS[0]), 1: str(CPUS[1])})
    cases = {
        None: [(0, (CPUS[0],)), (1, (CPUS[1],))],
        0: [(-1, (CPUS[0], CPUS[1]))],
        1: [(0, (CPUS[0],))],
        2: [(0, (CPUS[0],)), (1, (CPUS[1],))],
        (1,): [(1, (CPUS[1],))],
        (1, 0): [(1, (CPUS[1],)), (0, (CPUS[0],))],
    }
    for nodes, wanted in cases.items():
        threads = 2 if nodes == 0 else None
        with moe_ops.CpuMoeEngine(unused_name(), numa_nodes=nodes, threads=threads, system_root=root) as engine:
            assert [(pool.node, pool.cpus) for pool in engine.pools] == wanted, nodes


@needs_two_cpus
def test_quota(tmp_path):
    root = describe_machine(tmp_path, {0: f"{CPUS[0]}-{CPUS[-1]}"}, cpu_max="100000 100000")
    with moe_ops.CpuMoeEngine(unused_name(), system_root=root) as engine:
        assert engine.usable_cpus == 1
        assert [len(pool.cpus) for pool in engine.pools] == [1]
    with pytest.raises(ValueError, match=r"CpuMoeEngine: threads must be in \[1, 1\] .*, got 2"):
        moe_ops.CpuMoeEngine(unused_name(), threads=2, system_root=root)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 100000}, r"threads must be in \[1, \d+\] \(CPUs that this process may use\), got 100000"),
        ({"threads": 0}, "threads must be None or at least 1, got 0"),
        ({"threads": 2.5}, "threads must be None or at least 1, got 2.5"),
        ({"max_jobs": 2.5}, "max_jobs must be at least 1, got 2.5"),
        ({"threads": -3}, "threads must be None or at least 1, got -3"),
        ({"numa_nodes": [97]}, r"numa_nodes must be among the usable nodes \[.*\], got \[97\]"),
        ({"numa_nodes": [0, 0]}, r"numa_nodes must be distinct, got \[0, 0\]"),
        ({"numa_nodes": []}, r"numa_nodes must be None, a count or a list of nodes, got \[\]"),
        ({"numa_nodes": -1}, "numa_nodes must be None, a count or a list of nodes, got -1"),
        ({"numa_nodes": 500}, "numa_nodes must be at most .*, got 500"),
        ({"max_jobs": 0}, "max_jobs must be at least 1, got 0"),
    ],
)
def test_plans_that_are_refused(options, message):
    with pytest.raises(ValueError, match="CpuMoeEngine: " + message):
        moe_ops.CpuMoeEngine(unused_name(), **options)


@needs_two_cpus
def test_a_thread_for_every_pool(tmp_path):
    root = describe_machine(tmp_path, {0: str(CPUS[0]), 1: str(CPUS[1])})
    with pytest.raises(ValueError, match=r"threads must be at least one per pool \(2 pools\), got 1"):
        moe_ops.CpuMoeEngine(unused_name(), numa_nodes=2, threads=1, system_root=root)


@needs_two_cpus
@pytest.mark.parametrize("weight_format", ["mxfp4", "bfloat16"])
@pytest.mark.parametrize("layout", ["gate_up", "up_gate", "interleaved"])
def test_two_pools_share_every_expert(tmp_path, layout, weight_format):
    """The intermediate dimension is split over the pools, unevenly where it must be (96 = 64 + 32)."""
    root = describe_machine(tmp_path, {0: str(CPUS[0]), 1: str(CPUS[1])})
    g = torch.Generator().manual_seed(1)
    tensors = {
        "w13": torch.randn(E, 192, H, generator=g) / 8,
        "w2": torch.randn(E, H, 96, generator=g) / 8,
        "w13_bias": torch.randn(E, 192, generator=g),
        "w2_bias": torch.randn(E, H, generator=g),
    }
    with moe_ops.CpuMoeEngine(unused_name(), system_root=root) as engine:
        options = {"w13_layout": layout, "weight_format": weight_format, "w13_bias": True, "w2_bias": True}
        layer = engine.add_experts("split", E, H, 96, **options).load(tensors)
        batch = make_batch(9)
        outs = [layer.sync(layer.submit(*batch)[0], torch.zeros(9, H)) for _ in range(3)]
        close(outs[0], expected(layer, batch))
        assert_same(outs[1], outs[0])
        read = layer.read_expert(3)
        if weight_format == "bfloat16":
            assert_same(read["w13"], tensors["w13"][3].bfloat16())
            assert_same(read["w2"], tensors["w2"][3].bfloat16())
        assert_same(read["w13_bias"], tensors["w13_bias"][3])
        with pytest.raises(ValueError, match="intermediate_size must be at least 32 for each of 2 NUMA pools, got 32"):
            engine.add_experts("narrow", E, H, 32, w13_layout=layout)


# --- names ---


def test_names():
    with new_engine() as engine:
        layer = add_layer(engine, "layers.0")
        with pytest.raises(ValueError, match=f"name must be unused, got '{engine.name}', which names a living engine"):
            moe_ops.CpuMoeEngine(engine.name)
        with pytest.raises(ValueError, match="experts name must be unused"):
            add_layer(engine, "layers.0")
        handle = int(layer.handle)
        name = engine.name
    for bad in ("", "a/b", "x" * 41):
        with pytest.raises(ValueError, match="name must be 1 to 40 characters without '/'"):
            moe_ops.CpuMoeEngine(bad)
    with moe_ops.CpuMoeEngine(name) as again:  # free once closed, and the handle follows the name
        assert int(add_layer(again, "layers.0").handle) == handle


def test_a_new_engine_of_the_same_name_is_not_hurt_by_the_old_ones_end():
    for _ in range(3):
        with moe_ops.CpuMoeEngine("renewed", threads=1) as engine:
            layer = add_layer(engine)
            gc.collect()
            batch = make_batch(2)
            close(layer.sync(layer.submit(*batch)[0], torch.zeros(2, H)), expected(layer, batch))


# --- memory ---


def resident() -> int:
    return psutil.Process().memory_info().rss


def test_only_experts_that_are_here_take_memory():
    experts, hidden, inter = 32, 1024, 1024
    one = 3 * hidden * inter // 2 + 3 * hidden * inter // 32
    stacked = make_experts(1, inter, hidden)
    with new_engine() as engine:
        layer = engine.add_experts("sparse", experts, hidden, inter, w13_layout="gate_up")
        assert layer.bytes_per_expert == one
        before = resident()
        on_cpu = [expert % 4 == 0 for expert in range(experts)]
        layer.load(lambda expert: {name: tensor[0] for name, tensor in stacked.items()}, on_cpu=on_cpu)
        grown = resident() - before
        assert grown < 8 * one * 1.25 + (4 << 20), f"8 of 32 experts took {grown / one:.1f} times one expert"
        assert layer.loaded().tolist() == on_cpu
        for expert in range(0, experts, 4):
            layer.unload_expert(expert)
        assert resident() - before < 2 * one
        assert not layer.loaded().any()


def test_an_absent_expert_is_an_error_and_not_zeros():
    with new_engine() as engine:
        layer = add_layer(engine)
        layer.unload_expert(2)
        x = torch.zeros(1, H)
        ticket, _ = layer.submit(x, torch.tensor([[2]]), torch.ones(1, 1))
        with pytest.raises(RuntimeError, match="failed: expert 2 is not on the CPU"):
            layer.sync(ticket, x)
        with pytest.raises(RuntimeError, match="expert 2 is not on the CPU"):
            layer.read_expert(2)
        unused, _ = layer.submit(x, torch.tensor([[2]]), torch.zeros(1, 1))  # weight 0: selected away
        assert_same(layer.sync(unused, x), x)


def test_weights_change_in_order_with_jobs():
    """A job submitted before a load uses the weights of before."""
    with new_engine() as engine:
        layer = add_layer(engine, seed=0)
        batch = make_batch(3)
        old = expected(layer, batch)
        new = make_experts(E, I, H, seed=50)
        ticket, _ = layer.submit(*batch)
        layer.load(new)
        later, _ = layer.submit(*batch)
        close(layer.sync(ticket, torch.zeros(3, H)), old)
        close(layer.sync(later, torch.zeros(3, H)), expected(layer, batch))


def test_replicas():
    """physical_to_logical: two physical experts with the weights of one logical expert."""
    stacked = make_experts(3, I, H)
    with new_engine() as engine:
        layer = engine.add_experts("replicas", 4, H, I, w13_layout="gate_up")
        layer.load(stacked, physical_to_logical=[2, 0, 1, 2])
        for physical, logical in enumerate([2, 0, 1, 2]):
            assert_same(layer.read_expert(physical)["w2"], stacked["w2"][logical])
        with pytest.raises(ValueError, match=r"physical_to_logical must be in \[0, 3\), got 3"):
            layer.load(stacked, physical_to_logical=[0, 1, 2, 3])
        with pytest.raises(ValueError, match=r"tensors must be 4 experts, or physical_to_logical given, got 3 experts"):
            layer.load(stacked)
        with pytest.raises(ValueError, match=r"tensors must be a mapping, .* got Tensor"):
            layer.load(stacked["w13"])
        with pytest.raises(ValueError, match="num_experts must be at least 1, got -1"):
            engine.add_experts("negative", -1, H, I, w13_layout="gate_up")


@pytest.mark.parametrize("calls", [5000, pytest.param(100_000, marks=pytest.mark.heavy)])
def test_memory_is_flat(calls):
    with new_engine() as engine:
        layer = add_layer(engine)
        batch, zeros = make_batch(4), torch.zeros(4, H)

        def run(count: int) -> None:
            with torch.inference_mode():
                for _ in range(count):
                    ticket, deferred = layer.submit(*batch, max_deferred=1)
                    layer.sync(ticket, zeros, deferred_ticket=deferred)

        run(500)
        gc.collect()
        before = resident()
        run(calls)
        gc.collect()
        assert resident() - before < 1 << 20
        assert engine.stats()["outstanding"] == 0


def test_engines_made_and_closed_leave_nothing():
    def make() -> None:
        with new_engine(threads=2) as engine:
            layer = add_layer(engine)
            for _ in range(3):
                layer.submit(*make_batch(64))

    process = psutil.Process()
    for _ in range(5):
        make()
    gc.collect()
    threads, memory = process.num_threads(), resident()
    for _ in range(40):
        make()
    gc.collect()
    assert process.num_threads() <= threads
    assert resident() - memory < 2 << 20


# --- failures ---


def test_a_failure_belongs_to_its_ticket():
    with new_engine() as engine:
        layer = add_layer(engine, "frail")
        batch = make_batch(3)
        with engine.hold():
            before, _ = layer.submit(*batch)
        engine.wait_idle()
        _ops._engine_inject_failures(layer.shared.handle, 1)
        with engine.hold():
            bad, _ = layer.submit(*batch)
            after, _ = layer.submit(*batch)
        wanted = expected(layer, batch)
        close(layer.sync(after, torch.zeros(3, H)), wanted)  # later tasks run
        pattern = f"cpu_moe_sync: job 0x[0-9a-f]+ of '{engine.name}/frail' failed: injected failure"
        with pytest.raises(RuntimeError, match=pattern):
            layer.sync(bad, torch.zeros(3, H))
        with pytest.raises(RuntimeError, match="which was taken"):
            layer.sync(bad, torch.zeros(3, H))
        close(layer.sync(before, torch.zeros(3, H)), wanted)
        assert engine.stats()["failed"] == 1
        engine.check()  # reported by its sync, not twice


def test_tickets_that_nobody_syncs():
    with new_engine(max_jobs=5) as engine:
        layer = add_layer(engine)
        tickets = [layer.submit(*make_batch(2))[0] for _ in range(5)]
        with pytest.raises(RuntimeError, match=r"has 5 jobs whose tickets were never synced \(max_jobs\)"):
            layer.submit(*make_batch(2))
        engine.discard(tickets[0])
        with pytest.raises(RuntimeError, match=r"CpuMoeEngine.discard: ticket must be .* which was taken, discarded"):
            engine.discard(tickets[0])
        assert engine.discard_unsynced() == 4
        engine.wait_idle()  # a job that ran while it was discarded is freed when it ends
        assert engine.stats()["never_synced"] == 5 and engine.stats()["outstanding"] == 0
        layer.sync(layer.submit(*make_batch(2))[0], torch.zeros(2, H))


# --- the end ---


def test_close_with_work_in_flight():
    """A sync that waits for a queued job returns an error when the engine closes; nothing hangs."""
    engine = moe_ops.CpuMoeEngine(unused_name(), threads=2)
    layer = add_layer(engine)
    errors: list[BaseException] = []

    def wait(ticket) -> None:
        try:
            layer.sync(ticket, torch.zeros(3, H))
        except RuntimeError as error:
            errors.append(error)

    with engine.hold():
        tickets = [layer.submit(*make_batch(3))[0] for _ in range(4)]
        threads = [threading.Thread(target=wait, args=(ticket,)) for ticket in tickets[:2]]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        engine.close()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert len(errors) == 2
    assert all("the engine was closed before the job ran" in str(error) or "freed" in str(error) for error in errors)
    with pytest.raises(RuntimeError, match="was taken, discarded or freed"):
        layer.sync(tickets[3], torch.zeros(3, H))
    with pytest.raises(ValueError, match="engine must be the handle of experts in a living CpuMoeEngine"):
        layer.submit(*make_batch(3))
    engine.close()  # twice is fine


def test_close_can_drain():
    engine = moe_ops.CpuMoeEngine(unused_name(), threads=2)
    layer = add_layer(engine)
    results = []
    batch = make_batch(3)
    wanted = expected(layer, batch)
    with engine.hold():
        ticket, _ = layer.submit(*batch)
        thread = threading.Thread(target=lambda: results.append(layer.sync(ticket, torch.zeros(3, H))))
        thread.start()
        time.sleep(0.05)
        engine.close(drain=True)
    thread.join(timeout=30)
    close(results[0], wanted)


def test_the_process_ends_with_work_in_flight():
    code = SETUP + "tickets = [layer.submit(*make_batch(500)) for _ in range(20)]\nprint('end')\n"
    done = run_python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_fork():
    """In a child the parent's engine says why it cannot be used, and a new one works; the parent is not disturbed."""
    code = (
        SETUP
        + """
ticket, _ = layer.submit(*batch)
child = os.fork()
if child == 0:
    messages = []
    for call in (lambda: layer.submit(*batch), lambda: layer.sync(ticket, torch.zeros(4, H)), engine.stats):
        try:
            call()
        except RuntimeError as error:
            messages.append(str(error))
    assert len(messages) == 3 and all("before fork()" in message for message in messages), messages
    engine.close()
    again = moe_ops.CpuMoeEngine("process", threads=2)
    fresh = add_layer(again)
    out = fresh.sync(fresh.submit(*batch)[0], torch.zeros(4, H))
    assert torch.isfinite(out).all()
    again.close()
    sys.stdout.flush()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
out = layer.sync(ticket, torch.zeros(4, H))
layer.sync(layer.submit(*batch)[0], torch.zeros(4, H))
engine.close()
print("parent done")
"""
    )
    done = run_python(code, OMP_NUM_THREADS="1")
    assert (done.returncode, done.stdout) == (0, "parent done\n"), done.stderr


def test_the_environment_variable():
    code = (
        SETUP
        + """
assert moe_ops.engine.is_synchronous()
ticket, _ = layer.submit(*batch)
assert torch.ops.moe_ops._engine_is_done(int(ticket))
print("synchronous")
"""
    )
    done = run_python(code, MOE_OPS_SYNC="1")
    assert (done.returncode, done.stdout) == (0, "synchronous\n"), done.stderr


def engine_cpu_seconds() -> float:
    """What the threads of all engines of this process have used so far; other threads are not the engine's matter."""
    ticks = 0.0
    for task in Path("/proc/self/task").iterdir():
        try:
            if (task / "comm").read_text().strip() == "moe-engine":
                user, system = (task / "stat").read_text().rsplit(")", 1)[1].split()[11:13]
                ticks += int(user) + int(system)
        except FileNotFoundError:  # it has ended
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


def test_an_idle_engine_uses_no_cpu():
    """Under 1 % of one CPU, with two engines, after work."""
    with new_engine() as first, new_engine() as second:
        for engine in (first, second):
            layer = add_layer(engine)
            busy = time.monotonic() + 0.3
            while time.monotonic() < busy:
                layer.sync(layer.submit(*make_batch(8))[0], torch.zeros(8, H))
        assert engine_cpu_seconds() > 0  # it can tell work from none
        time.sleep(0.1)
        before, start = engine_cpu_seconds(), time.monotonic()
        time.sleep(3)
        share = (engine_cpu_seconds() - before) / (time.monotonic() - start)
        assert share < 0.01, f"idle CPU use {share:.2%}"


# --- looking at it ---


def test_statistics_and_trace(tmp_path):
    with new_engine() as engine:
        layer = add_layer(engine)
        with engine.hold():
            tickets = [layer.submit(*make_batch(5), max_deferred=1) for _ in range(3)]
            assert engine.stats()["queue_depth"] == 6
        for ticket, deferred in tickets:
            layer.sync(ticket, torch.zeros(5, H), deferred_ticket=deferred)
        stats = engine.stats()
        assert stats["submitted"] == stats["completed"] == 6
        assert (stats["deferred"], stats["deferred_untaken"], stats["max_queue_depth"]) == (3, 0, 6)
        assert stats["busy_ns"] > 0 and stats["queue_wait_ns"] > 0
        assert stats["bytes_out"] == 6 * 5 * H * 4
        trace = engine.trace()
        assert len(trace) == 6
        for job in trace:
            times = (job.submit_ns, job.queued_ns, job.start_ns, job.end_ns, job.woken_ns, job.synced_ns)
            assert list(times) == sorted(times) and 0 < job.sync_ns <= job.woken_ns
        assert sum(job.end_ns - job.start_ns for job in trace) == stats["busy_ns"]
        engine.export_trace(tmp_path / "trace.json")
        assert f"{engine.name}/layer" in (tmp_path / "trace.json").read_text()


def test_the_profiler_shows_the_ops():
    with new_engine() as engine:
        layer = add_layer(engine)
        with torch.profiler.profile() as profile:
            layer.sync(layer.submit(*make_batch(5))[0], torch.zeros(5, H))
    names = {event.name for event in profile.events()}
    assert {"moe_ops::cpu_moe_submit", "moe_ops::cpu_moe_sync"} <= names
