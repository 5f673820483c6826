"""CUDA's stream semantics on the CPU device, one rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from cptrace.capture.records import OpKind, ProcessRecord
from instrumented.runtime.api import Cost
from instrumented.runtime.clocks import PacedClock, RealClock, TimeModel, VirtualClock
from instrumented.runtime.cpu import CpuDevice

MODEL = TimeModel(compute_gflops=1.0, memory_gbytes_per_s=1.0, link_gbps=1.0, link_latency_us=0.0)


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    """Return a device on the virtual clock, where one flop takes 1 ns."""
    device = CpuDevice(0, 1, VirtualClock(), MODEL)
    yield device
    device.close()


@pytest.fixture
def real_device() -> Iterator[CpuDevice]:
    """Return a device on the machine's clock."""
    device = CpuDevice(0, 1, RealClock(time.monotonic_ns()), MODEL)
    yield device
    device.close()


def nothing() -> None:
    """Do nothing."""


def times(record: ProcessRecord) -> dict[str, tuple[int, int]]:
    """Return (start, end) by op name."""
    return {op.name: (op.start_ns, op.end_ns) for op in record.ops}


def test_a_stream_runs_in_launch_order(real_device: CpuDevice) -> None:
    stream, seen = real_device.stream(), []
    for index in range(200):
        real_device.launch(stream, "append", seen.append, index, cost=Cost())
    real_device.synchronize(stream)
    assert seen == list(range(200))


def test_a_launch_returns_before_the_work_is_done(real_device: CpuDevice) -> None:
    stream, gate = real_device.stream(), threading.Event()
    real_device.launch(stream, "blocked", gate.wait, cost=Cost())
    gate.set()  # reached only because the launch came back
    real_device.synchronize()


def test_streams_run_at_the_same_time(real_device: CpuDevice) -> None:
    """Each op waits for the other to be running: one queue for both would hang, and fails after the timeout."""
    barrier = threading.Barrier(2, timeout=20)
    for stream in (real_device.stream(), real_device.stream()):
        real_device.launch(stream, "meet", lambda: barrier.wait() and None, cost=Cost())
    real_device.synchronize()


def test_a_wait_orders_streams(real_device: CpuDevice) -> None:
    producer, consumer, event = real_device.stream(), real_device.stream(), real_device.event()
    gate, value, seen = threading.Event(), torch.zeros(1), []

    def produce() -> None:
        gate.wait()
        value.fill_(7)

    real_device.launch(producer, "produce", produce, cost=Cost())
    real_device.record_event(event, producer)
    real_device.wait_event(consumer, event)
    real_device.launch(consumer, "consume", lambda: seen.append(value.item()), cost=Cost())
    time.sleep(0.05)
    assert seen == []
    gate.set()
    real_device.synchronize(consumer)
    assert seen == [7]


def test_a_wait_captures_the_record_that_is_latest_at_the_call(real_device: CpuDevice) -> None:
    """The event is recorded again behind a blocked op after the wait: the wait must not follow it there."""
    producer, consumer, event = real_device.stream(), real_device.stream(), real_device.event()
    gate = threading.Event()
    real_device.record_event(event, producer)
    real_device.wait_event(consumer, event)
    real_device.launch(producer, "blocked", gate.wait, cost=Cost())
    real_device.record_event(event, producer)
    real_device.launch(consumer, "free", nothing, cost=Cost())
    real_device.synchronize(consumer)  # hangs if the wait follows the later record
    gate.set()
    real_device.synchronize()
    (wait,) = [
        s for s in real_device.record().synchronizations if s.stream is not None and s.event is not None
    ]
    assert wait.event_sync_id == real_device.record().event_records[0].event_sync_id


def test_an_event_that_was_never_recorded_holds_nothing_up(device: CpuDevice) -> None:
    stream, event = device.stream(), device.event()
    device.wait_event(stream, event)
    device.synchronize(event)
    device.launch(stream, "op", nothing, cost=Cost())
    device.synchronize()
    record = device.record()
    assert [call.name for call in record.api_calls][:2] == [
        "cudaStreamWaitEvent_v3020",
        "cudaEventSynchronize_v3020",
    ]
    assert [(s.stream, s.event, s.event_sync_id) for s in record.synchronizations] == [
        (None, 1, None),
        (None, None, None),
    ]


