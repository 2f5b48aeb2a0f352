"""Processes that form a gloo group and run functions that a test sends them; torch is imported once for all of them."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
# _dynamo: functional collectives import it at the first call, which takes seconds in each process.
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "moe_ops", "moe_ops.distributed"])


def _worker(rank: int, world_size: int, store: str, group_timeout: float, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=group_timeout),
    )
    while True:
        job = pipe.recv()
        if job is None:
            break
        function, arguments = job
        try:
            pipe.send(("value", function(*arguments)))
        except BaseException as error:  # the test decides what an error means
            pipe.send(("error", type(error).__name__, str(error), traceback.format_exc()))
    dist.destroy_process_group()


class Cluster:
    """`run(function, *arguments)` calls a module-level function on every rank and returns the list of its results."""

    def __init__(self, world_size: int, group_timeout: float = 15.0) -> None:
        self.world_size = world_size
        self.group_timeout = group_timeout
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def _start(self) -> None:
        store = tempfile.mktemp(prefix="moe_ops_gloo_")
        for rank in range(self.world_size):
            mine, theirs = _CONTEXT.Pipe()
            arguments = (rank, self.world_size, store, self.group_timeout, theirs)
            process = _CONTEXT.Process(target=_worker, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)

    def outcomes(self, function: Callable[..., Any], *arguments: Any, timeout: float = 90.0) -> list[tuple]:
        """Per rank ("value", result), ("error", type, message, traceback) or ("died",); a hang fails the test."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, arguments))
        deadline = time.monotonic() + timeout
        results: list[tuple] = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                self.stop()
                raise AssertionError(
                    f"rank {rank} of {self.world_size} still runs {function.__name__} after {timeout} s"
                )
            try:
                results.append(pipe.recv())
            except EOFError:
                results.append(("died",))
        if any(result[0] != "value" for result in results):
            self.stop()  # its group may be unusable; the next call starts a new one
        return results

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 90.0) -> list[Any]:
        results = self.outcomes(function, *arguments, timeout=timeout)
        for rank, result in enumerate(results):
            if result[0] == "error":
                raise AssertionError(f"rank {rank} of {self.world_size}:\n{result[3]}")
            assert result[0] == "value", f"rank {rank} of {self.world_size} died"
        return [result[1] for result in results]

    def stop(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # a rank that died has closed its end
                pipe.send(None)
            pipe.close()
        for process in self._processes:
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []
