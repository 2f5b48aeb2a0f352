"""What submit and sync share: the stream, raw copies on it, and the call object on its way to the host function."""

from __future__ import annotations

import ctypes

import torch

from moe_ops.npu import _callbacks, _native, _staging
from moe_ops.npu._device import runtime
from moe_ops.npu._staging import CapturedGraph, Slot

_ERROR_BYTES = 400


def raise_stream_errors(op: str) -> None:
    """A job that failed on a stream can only be reported by a later call."""
    text = ctypes.create_string_buffer(_ERROR_BYTES)
    found = _native.engine().moe_ops_take_error(0, text, _ERROR_BYTES)
    if found:
        more = f" (and {found - 1} more)" if found > 1 else ""
        raise RuntimeError(f"{op}: an earlier call on a stream failed: {text.value.decode()}{more}")


class Coupling:
    """One submit or sync on the current stream of the current device.

    Copies go to the runtime directly, in stream order: reading the stream's handle waits until torch_npu has issued
    what it has queued.
    """

    def __init__(self, op: str, kind: str, size: int, what: str) -> None:
        self.op = op
        self._engine = _native.engine(op)
        raise_stream_errors(op)
        self.stream: int = runtime().current_stream().npu_stream
        self.graph: CapturedGraph | None = _staging.captured_graph(op, self.stream)
        self.synchronous = bool(self._engine.moe_ops_synchronous())
        if self.graph is not None and self.synchronous:
            self._refuse_capture("synchronous mode (MOE_OPS_SYNC)")
        self.slot: Slot = _staging.take_slot(op, kind, runtime().current_device(), size, what, self.graph, self.stream)
        self._call: int | None = None

    def _refuse_capture(self, what: str) -> None:
        raise RuntimeError(f"{self.op}: {what} cannot be captured: the CPU experts would run now, and not in the graph")

    @property
    def arena(self) -> int | None:
        return None if self.graph is None else self.graph.arena

    def __enter__(self) -> Coupling:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self.graph is not None:
            return  # the graph owns the slot and the call
        if self._call is not None:
            self._engine.moe_ops_call_destroy(self._call)
        _staging.mark_in_flight(self.slot)

    def constant(self, value: int) -> int:
        """Address of a number that the call reads when it runs; calls of a graph share their slot, not these."""
        if self.graph is None:
            number = ctypes.c_int64.from_address(self.slot.handle)
        else:
            number = ctypes.c_int64()
            self.graph.constants.append(number)
        number.value = value
        return ctypes.addressof(number)

    def to_host(self, address: int, tensor: torch.Tensor) -> None:
        """`tensor` is contiguous and on the device."""
        if tensor.numel():
            size = tensor.numel() * tensor.element_size()
            self._copy(address, tensor.data_ptr(), size, _native.DEVICE_TO_HOST)

    def to_device(self, tensor: torch.Tensor, address: int) -> None:
        if tensor.numel():
            size = tensor.numel() * tensor.element_size()
            self._copy(tensor.data_ptr(), address, size, _native.HOST_TO_DEVICE)

    def _copy(self, to: int, source: int, size: int, kind: int) -> None:
        code = _native.runtime().aclrtMemcpyAsync(to, size, source, size, kind, self.stream)
        _native.require_success(self.op, "aclrtMemcpyAsync", code)

    def own(self, call: int | None) -> None:
        """Take a call object from the engine."""
        if not call:
            raise RuntimeError(self._engine.moe_ops_last_error().decode())
        self._call = call

    def run(self, function: str) -> None:
        """Run the engine's function in stream order."""
        assert self._call is not None
        if not self.synchronous and _callbacks.launch(self.op, self.stream, function, self._call):
            self._call = None
            return
        if self.graph is not None:
            self._refuse_capture("a device without host callbacks")
        self.synchronous = True
        code = _native.runtime().aclrtSynchronizeStream(self.stream)
        _native.require_success(self.op, "aclrtSynchronizeStream", code)
        call, self._call = self._call, None
        getattr(self._engine, function)(call)
