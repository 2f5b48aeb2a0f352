"""Route preparation: metadata against plain PyTorch, the paths of prepare_topk_route, and the overlap of the gather.

    python -m benchmarks.bench_route [--device cpu|cuda] [--out FOLDER]

Three tables, in microseconds (median of the calls; on CUDA the device time of a synchronised call, host included):

metadata   from ids to the eight descriptor tensors: `bincount` is what is usually written (bincount, then cumsums
over the
           gathered table), `ours` is count_tokens and the route_metadata op. Ids are int64, uniform over the experts.
prepare    one call of prepare_topk_route on one rank, without and with workspace: descriptors built on the host, on the
           device, or taken from the route cache; T tokens of 64 float32.
overlap    two gloo processes (CPU): the count gather alone, the permutation alone, one after the other, and as
           prepare_topk_route does it, the gather in flight during the permutation. `late` delays the start of rank 1,
           as a slower rank or network does; times are those of rank 0, so that a hidden gather shows.

Every row is timed only after its numbers were checked.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_ops import ops
from moe_ops.distributed import RouteSpec, Workspace, collectives, prepare_topk_route
from moe_ops.distributed.route import count_tokens
from moe_ops.reference.route_metadata import route_metadata as plain_metadata

TOP_K = 8


def microseconds(call: Callable[[], object], device: torch.device, seconds: float = 0.3) -> float:
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 8 or (time.perf_counter() < end and len(times) < 2000):
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[len(times) // 4 :]) * 1e6


def metadata_rows(device: torch.device) -> list[dict[str, Any]]:
    rows = []
    for ranks, experts in ((8, 128), (8, 256), (64, 256), (256, 256)):
        ids = torch.randint(0, experts, (512, TOP_K), device=device)
        table = torch.randint(0, 99, (ranks, experts), dtype=torch.int32, device=device)

        def ours(ids: torch.Tensor = ids, table: torch.Tensor = table, experts: int = experts) -> Any:
            table[0] = count_tokens(ids, experts)
            return ops.route_metadata(table, 0)

        def bincount(ids: torch.Tensor = ids, table: torch.Tensor = table, experts: int = experts) -> Any:
            table[0] = torch.bincount(ids.reshape(-1), minlength=experts)
            return plain_metadata(table, 0)

        assert all(torch.equal(left, right) for left, right in zip(ours(), bincount(), strict=True))
        found = {name: microseconds(call, device) for name, call in (("ours", ours), ("bincount", bincount))}
        found["argsort alone"] = microseconds(lambda ids=ids: torch.argsort(ids.reshape(-1), stable=True), device)
        rows.append({"ranks": ranks, "experts": experts, **{name: round(us, 1) for name, us in found.items()}})
    return rows


def prepare_rows(device: torch.device) -> list[dict[str, Any]]:
    rows = []
    for tokens, experts in ((1, 64), (64, 64), (64, 256), (64, 1024), (64, 2048), (64, 4096), (4096, 256)):
        spec = RouteSpec(experts, TOP_K, 64)
        hidden_states = torch.randn(tokens, 64, device=device)
        ids = torch.rand(tokens, experts, device=device).topk(TOP_K).indices
        weights = torch.rand(tokens, TOP_K, device=device)
        workspace = Workspace(device)

        def plain() -> Any:
            return prepare_topk_route(hidden_states, ids, weights, spec)  # noqa: B023

        def cached() -> Any:
            with workspace.lease("benchmark"):  # noqa: B023
                return prepare_topk_route(hidden_states, ids, weights, spec, workspace=workspace)  # noqa: B023

        with torch.inference_mode():
            first, again = plain(), [cached() for _ in range(3)][-1]
            for name in ("dispatch_src", "dispatch_dst", "dispatch_size", "group_ends"):
                assert torch.equal(getattr(first.metadata, name), getattr(again.metadata, name))
            permutation = microseconds(lambda: ops.topk_permute(hidden_states, ids, experts), device)  # noqa: B023
            built, reused = microseconds(plain, device), microseconds(cached, device)
        path = "host" if experts <= 1024 else "device"
        hits = "cache" if workspace.route_cache.hits else "no cache"
        rows.append(
            {"tokens": tokens, "experts": experts, "descriptors": path, "permutation": round(permutation, 1)}
            | {"prepare": round(built, 1), "with workspace": round(reused, 1), "workspace": hits}
        )
    return rows


def _overlap_worker(rank: int, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timeout)
    group, experts = dist.group.WORLD, 256
    assert group is not None
    for tokens, hidden, late_us in (
        (64, 2048, 0),
        (512, 2048, 0),
        (512, 2048, 2000),
        (2048, 2048, 0),
        (2048, 2048, 10000),
    ):
        hidden_states = torch.randn(tokens, hidden).bfloat16()
        ids = torch.rand(tokens, experts).topk(TOP_K).indices
        weights = torch.rand(tokens, TOP_K)
        counts = torch.cat((torch.zeros(3, dtype=torch.int32), count_tokens(ids, experts)))
        spec = RouteSpec(experts, TOP_K, hidden, group)

        def gather(counts: torch.Tensor = counts) -> Any:
            return collectives.wait(collectives.start_all_gather(counts, group))

        def permute(hidden_states: torch.Tensor = hidden_states, ids: torch.Tensor = ids) -> Any:
            return ops.topk_permute(hidden_states, ids, experts)

        def both(counts: torch.Tensor = counts, permute: Callable[[], Any] = permute) -> Any:
            pending = collectives.start_all_gather(counts, group)
            permute()
            return collectives.wait(pending)

        def prepare(arguments: tuple = (hidden_states, ids, weights, spec)) -> Any:
            return prepare_topk_route(*arguments)

        def serial(gather: Callable[[], Any] = gather, permute: Callable[[], Any] = permute) -> Any:
            gather()
            permute()

        row: dict[str, Any] = {"tokens": tokens, "hidden": hidden, "late_us": late_us}
        for name, call in (
            ("gather", gather),
            ("permutation", permute),
            ("one after the other", serial),
            ("overlapped", both),
            ("prepare_topk_route", prepare),
        ):
            times = []
            with torch.inference_mode():
                for _ in range(40):
                    dist.barrier()
                    begin = time.perf_counter()
                    if rank == 1:
                        while (time.perf_counter() - begin) * 1e6 < late_us:
                            time.sleep(late_us / 1e7)
                    call()
                    times.append(time.perf_counter() - begin)
            row[name] = round(statistics.median(times[10:]) * 1e6, 1)
        results.put((rank, row))
    dist.barrier()
    dist.destroy_process_group()


def overlap_rows() -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    results, store = context.Queue(), tempfile.mktemp()
    workers = [context.Process(target=_overlap_worker, args=(rank, store, results)) for rank in range(2)]
    for worker in workers:
        worker.start()
    rows = [results.get(timeout=120) for _ in range(10)]
    for worker in workers:
        worker.join()
    return [row for rank, row in rows if rank == 0]


def show(name: str, rows: list[dict[str, Any]], folder: Path | None) -> None:
    print(f"\n{name}\n| {' | '.join(rows[0])} |\n{'|---' * len(rows[0])}|")
    for row in rows:
        print(f"| {' | '.join(str(value) for value in row.values())} |")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"route_{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    print(f"{device}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    show("metadata", metadata_rows(device), options.out)
    show("prepare", prepare_rows(device), options.out)
    if device.type == "cpu" and dist.is_gloo_available():
        show("overlap", overlap_rows(), options.out)


if __name__ == "__main__":
    main()
