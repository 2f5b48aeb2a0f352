"""Order, overlap, double buffering, deferral over layers, and several models at once.

Where a test is about order it holds the engine, so that it decides what happens first and no sleep is needed.
"""

from __future__ import annotations

import itertools
import random
import threading
import time

import pytest
import torch

import moe_ops
from tests.engine.support import E, H, K, add_layer, expected, make_batch, new_engine
from tests.support import assert_close, assert_same, make_experts

_ops = torch.ops.moe_ops


def close(actual, wanted):
    assert_close(actual, wanted, max_tol=5e-5, rms_tol=5e-6)


@pytest.fixture
def engine():
    with new_engine() as engine:
        yield engine


def test_submit_returns_before_its_job_has_run(engine):
    """With the engine held no job can run: everything up to the sync is done by the calling thread alone."""
    layer = add_layer(engine)
    batch = make_batch(8)
    with engine.hold():
        ticket, _ = layer.submit(*batch)
        device_out = batch[0] @ torch.eye(H)  # device experts
        assert not _ops._engine_is_done(int(ticket))
        assert engine.stats()["queue_depth"] == 1
    close(layer.sync(ticket, device_out), expected(layer, batch, device_out))


def test_sync_waits_for_its_job_and_lets_python_run(engine):
    layer = add_layer(engine)
    batch = make_batch(8)
    results = []
    with engine.hold():
        ticket, _ = layer.submit(*batch)
        waiting = threading.Thread(target=lambda: results.append(layer.sync(ticket, torch.zeros(8, H))))
        waiting.start()
        for _ in range(20):  # this loop runs at all only if the waiting sync has let go of the GIL
            time.sleep(0.005)
        assert not results
    waiting.join(timeout=30)
    close(results[0], expected(layer, batch))


def test_the_jobs_overlap_with_the_calling_thread(engine):
    """Wall-clock overlap: some interval of the caller's own work lies inside the job's interval on the engine."""
    layer = add_layer(engine, experts=8, hidden=512, inter=512)
    batch = make_batch(256, hidden=512, experts=8)
    layer.sync(layer.submit(*batch)[0], torch.zeros(256, 512))
    for _ in range(20):  # another process may steal the CPU: one clean try is enough
        ticket, _ = layer.submit(*batch)
        mine = []
        while not _ops._engine_is_done(int(ticket)):
            start = time.monotonic_ns()
            torch.mm(torch.ones(32, 32), torch.ones(32, 32))
            mine.append((start, time.monotonic_ns()))
        layer.sync(ticket, torch.zeros(256, 512))
        job = engine.trace()[-1]
        if any(job.start_ns < start and end < job.end_ns for start, end in mine):
            return
    pytest.fail("no work of the caller ran while a job ran")


def test_jobs_run_in_the_order_of_their_submits(engine):
    layers = [add_layer(engine, f"layer{i}") for i in range(3)]
    with engine.hold():
        tickets = []
        for i in (0, 2, 1, 0, 1):
            tickets += [int(t) for t in layers[i].submit(*make_batch(3, seed=i), max_deferred=1)]
        order = [0, 2, 1, 0, 1]
    engine.wait_idle()
    trace = engine.trace()
    assert [job.ticket for job in trace] == [ticket for ticket in tickets if ticket]
    assert [job.name.rsplit("layer", 1)[1] for job in trace if not job.deferred] == [str(i) for i in order]
    for before, after in itertools.pairwise(trace):
        assert before.end_ns <= after.start_ns
    engine.discard_unsynced()


def test_double_buffer(engine):
    """Many submits of one layer are in flight at once, and are synced in any order: no buffer is shared."""
    layer = add_layer(engine)
    batches = [make_batch(5, seed=seed) for seed in range(12)]
    wanted = [expected(layer, batch) for batch in batches]
    with engine.hold():
        tickets = [layer.submit(*batch)[0] for batch in batches]
    order = list(range(12))
    random.Random(0).shuffle(order)
    outs = {i: layer.sync(tickets[i], torch.zeros(5, H)) for i in order}
    for i, want in enumerate(wanted):
        close(outs[i], want)


