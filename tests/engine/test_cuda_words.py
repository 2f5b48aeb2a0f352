"""Eager calls on CUDA streams: words that a thread of ours looks at, and a kernel that waits for its answer."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from tests.engine.support import add_layer, make_batch, new_engine
from tests.support import assert_same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.unpoisoned,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def in_new_process(script: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", textwrap.dedent(script)]
    environment = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)


def test_host_functions_give_the_same_bits():
    """The driver's threads in place of ours: a setting of the process."""
    script = """
        import torch, moe_ops
        from tests.engine.support import add_layer, make_batch, new_engine
        with new_engine() as engine:
            layer = add_layer(engine, "layer", seed=0)
            moved = add_layer(engine, "moved", seed=0).cuda()
            for seed in range(40):
                x, ids, weights = make_batch(1 + seed % 7, seed=seed)
                wanted = layer.sync(layer.submit(x, ids, weights)[0], x)
                there = [tensor.cuda() for tensor in (x, ids, weights)]
                out = moved.sync(moved.submit(*there)[0], there[0])
                assert torch.equal(out.cpu(), wanted)
            torch.cuda.synchronize()
            assert engine.stats()["outstanding"] == 0
    """
    for value in ("1", "0"):
        done = in_new_process(script, MOE_OPS_HOST_FUNCTIONS=value)
        assert done.returncode == 0, done.stderr


def test_blocking_launches():
    """With CUDA_LAUNCH_BLOCKING=1 the launch of a sync returns when its rows are there."""
    script = """
        import torch, moe_ops
        from tests.engine.support import add_layer, make_batch, new_engine
        with new_engine() as engine:
            layer = add_layer(engine, "layer", seed=0).cuda()
            x, ids, weights = (tensor.cuda() for tensor in make_batch(4, seed=1))
            for _ in range(20):
                layer.sync(layer.submit(x, ids, weights)[0], x)
    """
    done = in_new_process(script, CUDA_LAUNCH_BLOCKING="1")
    assert done.returncode == 0, done.stderr


def test_a_process_ends_while_a_sync_waits():
    """The kernel that waits for rows must not keep the process: its job is held and never runs."""
    script = """
        import torch, moe_ops
        from tests.engine.support import add_layer, make_batch
        engine = moe_ops.CpuMoeEngine("ends", threads=2)
        layer = add_layer(engine, "layer", seed=0).cuda()
        x, ids, weights = (tensor.cuda() for tensor in make_batch(4, seed=1))
        layer.sync(layer.submit(x, ids, weights)[0], x)
        torch.cuda.synchronize()
        torch.ops.moe_ops._engine_hold(engine._id, True)
        out = layer.sync(layer.submit(x, ids, weights)[0], x)
        print("waiting", flush=True)
    """
    done = in_new_process(script)
    assert done.returncode == 0 and "waiting" in done.stdout, done.stderr


def test_calls_that_wait_do_not_hold_up_others():
    """A sync whose job cannot run yet, and calls of another engine on another stream."""
    with new_engine() as held, new_engine() as free:
        slow, fast = add_layer(held, "layer", seed=0).cuda(), add_layer(free, "layer", seed=0).cuda()
        batch = [tensor.cuda() for tensor in make_batch(5, seed=3)]
        wanted = fast.sync(fast.submit(*batch)[0], batch[0])
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with held.hold():
            with torch.cuda.stream(side):
                late = slow.sync(slow.submit(*batch)[0], batch[0])
            for _ in range(5):
                assert_same(fast.sync(fast.submit(*batch)[0], batch[0]), wanted)
            assert not side.query()
        side.synchronize()
        assert_same(late, wanted)


def processor_seconds() -> float:
    """Of the threads of the engines and of the one that looks at words."""
    ticks = 0
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith("moe-"):
            fields = (task / "stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_nothing_runs_between_calls():
    with new_engine() as engine:
        layer = add_layer(engine, "layer", seed=0).cuda()
        batch = [tensor.cuda() for tensor in make_batch(5, seed=3)]
        for _ in range(20):
            layer.sync(layer.submit(*batch)[0], batch[0])
        torch.cuda.synchronize()
        names = {(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
        assert "moe-doorbells" in names
        before = processor_seconds()
        time.sleep(4)
        assert processor_seconds() - before < 0.04
