"""CPU experts: engines (threads and a queue) and the modules that name experts to the ops.

    engine = moe_ops.CpuMoeEngine("model")
    experts = engine.add_experts("layers.0", 64, 2048, 1024, w13_layout="gate_up")
    experts.load_expert(5, w13, w13_scale, w2, w2_scale)
    ticket, deferred = experts.submit(hidden_states, topk_ids, topk_weights)
    ...                                   # device experts
    out = experts.sync(ticket, device_out)

See docs/engine.md.
"""

from __future__ import annotations

import atexit
import json
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_ops._errors import require
from moe_ops._register import MISSING
from moe_ops.cpu_experts import CpuExperts, RegisteredExperts
from moe_ops.meta.fused_mxfp4_moe import W13_LAYOUTS, resolve_activation
from moe_ops.reference.cpu_moe_submit import EXPERTS

OP = "CpuMoeEngine"
_ops = torch.ops.moe_ops

# In the order of csrc/cpu/engine_admin.cpp engine_stats.
STATISTICS = (
    "submitted",
    "completed",
    "failed",
    "cancelled",
    "never_synced",
    "deferred",
    "deferred_untaken",
    "queue_depth",
    "max_queue_depth",
    "outstanding",
    "busy_ns",
    "sync_wait_ns",
    "queue_wait_ns",
    "bytes_in",
    "bytes_out",
)


@dataclass(frozen=True)
class Pool:
    """Threads of one NUMA pool: node (-1: not bound to one) and the CPU of each thread."""

    node: int
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class Job:
    """One finished job of an engine's trace; times are those of `time.monotonic_ns()`.

    submit_ns: the host's part of the submit began, on a stream once its inputs were staged. queued_ns: the job was in
    the queue. start_ns, end_ns: it ran. sync_ns: the host's part of its sync began to wait. woken_ns: that wait was
    over. synced_ns: the sync had the rows. The last three are 0 while no sync has taken the job.
    """

    name: str
    ticket: int
    submit_ns: int
    queued_ns: int
    start_ns: int
    end_ns: int
    sync_ns: int
    woken_ns: int
    synced_ns: int
    num_tokens: int
    deferred: bool


def set_synchronous(on: bool) -> None:
    """Make every submit wait for its job, as MOE_OPS_SYNC=1 in the environment does from the start; same bits."""
    _ops._engine_set_synchronous(on)


def is_synchronous() -> bool:
    return _ops._engine_synchronous()


def staging(device: int = 0) -> tuple[int, int]:
    """Pinned memory between a CUDA device and the engines of this process: (slots, bytes)."""
    slots, size = _ops._engine_staging(device).tolist()
    return slots, size


