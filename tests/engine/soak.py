"""Engines under mixed load for as long as asked: every result is compared, memory, threads and files are watched.

    python -m tests.engine.soak --seconds 600 --seed 1

Two models of equal batch sizes and different widths in two engines (MXFP4, bfloat16), two threads that submit and sync
in random order with changing batch sizes and deferral, a layer whose jobs are made to fail, tickets that are discarded,
engines that close with work in flight, and hybrid layers whose residents change. Prints its figures as JSON.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
import threading
import time
from collections import Counter

import psutil
import torch

import moe_ops
from tests.engine.support import E, H, add_layer, expected, make_batch
from tests.support import make_experts

_ops = torch.ops.moe_ops
WIDE = 2 * H
numbers = itertools.count()


class Model:
    """Two layers of one engine with batches whose results are known, bit by bit."""

    def __init__(self, engine: moe_ops.CpuMoeEngine, hidden: int, weight_format: str, seed: int) -> None:
        self.layers = []
        for number in range(2):
            layer = engine.add_experts(
                f"{weight_format}-{hidden}-{number}", E, hidden, 64, w13_layout="gate_up", weight_format=weight_format
            )
            if weight_format == "bfloat16":
                g = torch.Generator().manual_seed(seed + number)
                weights = {
                    "w13": torch.randn(E, 128, hidden, generator=g) / 8,
                    "w2": torch.randn(E, hidden, 64, generator=g) / 8,
                }
            else:
                weights = make_experts(E, 64, hidden, seed + number)
            self.layers.append(layer.load(weights))
        self.batches = [make_batch(tokens, hidden=hidden, seed=seed + tokens) for tokens in (0, 1, 2, 5, 17, 40)]
        self.wanted = {}
        for number, late in itertools.product(range(2), range(3)):
            for index, batch in enumerate(self.batches):
                out = self.call(number, index, late)
                self.wanted[number, index, late] = out
                torch.testing.assert_close(
                    out,
                    expected(self.layers[number], batch, batch[0]),
                    rtol=2e-2,
                    atol=2e-2 * (1 + float(out.abs().amax() if out.numel() else 0)),
                )

    def submit(self, number: int, index: int, late: int):
        return self.layers[number].submit(*self.batches[index], max_deferred=late)

    def sync(self, number: int, index: int, tickets) -> torch.Tensor:
        return self.layers[number].sync(tickets[0], self.batches[index][0], deferred_ticket=tickets[1])

    def call(self, number: int, index: int, late: int) -> torch.Tensor:
        return self.sync(number, index, self.submit(number, index, late))


def traffic(models: list[Model], seed: int, end: float, counts: Counter) -> None:
    choose = random.Random(seed)
    open_: list[tuple] = []
    while time.monotonic() < end or open_:
        if time.monotonic() < end and len(open_) < 10 and choose.random() < 0.55:
            model = choose.choice(models)
            case = (choose.randrange(2), choose.randrange(len(model.batches)), choose.randrange(3))
            open_.append((model, case, model.submit(*case)))
            counts["submits"] += 1
        elif open_:
            model, case, tickets = open_.pop(choose.randrange(len(open_)))
            if choose.random() < 0.03:
                for ticket in tickets:
                    if int(ticket):
                        model.layers[case[0]].engine.discard(ticket)
                counts["discarded"] += 1
                continue
            out = model.sync(case[0], case[1], tickets)
            if not torch.equal(out, model.wanted[case]):
                raise AssertionError(f"other bits for {case}")
            counts["synced"] += 1


def failures(layer: moe_ops.CpuExperts, end: float, counts: Counter) -> None:
    batch = make_batch(3)
    wanted = layer.sync(layer.submit(*batch)[0], batch[0])
    while time.monotonic() < end:
        _ops._engine_inject_failures(layer.shared.handle, 1)
        ticket, _ = layer.submit(*batch)
        try:
            layer.sync(ticket, batch[0])
            raise AssertionError("an injected failure did not show")
        except RuntimeError as error:
            assert "injected failure" in str(error)
        assert torch.equal(layer.sync(layer.submit(*batch)[0], batch[0]), wanted)
        counts["failures"] += 1
        time.sleep(0.005)


def closing(end: float, counts: Counter) -> None:
    batch = make_batch(64)
    while time.monotonic() < end:
        engine = moe_ops.CpuMoeEngine(f"closing-{next(numbers)}", threads=1)
        layer = add_layer(engine)
        tickets = [layer.submit(*batch)[0] for _ in range(4)]
        layer.sync(tickets[0], batch[0])
        engine.close(drain=counts["closed"] % 2 == 0)
        counts["closed"] += 1
        time.sleep(0.02)


def moving(engine: moe_ops.CpuMoeEngine, seed: int, end: float, counts: Counter) -> None:
    choose = random.Random(seed)
    layer = moe_ops.HybridExperts(add_layer(engine, "moving"), 3)
    batch = make_batch(6)
    with torch.no_grad():
        wanted = layer(*batch)[0]
        while time.monotonic() < end:
            layer.place(choose.sample(range(E), choose.randrange(4)))
            torch.testing.assert_close(layer(*batch)[0], wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
            counts["placed"] += 1
            time.sleep(0.02)


def state(process: psutil.Process) -> dict[str, int]:
    gc.collect()
    return {"rss": process.memory_info().rss, "threads": process.num_threads(), "files": process.num_fds()}


def run(seconds: float, seed: int) -> dict[str, object]:
    torch.set_num_threads(1)
    counts: Counter = Counter()
    errors: list[BaseException] = []
    process = psutil.Process()
    begun = time.monotonic()
    end = begun + seconds
    with moe_ops.CpuMoeEngine("soak-a", threads=1) as first, moe_ops.CpuMoeEngine("soak-b", threads=1) as second:
        models = [Model(first, H, "mxfp4", seed), Model(first, WIDE, "mxfp4", seed), Model(second, H, "bfloat16", seed)]
        frail = add_layer(second, "frail")

        def guarded(function, *arguments) -> None:
            try:
                function(*arguments, end, counts)
            except BaseException as error:
                errors.append(error)

        work = [
            (traffic, models, seed),
            (traffic, models, seed + 1),
            (failures, frail),
            (closing,),
            (moving, first, seed + 2),
        ]
        threads = [threading.Thread(target=guarded, args=item) for item in work]
        for thread in threads:
            thread.start()
        time.sleep(min(seconds / 5, 30))  # until pools and arenas of the allocator have their size
        before, history = state(process), []
        while time.monotonic() < end and not errors:
            time.sleep(min(10, max(0.1, end - time.monotonic())))
            history.append(state(process)["rss"] - before["rss"])
        for thread in threads:
            thread.join(timeout=120)
        assert not any(thread.is_alive() for thread in threads), "a thread hangs"
        if errors:
            raise errors[0]
        for engine in (first, second):
            engine.wait_idle()
        after = state(process)
        stats = {engine.name: engine.stats() for engine in (first, second)}
    for name, values in stats.items():
        assert values["outstanding"] == 0 and values["deferred_untaken"] == 0, (name, values)
        assert values["submitted"] == values["completed"] + values["failed"] + values["cancelled"], (name, values)
    return {
        "seconds": round(time.monotonic() - begun),
        "load": round(os.getloadavg()[0], 1),
        **counts,
        "jobs": sum(values["completed"] for values in stats.values()),
        "busy_s": round(sum(values["busy_ns"] for values in stats.values()) / 1e9, 1),
        "max_queue_depth": max(values["max_queue_depth"] for values in stats.values()),
        "rss_grown_kib": (after["rss"] - before["rss"]) // 1024,
        "rss_grown_second_half_kib": (after["rss"] - before["rss"] - history[len(history) // 2]) // 1024,
        "rss_highest_kib": max(history) // 1024,
        "threads_grown": after["threads"] - before["threads"] if seconds else 0,
        "files_grown": after["files"] - before["files"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(json.dumps(run(options.seconds, options.seed)))


if __name__ == "__main__":
    main()
