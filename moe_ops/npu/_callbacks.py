"""Host functions in stream order: which of CANN's mechanisms runs them on a stream.

1. aclrtLaunchHostFunc needs nothing. A stream that somebody has subscribed refuses it (107011), and a stream that has
   seen it can be subscribed by nobody, so that it is left out where the application declares that it subscribes.
2. aclrtLaunchCallback runs on the thread that subscribed to the stream; 107015 says that nobody has. Then a worker
   thread of this module subscribes, unless MOE_OPS_NPU_EXTERNAL_SUBSCRIBER=1 declares that the application does that.
3. Neither: the stream is waited for on the host and the function called there, with one warning. Inside a capture that
   is refused, since it would read data that is not there yet and be absent from the graph.

MOE_OPS_NPU_CALLBACKS=callback leaves out the first as well. MOE_OPS_SYNC=1 forces the third without the warning.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import warnings

from moe_ops.npu import _native
from moe_ops.npu._native import CALLBACK_BLOCKS_STREAM, STREAM_NOT_SUBSCRIBED, STREAM_SUBSCRIBED_OTHERWISE, SUCCESS

_REPORT_MS = 100
_START_S = 5.0


class ReportWorker:
    """A thread that subscribes to streams of one ACL context and pumps their callbacks, which hold no GIL."""

    def __init__(self, context: int) -> None:
        self._context = context
        self._streams: set[int] = set()
        self._ready, self._wake, self._stop = threading.Event(), threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="moe_ops_report", daemon=True)
        self._failure = 0

    def start(self) -> bool:
        self._thread.start()
        return self._ready.wait(_START_S) and self._failure == SUCCESS

    def _run(self) -> None:
        acl = _native.runtime()
        self._failure = acl.aclrtSetCurrentContext(self._context)
        self._ready.set()
        if self._failure != SUCCESS:
            return
        self._wake.wait()  # asleep until the first subscription
        while not self._stop.is_set():
            acl.aclrtProcessReport(_REPORT_MS)
        with self._lock:
            # What was queued before the end: a stream whose callback never runs would never move on. Each callback
            # lets its stream go on to the next, so that nothing for a while is the end.
            while self._streams and acl.aclrtProcessReport(_REPORT_MS) == SUCCESS:
                pass
            for stream in self._streams:
                acl.aclrtUnSubscribeReport(threading.get_ident(), stream)
            self._streams.clear()

    def subscribe(self, stream: int) -> int:
        """The ACL code. Called where the runtime says that the stream has no subscriber: a handle that is known here
        already belongs to a stream that was destroyed."""
        thread = self._thread.ident
        assert thread is not None
        with self._lock:
            code = _native.runtime().aclrtSubscribeReport(thread, stream)
            if code == SUCCESS:
                self._streams.add(stream)
                self._wake.set()
            return code

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()
        self._thread.join()


_workers: dict[int, ReportWorker | None] = {}
_workers_lock = threading.Lock()


def _worker() -> ReportWorker | None:
    """The worker of the current context, started at its first use; None where it cannot run."""
    context = ctypes.c_void_p()
    if _native.runtime().aclrtGetCurrentContext(ctypes.byref(context)) != SUCCESS or not context.value:
        return None
    with _workers_lock:
        if context.value not in _workers:
            # Here and not at import: handlers run in reverse order, and this one must run before torch_npu's own, which
            # gives up the runtime, also where torch_npu was imported after this module.
            atexit.unregister(stop_workers)
            atexit.register(stop_workers)
            worker = ReportWorker(context.value)
            _workers[context.value] = worker if worker.start() else None
        return _workers[context.value]


def stop_workers() -> None:
    with _workers_lock:
        for worker in _workers.values():
            if worker is not None:
                worker.stop()
        _workers.clear()


def external_subscriber() -> bool:
    return os.environ.get("MOE_OPS_NPU_EXTERNAL_SUBSCRIBER", "0") not in ("", "0")


def only_callbacks() -> bool:
    return external_subscriber() or os.environ.get("MOE_OPS_NPU_CALLBACKS", "auto") == "callback"


def launch(op: str, stream: int, function: str, call: int) -> bool:
    """Queue an engine function on a stream. False where no mechanism works: the caller then runs it on the host."""
    acl, address = _native.runtime(), _native.engine().address(function)
    if acl.has("aclrtLaunchHostFunc") and not only_callbacks():
        code = acl.aclrtLaunchHostFunc(stream, address, call)
        if code == SUCCESS:
            return True
        if code != STREAM_SUBSCRIBED_OTHERWISE:
            _native.require_success(op, "aclrtLaunchHostFunc", code)
    if not acl.has("aclrtLaunchCallback"):
        return _degrade("this CANN has no aclrtLaunchCallback")
    code = acl.aclrtLaunchCallback(address, call, CALLBACK_BLOCKS_STREAM, stream)
    if code == STREAM_NOT_SUBSCRIBED:
        if external_subscriber():
            raise RuntimeError(
                f"{op}: MOE_OPS_NPU_EXTERNAL_SUBSCRIBER is set, but nobody has subscribed to this stream (ACL error "
                f"{code}): subscribe it before the call, or unset the variable"
            )
        worker = _worker()
        if worker is None:
            return _degrade("the thread that dispatches callbacks could not be started")
        subscribed = worker.subscribe(stream)
        if subscribed != SUCCESS:
            return _degrade(f"the stream cannot be subscribed (ACL error {subscribed})")
        code = acl.aclrtLaunchCallback(address, call, CALLBACK_BLOCKS_STREAM, stream)
    _native.require_success(op, "aclrtLaunchCallback", code)
    return True


def _degrade(reason: str) -> bool:
    if external_subscriber():
        raise RuntimeError(f"cpu_moe: callbacks are left to the application, and {reason}")
    warnings.warn(f"moe_ops: CPU experts run synchronously on this device: {reason}", RuntimeWarning, stacklevel=4)
    return False
