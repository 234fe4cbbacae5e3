"""Times of a device that the host runs ahead of, with a device that is made up: no GPU is needed."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from trainwright.parallel.comm.device_times import DeviceTimes, device_times
from trainwright.parallel.comm.trace import CommTrace


class Device:
    """Its clock moves by what it is given to do; the host's stands still beside it."""

    def __init__(self) -> None:
        self.clock, self.settled = 0.0, 0

    def settle(self) -> None:
        self.settled += 1

    def times(self, holds: bool = True) -> DeviceTimes:
        device = self

        class Event:
            def record(self) -> None:
                self.at = device.clock

            def elapsed_time(self, later: Any) -> float:
                return 1e3 * (later.at - self.at)

        return DeviceTimes(Event, self.settle, lambda x: holds)


@pytest.fixture
def group():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_wait_is_as_long_as_the_stream_stands_still(group, monkeypatch):
    device = Device()
    original = dist.Work.wait

    def slow(work: Any, *args: Any) -> Any:
        device.clock += 3.0  # the collective ends three seconds after the stream came here
        return original(work, *args)

    monkeypatch.setattr(dist.Work, "wait", slow)
    with CommTrace(times=device.times()) as trace:
        device.clock += 2.0
        work = dist.all_reduce(torch.ones(4), async_op=True)
        device.clock += 5.0  # computes meanwhile
        work.wait()
    assert trace.summary().waited == pytest.approx(3.0, abs=1e-6)
    assert trace.records[0].start - trace.times._offset == pytest.approx(2.0, abs=1e-6)
    wait = trace.waits[0]
    assert wait.start - trace.times._offset == pytest.approx(7.0, abs=1e-6)
    assert device.settled == 2  # at the start, and to read; not at the collective


def test_a_collective_in_the_stream_itself_is_waited_for(group):
    device = Device()
    with CommTrace(times=device.times()) as trace:
        begun = trace.times.mark()
        record = trace._record("all_reduce", (0, 1), 8, 8, None)
        device.clock += 4.0
        trace._end_with(record, None, trace.times, begun)
    found = trace.summary()
    assert found.waited == pytest.approx(4.0, abs=1e-6) and found.kinds["all_reduce"].seconds == pytest.approx(4.0)


def test_a_functional_collective_ends_where_it_is_waited_for(group):
    device = Device()
    with CommTrace(times=device.times()) as trace:
        out = functional.all_reduce(torch.ones(4), "sum", group)
        device.clock += 6.0
        out.wait() if hasattr(out, "wait") else functional.wait_tensor(out)
    assert trace.summary().kinds["all_reduce"].seconds == pytest.approx(6.0, abs=1e-6)


def test_the_second_look_adds_what_came_between(group):
    """As a step's row does: summary before and after, in two contexts of one trace."""
    device = Device()
    trace = CommTrace(times=device.times())
    seen = []
    for seconds in (1.0, 2.5):
        with trace:
            before = trace.summary().waited
            with trace._waiting():
                device.clock += seconds
            seen.append(trace.summary().waited - before)
    assert seen == pytest.approx([1.0, 2.5], abs=1e-6)


def test_what_lies_on_the_host_has_the_times_of_the_host(group):
    device = Device()
    with CommTrace(times=device.times(holds=False)) as trace:
        dist.all_reduce(torch.ones(4))
        device.clock += 100.0
    record = trace.records[0]
    trace.summary()
    assert record.end is not None and record.end - record.start < 50


def test_without_a_gpu_there_are_no_marks(group):
    assert device_times() is None and CommTrace().times is None