def test_reused_events_keep_their_id_and_get_new_sync_ids(device: CpuDevice) -> None:
    stream, first, second = device.stream(), device.event(), device.event()
    for event in (first, second, first):
        device.record_event(event, stream)
    device.synchronize(first)
    record = device.record()
    assert [(r.event, r.event_sync_id) for r in record.event_records] == [(1, 1), (2, 2), (1, 3)]
    assert (record.synchronizations[0].event, record.synchronizations[0].event_sync_id) == (1, 3)


def test_virtual_times_follow_from_what_each_op_waits_for(device: CpuDevice) -> None:
    """Five ops on two streams; a launch costs the host 3000 ns, an event call 2000 (times in us).

    host  ⟨a⟩⟨b⟩⟨c⟩⟨r⟩⟨w⟩⟨d⟩  ⟨e⟩
          0  3  6  9 11 13 16
    s1      a[3,103] c[103,113] ● r
    s2      b[6,36]               d[113,163] e[163,164]

    a, b start when their launch is over, b beside a because it only moves memory; c when a ends; d when the
    event after c fires; e when d ends.
    """
    first, second, event = device.stream(), device.stream(), device.event()
    device.launch(first, "a", nothing, cost=Cost(flops=100_000))
    device.launch(second, "b", nothing, cost=Cost(memory_bytes=30_000))
    device.launch(first, "c", nothing, cost=Cost(flops=10_000))
    device.record_event(event, first)
    device.wait_event(second, event)
    device.launch(second, "d", nothing, cost=Cost(memory_bytes=50_000))
    device.launch(second, "e", nothing, cost=Cost(flops=1_000))
    device.synchronize(second)
    assert times(device.record()) == {
        "a": (3_000, 103_000),
        "b": (6_000, 36_000),
        "c": (103_000, 113_000),
        "d": (113_000, 163_000),
        "e": (163_000, 164_000),
    }
    assert device.record().api_calls[-1].end_ns == 164_000  # the host was blocked until e was done


def test_two_kernels_that_fill_the_device_take_turns_in_launch_order(device: CpuDevice) -> None:
    """As one attention kernel leaves no room for another, a second stream does not double the speed.

    s1   a[3,103]           d[233,234]
    s2           b[103,133] e[133,233]
    s3   c[9,109]
    s2 is free for b from 6 on; c moves memory beside a; d waits for the turn of e, launched before it.
    """
    first, second, third = device.stream(), device.stream(), device.stream()
    device.launch(first, "a", nothing, cost=Cost(flops=100_000))
    device.launch(second, "b", nothing, cost=Cost(flops=30_000))
    device.launch(third, "c", nothing, cost=Cost(memory_bytes=100_000))
    device.launch(second, "e", nothing, cost=Cost(flops=100_000))
    device.launch(first, "d", nothing, cost=Cost(flops=1_000))
    device.synchronize()
    assert times(device.record()) == {
        "a": (3_000, 103_000),
        "b": (103_000, 133_000),
        "c": (9_000, 109_000),
        "e": (133_000, 233_000),
        "d": (233_000, 234_000),
    }


def test_virtual_times_do_not_depend_on_how_long_the_work_takes() -> None:
    def run(delay_s: float) -> ProcessRecord:
        device = CpuDevice(0, 1, VirtualClock(), MODEL)
        first, second, event = device.stream(), device.stream(), device.event()
        device.launch(first, "slow", lambda: time.sleep(delay_s), cost=Cost(flops=10))
        device.record_event(event, first)
        device.launch(second, "other", lambda: time.sleep(0.05 - delay_s), cost=Cost(flops=20))
        device.wait_event(second, event)
        device.launch(second, "after", nothing, cost=Cost(flops=30))
        device.synchronize()
        device.close()
        return device.record()

    quick, slow = run(0.0), run(0.05)
    assert times(quick) == times(slow)
    assert quick.api_calls == slow.api_calls