class CpuMoeEngine:
    """A queue of CPU-expert jobs, a thread that serves it, and a team of threads per NUMA pool.

    Jobs of one engine run in the order of their submits. Several engines do not disturb each other beyond sharing CPUs.

    Args:
        name: unique among the living engines of the process, without "/". Handles are made of it, so that they are
            the same in another process that builds the same engine.
        threads: threads of all pools together; None: one per CPU that the affinity mask and the cgroup quota grant,
            less one (of 4 CPUs or more) or two (of 16 or more) for the calling thread and the device's callbacks.
        numa_nodes: None: one pool per NUMA node; 0: one pool that ignores NUMA; n: the first n nodes; a list: these.
        max_jobs: submits of CPU tensors that may be outstanding, that is not synced, before a submit raises.
        system_root: where /sys and /proc are found.
    """

    def __init__(
        self,
        name: str,
        *,
        threads: int | None = None,
        numa_nodes: int | Sequence[int] | None = None,
        max_jobs: int = 256,
        system_root: str = "/",
    ) -> None:
        whole = threads is None or (isinstance(threads, int) and threads > 0)
        require(whole, OP, "threads", "None or at least 1", repr(threads))
        require(isinstance(max_jobs, int) and max_jobs > 0, OP, "max_jobs", "at least 1", repr(max_jobs))
        nodes: list[int] = []
        count = -1
        if isinstance(numa_nodes, int):
            require(numa_nodes >= 0, OP, "numa_nodes", "None, a count or a list of nodes", repr(numa_nodes))
            count = numa_nodes
        elif numa_nodes is not None:
            nodes = [int(node) for node in numa_nodes]
            require(len(nodes) > 0, OP, "numa_nodes", "None, a count or a list of nodes", repr(numa_nodes))
        self.name = name
        self._id = _ops._engine_create(name, threads or 0, count, nodes, max_jobs, str(system_root).rstrip("/") + "/")
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{sum(len(pool.cpus) for pool in self.pools)} threads"
        return f"CpuMoeEngine({self.name!r}, {state})"

    def __enter__(self) -> CpuMoeEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> CpuMoeEngine:
        return self  # threads are not copied: a copied model uses the same engine

    def __reduce__(self) -> Any:
        raise TypeError(f"{OP} '{self.name}' cannot be pickled: it owns threads. Its CpuExperts modules can be")

    @property
    def pools(self) -> tuple[Pool, ...]:
        return self._plan()[2]

    @property
    def usable_cpus(self) -> int:
        """CPUs that the affinity mask and the cgroup quota grant this process."""
        return self._plan()[0]

    def _plan(self) -> tuple[int, int, tuple[Pool, ...]]:
        values = _ops._engine_plan(self._id).tolist()
        usable, quota, count = values[:3]
        at, pools = 3, []
        for _ in range(count):
            node, size = values[at : at + 2]
            pools.append(Pool(node, tuple(values[at + 2 : at + 2 + size])))
            at += 2 + size
        return usable, quota, tuple(pools)

    def add_experts(
        self,
        name: str,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        w13_layout: str,
        weight_format: str = "mxfp4",
        activation: str = "silu",
        swiglu_limit: float | None = None,
        swiglu_alpha: float | None = None,
        w13_bias: bool = False,
        w2_bias: bool = False,
        batch_invariant: bool = False,
    ) -> CpuExperts:
        """Register the experts of one layer, none of which is loaded yet. Address space is reserved for all of them;
        only those that are loaded take memory.

        name: unique within the engine, such as "layers.3".
        weight_format: "mxfp4" or "bfloat16". The other arguments are those of `fused_mxfp4_moe`.
        """
        require(num_experts > 0, OP, "num_experts", "at least 1", str(num_experts))
        require(w13_layout in W13_LAYOUTS, OP, "w13_layout", "'gate_up', 'up_gate' or 'interleaved'", repr(w13_layout))
        formats = ("mxfp4", "bfloat16")
        require(weight_format in formats, OP, "weight_format", "'mxfp4' or 'bfloat16'", repr(weight_format))
        kind, limit, alpha = resolve_activation(OP, activation, swiglu_limit, swiglu_alpha)
        handle = _ops._engine_add_experts(
            self._id,
            name,
            num_experts,
            hidden_size,
            intermediate_size,
            weight_format == "bfloat16",
            w13_layout,
            kind == "swiglu_oai",
            limit,
            alpha,
            w13_bias,
            w2_bias,
            batch_invariant,
        )
        options = {"activation": activation, "swiglu_limit": swiglu_limit, "swiglu_alpha": swiglu_alpha}
        shared = RegisteredExperts(
            f"{self.name}/{name}",
            handle,
            num_experts,
            hidden_size,
            intermediate_size,
            w13_layout,
            weight_format,
            w13_bias,
            w2_bias,
            options,
        )
        shared.engine = self
        EXPERTS[handle] = shared
        # Garbage collection of the last module gives the weights back; queued jobs keep them until they have run.
        weakref.finalize(shared, _remove_experts, handle, self._id).atexit = False
        return CpuExperts(shared)

    def check(self) -> None:
        """Raise the error of a job that failed on a stream, if there is one: there its sync cannot raise."""
        _ops._engine_check(self._id)

    def stats(self) -> dict[str, int]:
        """Counters since the engine was made: jobs, nanoseconds of work and waiting, bytes in and out, queue depth."""
        return dict(zip(STATISTICS, _ops._engine_stats(self._id).tolist(), strict=True))

    def trace(self) -> list[Job]:
        """The last 1024 jobs that ran."""
        numbers, names = _ops._engine_trace(self._id)
        jobs = []
        for row, name in zip(numbers.tolist(), names, strict=True):
            text = bytes(name.tolist()).split(b"\0", 1)[0].decode(errors="replace")
            jobs.append(Job(text, *row[:-1], deferred=bool(row[-1])))  # type: ignore[misc]
        return jobs

    def export_trace(self, path: str | Path) -> None:
        """Write the trace in the Chrome format that torch.profiler also writes (one row per engine)."""
        events: list[dict[str, Any]] = [
            {"ph": "X", "name": job.name, "pid": f"engine {self.name}", "tid": "deferred" if job.deferred else "jobs"}
            | {"ts": job.start_ns / 1e3, "dur": (job.end_ns - job.start_ns) / 1e3}
            | {"args": {"tokens": job.num_tokens, "queued_us": (job.start_ns - job.queued_ns) / 1e3}}
            for job in self.trace()
        ]
        events += [
            {"ph": "X", "name": f"sync {job.name}", "pid": f"engine {self.name}", "tid": "syncs"}
            | {"ts": job.sync_ns / 1e3, "dur": (job.synced_ns - job.sync_ns) / 1e3}
            for job in self.trace()
            if job.sync_ns
        ]
        Path(path).write_text(json.dumps({"traceEvents": events}))

    def wait_idle(self) -> None:
        """Wait until every job submitted so far has run."""
        _ops._engine_wait_idle(self._id)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Queue jobs and start none, for tests and debugging. A sync inside waits until another thread ends it."""
        _ops._engine_hold(self._id, True)
        try:
            yield
        finally:
            if not self._closed:
                _ops._engine_hold(self._id, False)

    def discard(self, ticket: Tensor) -> None:
        """Free a job that will not be synced (reads the ticket, so that a device stream is waited for)."""
        _ops._engine_discard(int(ticket.item()))

    def discard_unsynced(self) -> int:
        """Free every job whose ticket no sync has taken; returns how many."""
        return _ops._engine_discard_unsynced(self._id)

    def close(self, *, drain: bool = False) -> None:
        """Stop the threads and free everything.

        The job that runs finishes. Queued jobs fail, so that syncs that wait for them raise, or run first with `drain`.
        Jobs that nobody has synced are freed; deferred results among them are reported by a warning.
        """
        if self._closed:
            return
        self._closed = True
        try:
            untaken = self.stats()["deferred_untaken"]
        except RuntimeError:  # closed by the interpreter's exit, or made before a fork
            untaken = 0
        _ops._engine_close(self._id, drain)
        if untaken:
            warnings.warn(
                f"engine '{self.name}' was closed with {untaken} deferred results that no sync has taken",
                RuntimeWarning,
                stacklevel=2,
            )


def _remove_experts(handle: int, engine: int) -> None:
    _ops._engine_remove_experts(handle, engine)


if ("_engine_close_all", "CompositeExplicitAutograd") not in MISSING:
    atexit.register(_ops._engine_close_all)