def test_batch_size_changes_while_work_is_in_flight(engine):
    layer = add_layer(engine)
    sizes = [1, 7, 2, 40, 3, 0, 7, 1] * 13  # 104 steps, never two of a size in a row
    batches = {size: make_batch(size, seed=size) for size in set(sizes)}
    wanted = {size: expected(layer, batch) for size, batch in batches.items()}
    pending = []
    for size in sizes:
        pending.append((size, layer.submit(*batches[size])[0]))
        if len(pending) > 4:
            size, ticket = pending.pop(0)
            close(layer.sync(ticket, torch.zeros(size, H)), wanted[size])
    for size, ticket in pending:
        close(layer.sync(ticket, torch.zeros(size, H)), wanted[size])
    assert engine.stats()["outstanding"] == 0


@pytest.mark.parametrize("shared_engine", [True, False])
def test_models_of_equal_batch_size_and_different_widths(shared_engine):
    """A target and a draft model, interleaved: submits of one lie between submit and sync of the other."""
    with new_engine() as first, new_engine(threads=1) as second:
        target = [add_layer(first, f"target{i}", hidden=128, inter=64, seed=i) for i in range(2)]
        other = first if shared_engine else second
        draft = [add_layer(other, f"draft{i}", hidden=64, experts=4, seed=10 + i) for i in range(2)]
        for step in range(10):
            big = make_batch(6, hidden=128, seed=step)
            small = make_batch(6, hidden=64, experts=4, seed=step)
            for a, b in zip(target, draft, strict=True):
                ticket_a, later_a = a.submit(*big, max_deferred=1)
                ticket_b, later_b = b.submit(*small, max_deferred=2)
                close(a.sync(ticket_a, torch.zeros(6, 128), deferred_ticket=later_a), expected(a, big))
                close(b.sync(ticket_b, torch.zeros(6, 64), deferred_ticket=later_b), expected(b, small))


def test_callers_on_several_threads(engine):
    layers = [add_layer(engine, f"layer{i}", seed=i) for i in range(3)]
    wanted = [[expected(layer, make_batch(4, seed=s)) for s in range(5)] for layer in layers]
    errors = []

    def work(i: int) -> None:
        try:
            for step in range(60):
                batch = make_batch(4, seed=step % 5)
                ticket, _ = layers[i].submit(*batch)
                close(layers[i].sync(ticket, torch.zeros(4, H)), wanted[i][step % 5])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


class Stack:
    """Layers that pass deferred work on: what layer l defers is added by the next layer that runs."""

    def __init__(self, engine: moe_ops.CpuMoeEngine, count: int, max_deferred: int) -> None:
        self.layers = [add_layer(engine, f"layer{i}", seed=i) for i in range(count)]
        self.max_deferred = max_deferred

    def run(self, batches, skip=()) -> list[torch.Tensor]:
        outs, deferred = [], None
        for i, layer in enumerate(self.layers):
            if i in skip:
                continue
            last = i == len(self.layers) - 1
            zeros = torch.zeros(batches[i][0].shape)
            ticket, later = layer.submit(*batches[i], max_deferred=0 if last else self.max_deferred)
            outs.append(layer.sync(ticket, zeros, deferred_ticket=deferred))
            deferred = later
        assert int(deferred) == 0  # nothing is left at the last layer
        return outs

    def part(self, i: int, batch, late: bool) -> torch.Tensor:
        last = i == len(self.layers) - 1
        ids = torch.where(batch[1] < E, batch[1], -1)
        parts = moe_ops.select_deferred_experts(ids, batch[2], 0 if last else self.max_deferred)
        return expected(self.layers[i], (batch[0], parts[late], batch[2]))


