"""The CUDA device against a stand-in for `torch.cuda`: what lands on which stream, in which order, and its record."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from instrumented.runtime.api import Cost
from instrumented.runtime.cuda import CudaDevice, HostClock
from instrumented.runtime.local_d2d import LocalTransport, Meeting
from tests.support.fake_cuda import FakeCuda, is_before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Return the stand-in in place of `torch.cuda`."""
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    return fake


def make(rank: int = 0, size: int = 1, meeting: Meeting | None = None) -> CudaDevice:
    transport = LocalTransport(meeting or Meeting(size), rank)
    return CudaDevice(rank, size, torch.device("cpu"), transport, HostClock(0))


def test_a_body_runs_with_its_stream_as_the_current_one(cuda: FakeCuda) -> None:
    device = make()
    first, second = device.stream(), device.stream()
    seen = []
    for stream in (first, second, first):
        device.launch(
            stream, "cptrace_cpu::fill", lambda: seen.append(cuda.current_stream().number), cost=Cost()
        )
    assert seen == [first.raw.number, second.raw.number, first.raw.number]


def test_ranks_that_share_a_device_never_use_its_default_stream(cuda: FakeCuda) -> None:
    device = make()
    default = cuda.default_stream(torch.device("cpu"))
    assert device.stream().raw is not default
    assert [device.stream().stream_id for _ in range(2)] == [13, 14]


def test_a_rank_with_a_device_of_its_own_starts_with_the_default_stream(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalTransport, "shares_device", False)
    device = make()
    assert device.stream().raw is cuda.default_stream(torch.device("cpu"))
    assert device.peak_memory_bytes == 12345


def test_events_order_streams(cuda: FakeCuda) -> None:
    """
    first   fill ── record
    second            └─ wait ── read
    third   read, which nothing orders
    """
    device = make()
    first, second, third = (device.stream() for _ in range(3))
    event = device.event()
    clocks = {}

    def work(name: str) -> None:
        clocks[name] = dict(cuda.current_stream().clock)

    device.wait_event(second, event)  # never recorded: no wait
    device.launch(first, "a", work, "fill", cost=Cost())
    device.record_event(event, first)
    device.wait_event(second, event)
    device.launch(second, "b", work, "ordered", cost=Cost())
    device.launch(third, "c", work, "loose", cost=Cost())
    number = first.raw.number
    assert is_before(clocks["fill"], number, clocks["ordered"])
    assert not is_before(clocks["fill"], number, clocks["loose"])
    waits = [sync for sync in device.record().synchronizations if sync.event is not None]
    assert [(sync.stream, sync.event_sync_id) for sync in waits] == [(second.stream_id, 1)]


def test_the_record_has_every_op_with_the_times_of_its_events(cuda: FakeCuda) -> None:
    device = make()
    stream = device.stream()
    with device.range("step", payload=0, category="step"):
        device.launch(stream, "cptrace_cpu::fill", lambda: None, cost=Cost())
        device.copy(stream, torch.zeros(4), torch.ones(4))
        device.synchronize()
        device.launch(stream, "cptrace_cpu::fill", lambda: None, cost=Cost())
        device.synchronize()
    record = device.record()
    assert [op.name for op in record.ops] == [
        "cptrace_cuda::fill",
        "[CUDA memcpy DtoD]",
        "cptrace_cuda::fill",
    ]
    starts, ends = [op.start_ns for op in record.ops], [op.end_ns for op in record.ops]
    # The stand-in's clock moves on by 1 us with each record: two of them around each op, one at each mark.
    assert [end - start for start, end in zip(starts, ends, strict=True)] == [1000] * 3
    assert [later - earlier for earlier, later in pairwise(starts)] == [2000, 3000]
    assert record.ops[1].bytes == 16
    calls = {call.correlation_id: call.name for call in record.api_calls}
    assert [calls[op.correlation_id] for op in record.ops] == [
        "cudaLaunchKernel_v7000",
        "cudaMemcpyAsync_v3020",
        "cudaLaunchKernel_v7000",
    ]
    assert [item.text for item in record.ranges] == ["step"]
    assert (record.device, record.device_name) == (0, "Fake GPU")


def test_memory_is_counted_and_left_open_where_ranks_share_a_device(cuda: FakeCuda) -> None:
    device = make()
    device.empty((3, 5), torch.bfloat16)
    assert (device.allocated_bytes, device.peak_memory_bytes) == (30, None)
