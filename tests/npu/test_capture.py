"""Streams, events and graph capture as torch_npu and CANN define them: what the ops are written against."""

from __future__ import annotations

import threading
import time

import pytest
import torch

torch_npu = pytest.importorskip("torch_npu")


def capture(function, stream: torch.npu.Stream, mode: str = "global") -> torch.npu.NPUGraph:
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, stream=stream, capture_error_mode=mode):
        function(stream)
    return graph


def test_event_orders_streams() -> None:
    first, second, gate = torch.npu.Stream(), torch.npu.Stream(), threading.Event()
    torch_npu.npu._subscribe_report(first)
    a = torch.zeros(64, device="npu")
    torch.npu.synchronize()
    event = torch.npu.Event()
    with torch.npu.stream(first):
        torch_npu.npu._launch_host_func(first, lambda _: gate.wait(5), ())
        a.add_(5)
        event.record(first)
    with torch.npu.stream(second):
        second.wait_event(event)
        b = a * 2
    time.sleep(0.05)
    assert not event.query() and not second.query()
    gate.set()
    second.synchronize()
    assert b.cpu().unique().tolist() == [10]
    torch_npu.npu._unsubscribe_report(first)


def test_replay_sees_new_inputs(stream) -> None:
    x, source, result = torch.zeros(4, device="npu"), torch.zeros(4).pin_memory(), torch.zeros(4).pin_memory()
    torch.npu.synchronize()

    def work(_) -> None:
        x.copy_(source, non_blocking=True)
        result.copy_(x + 1, non_blocking=True)

    graph = capture(work, stream)
    assert result.tolist() == [0] * 4
    for value in (1.0, 7.0):
        source.fill_(value)
        graph.replay()
        torch.npu.synchronize()
        assert result.tolist() == [value + 1] * 4


def test_fork_without_join(stream) -> None:
    x, side = torch.ones(4, device="npu"), torch.npu.Stream()
    torch.npu.synchronize()

    def fork(origin) -> None:
        side.wait_stream(origin)
        with torch.npu.stream(side):
            x.add_(1)

    with pytest.raises(RuntimeError, match="107025"):
        capture(fork, stream)


def test_fork_and_join(stream) -> None:
    x, side = torch.ones(4, device="npu"), torch.npu.Stream()
    torch.npu.synchronize()

    def fork(origin) -> None:
        side.wait_stream(origin)
        with torch.npu.stream(side):
            x.add_(1)
        origin.wait_stream(side)

    graph = capture(fork, stream)
    graph.replay()
    torch.npu.synchronize()
    assert x.tolist() == [2] * 4


def test_event_from_outside_the_capture(stream) -> None:
    x, event = torch.ones(4, device="npu"), torch.npu.Event()
    event.record()
    torch.npu.synchronize()
    with pytest.raises(RuntimeError, match="107024"):
        capture(lambda origin: (origin.wait_event(event), x.add_(1), torch.npu.current_stream().npu_stream), stream)
        torch.npu.synchronize()


def test_default_stream_cannot_be_captured() -> None:
    with pytest.raises(RuntimeError):
        torch.npu.NPUGraph().capture_begin()


FORBIDDEN = {
    "synchronise": (lambda x, stream: stream.synchronize(), "107027"),
    "query": (lambda x, stream: stream.query(), "107027"),
    "device synchronise": (lambda x, stream: torch.npu.synchronize(), "107027"),
    "read a value": (lambda x, stream: x.cpu(), "1070(27|30)"),
    "nonzero": (lambda x, stream: x.nonzero(), "1070(27|30)"),
    "callback of an unsubscribed stream": (
        lambda x, stream: torch_npu.npu._launch_host_func(stream, lambda _: None, ()),
        "107015",
    ),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_forbidden_in_capture(name: str, stream) -> None:
    function, code = FORBIDDEN[name]
    x = torch.ones(4, device="npu")
    torch.npu.synchronize()
    with pytest.raises(RuntimeError, match=code):
        capture(lambda s: function(x + 1, s), stream)