@pytest.mark.parametrize("max_deferred", [0, 1, K])
@pytest.mark.parametrize("skip", [(), (1,), (1, 2)], ids=["all", "gap", "wide-gap"])
def test_deferred_work_arrives_one_layer_later(engine, max_deferred, skip):
    """Output of a layer: what it runs now plus what the layer before deferred, also over a gap of dense layers."""
    stack = Stack(engine, 5, max_deferred)
    batches = [make_batch(6, seed=i) for i in range(5)]
    outs = stack.run(batches, skip)
    carried = torch.zeros(6, H)
    ran = [i for i in range(5) if i not in skip]
    for out, i in zip(outs, ran, strict=True):
        close(out, stack.part(i, batches[i], late=False) + carried)
        carried = stack.part(i, batches[i], late=True)
    assert engine.stats()["deferred_untaken"] == 0
    assert engine.stats()["outstanding"] == 0


def test_the_numbers_of_the_deferral_example(engine):
    """Layer l gives 10 * (l + 1) now and l + 1 late: 10, 21, 32, and at the last layer, which defers nothing, 47."""
    layers = []
    for i in range(4):
        layer = engine.add_experts(
            f"constant{i}", 2, 32, 32, w13_layout="gate_up", w2_bias=True, weight_format="bfloat16"
        )
        bias = torch.stack([torch.full((32,), 10.0 * (i + 1)), torch.full((32,), float(i + 1))])
        zeros = {"w13": torch.zeros(2, 64, 32), "w2": torch.zeros(2, 32, 32), "w2_bias": bias}
        layers.append(layer.load(zeros))
    ids, weights = torch.tensor([[1, 0]]), torch.tensor([[1.0, 1.0]])
    x, outs, deferred = torch.zeros(1, 32), [], None
    weights = torch.tensor([[0.999999, 1.0]])  # expert 1, in slot 0, has the lower weight
    for i, layer in enumerate(layers):
        ticket, later = layer.submit(x, ids, weights, max_deferred=0 if i == 3 else 1)
        outs.append(layer.sync(ticket, torch.zeros(1, 32), deferred_ticket=deferred)[0, 0].round().item())
        deferred = later
    assert outs == [10.0, 21.0, 32.0, 47.0]


def test_a_deferred_job_does_not_hold_up_its_own_sync(engine):
    """The sync of a layer waits for the immediate job only: it returns although the deferred one is never started."""
    layer = add_layer(engine, experts=8, hidden=512, inter=512)
    batch = make_batch(512, hidden=512, experts=8)
    zeros = torch.zeros(512, 512)
    seen = False
    for _ in range(50):
        ticket, deferred = layer.submit(*batch, max_deferred=2)
        while engine.stats()["queue_depth"] == 2:  # until the immediate job has been started
            pass
        with engine.hold():
            if engine.stats()["queue_depth"] == 1:
                layer.sync(ticket, zeros)
                assert not _ops._engine_is_done(int(deferred))
                seen = True
        if not seen:  # this thread came too late: both had been started
            layer.sync(ticket, zeros)
        layer.sync(deferred, zeros)
        if seen:
            break
    assert seen


def test_lost_deferred_work_is_reported():
    engine = moe_ops.CpuMoeEngine("forgetful", threads=1)
    layer = add_layer(engine)
    ticket, deferred = layer.submit(*make_batch(4), max_deferred=1)
    layer.sync(ticket, torch.zeros(4, H))
    assert int(deferred) != 0 and engine.stats()["deferred_untaken"] == 1
    with pytest.warns(RuntimeWarning, match="'forgetful' was closed with 1 deferred results that no sync has taken"):
        engine.close()


def test_a_row_does_not_depend_on_its_batch_where_asked(engine):
    layer = engine.add_experts("invariant", E, H, 32, w13_layout="gate_up", batch_invariant=True)
    layer.load(make_experts(E, 32, H))
    x, ids, weights = make_batch(33, dtype=torch.bfloat16)
    whole = [layer.sync(t, torch.zeros(33, H)) for t in layer.submit(x, ids, weights, max_deferred=1)]
    for row in (0, 17, 32):
        alone = layer.submit(x[row : row + 1], ids[row : row + 1], weights[row : row + 1], max_deferred=1)
        for part, ticket in zip(whole, alone, strict=True):
            if int(ticket):
                assert_same(layer.sync(ticket, torch.zeros(1, H)), part[row : row + 1])
            else:
                assert not part[row].any()