def test_a_host_sync_delays_the_next_launch(device: CpuDevice) -> None:
    stream = device.stream()
    device.launch(stream, "first", nothing, cost=Cost(flops=50_000))
    device.synchronize(stream)
    device.launch(stream, "second", nothing, cost=Cost(flops=1))
    device.synchronize()
    assert times(device.record())["second"][0] == 53_000 + 3_000  # the stream was free: the launch held it up


def test_every_op_has_the_correlation_id_of_its_call(device: CpuDevice) -> None:
    stream, target = device.stream(), torch.zeros(4)
    device.launch(stream, "kernel", nothing, cost=Cost())
    device.copy(stream, target, torch.ones(4))
    device.synchronize()
    record = device.record()
    calls = {call.correlation_id: call.name for call in record.api_calls}
    assert [(op.kind, calls[op.correlation_id]) for op in record.ops] == [
        (OpKind.KERNEL, "cudaLaunchKernel_v7000"),
        (OpKind.MEMCPY, "cudaMemcpyAsync_v3020"),
    ]
    assert record.ops[1].bytes == 16
    assert target.tolist() == [1, 1, 1, 1]
    assert sorted(calls) == [1, 2, 3]


def test_ranges_nest_strictly_and_enclose_their_launches(device: CpuDevice) -> None:
    stream = device.stream()
    with device.range("step", payload=3, category="step"), device.range("merge hop=1"):
        device.launch(stream, "op", nothing, cost=Cost())
    device.synchronize()
    inner, outer = device.record().ranges
    (launch, _) = device.record().api_calls
    assert outer.start_ns < inner.start_ns <= launch.start_ns < launch.end_ns < inner.end_ns < outer.end_ns
    assert (outer.text, outer.payload, outer.category, outer.domain) == ("step", 3, "step", "cptrace")


def test_an_error_fires_events_and_reaches_the_host(real_device: CpuDevice) -> None:
    failing, other, event = real_device.stream(), real_device.stream(), real_device.event()
    ran = []

    def fail() -> None:
        raise ArithmeticError("no such number")

    real_device.launch(failing, "fail", fail, cost=Cost())
    real_device.launch(failing, "skipped", lambda: ran.append("skipped"), cost=Cost())
    real_device.record_event(event, failing)
    real_device.wait_event(other, event)
    real_device.launch(other, "other", lambda: ran.append("other"), cost=Cost())
    for target in (event, failing, None):
        with pytest.raises(ArithmeticError, match="no such number"):
            real_device.synchronize(target)
    real_device.close()
    assert ran == ["other"]
    assert [op.name for op in real_device.record().ops] == ["other"]


def test_an_error_wakes_a_host_that_is_blocked_on_another_stream(real_device: CpuDevice) -> None:
    failing, blocked, gate = real_device.stream(), real_device.stream(), threading.Event()
    real_device.launch(blocked, "blocked", gate.wait, cost=Cost())

    def fail() -> None:
        raise ArithmeticError

    real_device.launch(failing, "fail", fail, cost=Cost())
    with pytest.raises(ArithmeticError):
        real_device.synchronize(blocked)
    gate.set()


def test_paced_ops_of_two_streams_overlap() -> None:
    device = CpuDevice(0, 1, PacedClock(time.monotonic_ns()), MODEL)
    for name in ("a", "b"):
        device.launch(device.stream(), name, nothing, cost=Cost(memory_bytes=60_000_000))
    device.synchronize()
    device.close()
    (start_a, end_a), (start_b, end_b) = times(device.record()).values()
    assert min(end_a - start_a, end_b - start_b) >= 60_000_000
    assert min(end_a, end_b) - max(start_a, start_b) > 30_000_000


def test_streams_are_numbered_as_cupti_does_and_memory_is_counted(device: CpuDevice) -> None:
    assert [device.stream().stream_id for _ in range(3)] == [7, 13, 14]
    assert device.empty((2, 3), torch.float32).shape == (2, 3)
    assert device.allocated_bytes == 24
