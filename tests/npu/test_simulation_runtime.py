"""The simulated runtime: memory that the host cannot read, asynchrony, callbacks and their rules."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from tests.npu.sim import loader

pytestmark = pytest.mark.simulation

POINTER = ctypes.c_void_p
CALLBACK = ctypes.CFUNCTYPE(None, POINTER)
acl = ctypes.CDLL("libascendcl.so")
acl.aclrtLaunchHostFunc.argtypes = [POINTER, CALLBACK, POINTER]
acl.aclrtLaunchCallback.argtypes = [CALLBACK, POINTER, ctypes.c_int, POINTER]
acl.aclrtSubscribeReport.argtypes = [ctypes.c_uint64, POINTER]
acl.aclrtUnSubscribeReport.argtypes = [ctypes.c_uint64, POINTER]
acl.aclrtMemcpy.argtypes = [POINTER, ctypes.c_size_t, POINTER, ctypes.c_size_t, ctypes.c_int]
acl.aclrtMemcpyAsync.argtypes = [POINTER, ctypes.c_size_t, POINTER, ctypes.c_size_t, ctypes.c_int, POINTER]


def test_host_code_cannot_read_device_memory() -> None:
    x = torch.ones(4).npu()
    torch.npu.synchronize()
    child = os.fork()
    if child == 0:
        ctypes.string_at(x.data_ptr(), 4)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) < 0


def test_fresh_memory_is_poisoned() -> None:
    torch.npu.empty_cache()
    x = torch.empty(1 << 20, device="npu")
    assert x.cpu().eq(x.cpu()[0]).all() and float(x[0]) > 1e38


def test_use_after_free_is_an_error() -> None:
    x = torch.ones(8 << 20, device="npu")
    torch.npu.synchronize()
    address, host = x.data_ptr(), torch.zeros(4)
    assert acl.aclrtMemcpy(host.data_ptr(), 16, address, 16, 2) == 0
    del x
    torch.npu.empty_cache()
    assert acl.aclrtMemcpy(host.data_ptr(), 16, address, 16, 2) == 507015


def test_copy_direction_is_checked() -> None:
    x, host = torch.ones(4).npu(), torch.zeros(4)
    assert acl.aclrtMemcpy(host.data_ptr(), 16, x.data_ptr(), 16, 1) == 107000


def test_asynchronous_copy_is_asynchronous() -> None:
    x, host = torch.full((16,), 7.0, device="npu"), torch.zeros(16).pin_memory()
    torch.npu.synchronize()
    with loader.task_delay(50_000):
        host.copy_(x, non_blocking=True)
        before = host[0].item()
        torch.npu.synchronize()
    assert (before, host[0].item()) == (0.0, 7.0)


def test_pageable_copy_cannot_be_captured(stream) -> None:
    """Called beside torch_npu, whose task queue would drop everything after this error."""
    x, pageable, pinned = torch.ones(4).npu(), torch.zeros(4), torch.zeros(4).pin_memory()
    torch.npu.synchronize()
    with torch.npu.graph(torch.npu.NPUGraph(), stream=stream):
        arguments = (16, x.data_ptr(), 16, 2, stream.npu_stream)
        assert acl.aclrtMemcpyAsync(pageable.data_ptr(), *arguments) == 107000
        assert acl.aclrtMemcpyAsync(pinned.data_ptr(), *arguments) == 0


def test_two_devices() -> None:
    a = torch.ones(3, device="npu:1") + 1
    assert a.device.index == 1 and a.cpu().tolist() == [2, 2, 2]
    assert a.to("npu:0").cpu().tolist() == [2, 2, 2]


def test_one_callback_thread_per_context() -> None:
    """A host function that waits for one queued later on another stream blocks it: the rule behind submit and sync."""
    waiting, released = threading.Event(), []
    wait = CALLBACK(lambda _: released.append(waiting.wait(0.3)))
    signal = CALLBACK(lambda _: waiting.set())
    first, second = torch.npu.Stream(), torch.npu.Stream()
    acl.aclrtLaunchHostFunc(first.npu_stream, wait, None)
    time.sleep(0.05)
    acl.aclrtLaunchHostFunc(second.npu_stream, signal, None)
    torch.npu.synchronize()
    assert released == [False]


def test_the_two_callback_mechanisms_exclude_each_other() -> None:
    nothing = CALLBACK(lambda _: None)
    subscribed, thread = torch.npu.Stream(), threading.get_ident()
    assert acl.aclrtLaunchCallback(nothing, None, 1, subscribed.npu_stream) == 107015
    assert acl.aclrtSubscribeReport(thread, subscribed.npu_stream) == 0
    assert acl.aclrtSubscribeReport(thread, subscribed.npu_stream) == 107011
    assert acl.aclrtLaunchHostFunc(subscribed.npu_stream, nothing, None) == 107011
    assert acl.aclrtUnSubscribeReport(thread, subscribed.npu_stream) == 0
    used = torch.npu.Stream()
    assert acl.aclrtLaunchHostFunc(used.npu_stream, nothing, None) == 0
    assert acl.aclrtSubscribeReport(thread, used.npu_stream) == 107011
    torch.npu.synchronize()  # `nothing` lives until it has run


def test_process_report_codes() -> None:
    assert acl.aclrtProcessReport(10) == 107012
    assert acl.aclrtProcessReport(0) == 107000
    stream, thread = torch.npu.Stream(), threading.get_ident()
    acl.aclrtSubscribeReport(thread, stream.npu_stream)
    assert acl.aclrtProcessReport(10) == 507012
    acl.aclrtUnSubscribeReport(thread, stream.npu_stream)


def test_acl_call_inside_a_callback_aborts_in_strict_mode() -> None:
    code = (
        "from tests.npu import device; device.load()\n"
        "import ctypes, torch\n"
        "acl = ctypes.CDLL('libascendcl.so'); P = ctypes.c_void_p; C = ctypes.CFUNCTYPE(None, P)\n"
        "acl.aclrtLaunchHostFunc.argtypes = [P, C, P]\n"
        "call = C(lambda _: acl.aclrtSynchronizeDevice())\n"
        "acl.aclrtLaunchHostFunc(torch.npu.Stream().npu_stream, call, None); torch.npu.synchronize()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0 and "FORBIDDEN: aclrtSynchronizeDevice" in done.stderr


def test_trace_names_tasks_and_waits() -> None:
    x = torch.ones(4).npu()
    torch.npu.synchronize()
    with loader.trace() as trace:
        y = x + x
        torch.npu.synchronize()
        y.cpu()
    assert "aclnnAdd" in trace.names("RUN") and "device" in trace.names("HOST")
