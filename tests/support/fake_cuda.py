"""A stand-in for `torch.cuda`: work runs at once on the host, and what was asked of which stream is written down.

Every stream and every event has a vector clock, so that a test can ask whether one piece of work is ordered after
another by streams and events alone, whatever the host happened to do first.

    with fake_cuda(monkeypatch) as cuda:
        device = CudaDevice(0, 1, torch.device("cpu"), ...)
        cuda.calls    # ("launch", stream, clock), ...
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import torch

Clock = dict[int, int]  # pieces of work that came before, by stream


class FakeStream:
    """A stream of the stand-in."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.number = next(cuda.numbers)
        self.clock: Clock = {}
        self._cuda = cuda

    def wait_event(self, event: FakeEvent) -> None:
        join(self.clock, event.clock)
        self._cuda.calls.append(("wait_event", self.number, dict(self.clock)))

    def synchronize(self) -> None:
        self._cuda.calls.append(("synchronize", self.number, dict(self.clock)))

    def step(self) -> Clock:
        """Count one piece of work and return what came before it, itself included."""
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return dict(self.clock)


class FakeEvent:
    """An event of the stand-in; its time is the number of its record."""

    def __init__(self, cuda: FakeCuda, enable_timing: bool = False) -> None:
        self.clock: Clock = {}
        self.time_ms: float | None = None
        self._cuda, self._has_timing = cuda, enable_timing

    def record(self, stream: FakeStream) -> None:
        self.clock = stream.step()
        self.time_ms = next(self._cuda.times) / 1000

    def synchronize(self) -> None:
        assert self.time_ms is not None, "an event that was never recorded would never happen"

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self._has_timing
        assert end._has_timing
        assert self.time_ms is not None
        assert end.time_ms is not None
        return end.time_ms - self.time_ms


class FakeCuda:
    """The functions of `torch.cuda` that the device uses, and what was called."""

    def __init__(self) -> None:
        self.numbers, self.times = count(), count()
        self.calls: list[tuple[str, int, Clock]] = []
        self._default = FakeStream(self)
        self._current = threading.local()

    def Stream(self, place: torch.device) -> FakeStream:
        return FakeStream(self)

    def Event(self, enable_timing: bool = False) -> FakeEvent:
        return FakeEvent(self, enable_timing)

    def default_stream(self, place: torch.device) -> FakeStream:
        return self._default

    def current_stream(self, place: torch.device | None = None) -> FakeStream:
        return getattr(self._current, "stream", self._default)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def set_device(self, place: torch.device) -> None:
        self.calls.append(("set_device", -1, {}))

    def reset_peak_memory_stats(self, place: torch.device) -> None:
        self.calls.append(("reset_peak_memory_stats", -1, {}))

    def max_memory_allocated(self, place: torch.device | int) -> int:
        return 12345

    def get_device_name(self, place: torch.device | int) -> str:
        return "Fake GPU"

    def synchronize(self, place: torch.device) -> None:
        self.calls.append(("synchronize_device", -1, {}))

    def device_count(self) -> int:
        return 1


def join(clock: Clock, other: Clock) -> None:
    """Let everything before `other` be before `clock` too."""
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)


def is_before(first: Clock, stream: int, second: Clock) -> bool:
    """Whether the work that had clock `first` on a stream is ordered before the work with clock `second`."""
    return second.get(stream, 0) >= first[stream]
