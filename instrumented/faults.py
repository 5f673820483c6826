"""Named ways to break overlap, each on purpose and with a known effect: the ground truth of a diagnosis.

A fault is a wrapper around a device that passes most calls on and does one thing wrong, so that no scheme
knows of it; `cptrace.faults` lists them and says where each one means something. Slow ranks and slow links are
a time model of one rank's own.

Three facts about schemes are used: all their order between streams is events; a channel makes its communicator
and right after it its stream; and every rank launches the transfers of all communicators in the same order, so
that nothing here can make one rank wait for another for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import Tensor

from cptrace import faults
from instrumented.runtime.api import Communicator, Cost, Device, Event, Partition, Stream
from instrumented.runtime.clocks import Clock, TimeModel, VirtualClock

STRAGGLER_FACTOR: Final = 2
SLOW_LINK_FACTOR: Final = 4
LATE_LAUNCH_FACTOR: Final = 1.5  # above 1, so that an op is over before the next one is launched


class DeviceWrapper:
    """A device that passes every call on to another one."""

    def __init__(self, inner: Device) -> None:
        """Wrap a device."""
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        """Return what the wrapped device has, also beyond `Device`: its record, its clock."""
        return getattr(self._inner, name)

    def send_recv(self, *arguments: Any) -> None:
        """Queue one grouped exchange."""
        self._transfer("send_recv", *arguments)

    def all_gather(self, *arguments: Any) -> None:
        """Queue one grouped all-gather."""
        self._transfer("all_gather", *arguments)

    def reduce_scatter(self, *arguments: Any) -> None:
        """Queue one grouped reduce-scatter."""
        self._transfer("reduce_scatter", *arguments)

    def all_reduce(self, *arguments: Any) -> None:
        """Queue one all-reduce."""
        self._transfer("all_reduce", *arguments)

    def all_to_all(self, *arguments: Any) -> None:
        """Queue one all-to-all."""
        self._transfer("all_to_all", *arguments)

    def _transfer(self, kind: str, stream: Stream, communicator: Communicator, *tensors: Any) -> None:
        getattr(self._inner, kind)(stream, communicator, *tensors)


@dataclass(frozen=True, slots=True, eq=False)
class _Alias:
    """A stream that is another one under a second name."""

    stream: Stream

    @property
    def stream_id(self) -> int:
        """The number of the stream that it is."""
        return self.stream.stream_id


class SharedStream(DeviceWrapper):
    """Breaks: transfers have a stream of their own. Must cause: `shared-stream`.

    All streams are the first one, as when collectives run on the current stream (PyTorch's `async_op=False`).
    Waits for events are left out, as such programs have none: the stream's order is one.
    """

    def __init__(self, inner: Device) -> None:
        """Wrap a device that has no streams yet."""
        super().__init__(inner)
        self._only: Stream | None = None

    def stream(self) -> _Alias:
        """Return the only stream under a new name."""
        if self._only is None:
            self._only = self._inner.stream()
        return _Alias(self._only)

    def launch(self, stream: _Alias, *arguments: Any, cost: Cost) -> None:
        """Queue a kernel."""
        self._inner.launch(stream.stream, *arguments, cost=cost)

    def copy(self, stream: _Alias, target: Tensor, source: Tensor) -> None:
        """Queue a copy."""
        self._inner.copy(stream.stream, target, source)

    def record_event(self, event: Event, stream: _Alias) -> None:
        """Record an event."""
        self._inner.record_event(event, stream.stream)

    def wait_event(self, stream: _Alias, event: Event) -> None:
        """Do nothing: what was recorded is in front."""

    def synchronize(self, target: _Alias | Event | None = None) -> None:
        """Block the host."""
        self._inner.synchronize(target.stream if isinstance(target, _Alias) else target)

    def _transfer(self, kind: str, stream: Stream, communicator: Communicator, *tensors: Any) -> None:
        only = stream.stream if isinstance(stream, _Alias) else stream
        super()._transfer(kind, only, communicator, *tensors)


class _OrderWatch(DeviceWrapper):
    """Knows which streams are channels' and where each event was recorded last."""

    def __init__(self, inner: Device) -> None:
        super().__init__(inner)
        self._compute_streams: list[Stream] = []
        self._channel_streams: list[Stream] = []
        self._is_next_a_channels = False
        self._recorded_on: dict[Event, Stream] = {}

    def communicator(self, name: str, partition: Partition | None = None) -> Communicator:
        """Return a new communicator; the stream made next is its."""
        self._is_next_a_channels = True
        return self._inner.communicator(name, partition)

    def stream(self) -> Stream:
        """Return a new stream."""
        stream = self._inner.stream()
        (self._channel_streams if self._is_next_a_channels else self._compute_streams).append(stream)
        self._is_next_a_channels = False
        return stream

    def record_event(self, event: Event, stream: Stream) -> None:
        """Record an event."""
        self._recorded_on[event] = stream
        self._inner.record_event(event, stream)

    def _is_for_transfer(self, stream: Stream, event: Event) -> bool:
        """Whether computing would wait for a transfer."""
        producer = self._recorded_on.get(event)
        return stream in self._compute_streams and producer in self._channel_streams

    def _is_for_compute(self, stream: Stream, event: Event) -> bool:
        """Whether a transfer would wait for computing."""
        producer = self._recorded_on.get(event)
        return stream in self._channel_streams and producer in self._compute_streams


class HostSync(_OrderWatch):
    """Breaks: streams wait for each other while the host goes on. Must cause: `missing-event`, form `host-sync`.

    The host does all the waiting: for the event of a transfer before it launches what reads the data
    (cudaEventSynchronize), and for the compute streams before it launches a transfer (cudaStreamSynchronize), as
    around a library that knows no streams. Waiting for arrivals alone would cost a well-ordered ring nothing:
    its attention is launched before the transfer that it hides.
    """

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Block the host in place of the stream."""
        if self._is_for_transfer(stream, event):
            self._inner.synchronize(event)
        elif self._is_for_compute(stream, event):
            for compute in self._compute_streams:
                self._inner.synchronize(compute)
        else:
            self._inner.wait_event(stream, event)


class NoWait(_OrderWatch):
    """Breaks: what reads received data waits for it. Must cause: `missing-event`, form `race`.

    Transfers still wait for the data that they send, and the step's end for everything. Results are undefined:
    wrong often, not always.
    """

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Leave out the wait of computing for a transfer."""
        if not self._is_for_transfer(stream, event):
            self._inner.wait_event(stream, event)


class SingleBuffer(DeviceWrapper):
    """Breaks: one buffer is read while the other receives. Must cause: `single-buffer`.

    A ring exchange gets one buffer to receive into in place of two (see `RingExchange.slots`): a hop waits for
    the attention that reads the chunk before it. What is sent on is copied aside first.
    """

    has_one_buffer = True


class SharedCommunicator(DeviceWrapper):
    """Breaks: independent transfers have communicators of their own. Must cause: `shared-communicator`.

    Channels of the same ranks get one communicator and its one stream, as those of a PyTorch process group.
    """

    def __init__(self, inner: Device) -> None:
        """Wrap a device that has no communicators yet."""
        super().__init__(inner)
        self._communicators: dict[object, Communicator] = {}
        self._streams: dict[object, Stream] = {}
        self._ranks_of_next: object = None

    def communicator(self, name: str, partition: Partition | None = None) -> Communicator:
        """Return the communicator of these ranks; the stream made next is its."""
        ranks = self._ranks_of_next = tuple(map(tuple, partition)) if partition else tuple(range(self.size))
        if ranks not in self._communicators:
            self._communicators[ranks] = self._inner.communicator(name, partition)
        return self._communicators[ranks]

    def stream(self) -> Stream:
        """Return a new stream, or the one of the communicator that was asked for just before."""
        ranks, self._ranks_of_next = self._ranks_of_next, None
        if ranks is None:
            return self._inner.stream()
        if ranks not in self._streams:
            self._streams[ranks] = self._inner.stream()
        return self._streams[ranks]


class LateLaunch(DeviceWrapper):
    """Breaks: the host runs ahead of the device. Must cause: `late-launch`.

    Before each launch the host is busy for longer than the op takes in the time model, so that ops wait for
    their launch and the device is idle meanwhile.
    """

    def __init__(self, inner: Device, model: TimeModel, spend: Callable[[int], object]) -> None:
        """Wrap a device.

        Args:
            inner: The device.
            model: How long ops take.
            spend: Makes the host busy for so many nanoseconds.
        """
        super().__init__(inner)
        self._model, self._spend = model, spend

    def launch(self, stream: Stream, *arguments: Any, cost: Cost) -> None:
        """Queue a kernel, late."""
        self._delay(self._model.op_ns(cost))
        self._inner.launch(stream, *arguments, cost=cost)

    def copy(self, stream: Stream, target: Tensor, source: Tensor) -> None:
        """Queue a copy, late."""
        self._delay(self._model.op_ns(Cost(memory_bytes=target.nbytes + source.nbytes)))
        self._inner.copy(stream, target, source)

    def _transfer(self, kind: str, stream: Stream, communicator: Communicator, *tensors: Any) -> None:
        n_bytes = sum(tensor.nbytes for tensor in _tensors_in(tensors)) // 2  # what is sent and what arrives
        self._delay(self._model.transfer_ns(n_bytes))
        super()._transfer(kind, stream, communicator, *tensors)

    def _delay(self, op_ns: int) -> None:
        self._spend(round(LATE_LAUNCH_FACTOR * op_ns))


def _tensors_in(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Sequence):
        for item in value:
            yield from _tensors_in(item)


_WRAPPERS: Final[dict[str, Callable[[Device], Device]]] = {
    # From the inside out: those further out see the streams and events that those inside hand out.
    faults.SHARED_STREAM: SharedStream,
    faults.SHARED_COMMUNICATOR: SharedCommunicator,
    faults.SINGLE_BUFFER: SingleBuffer,
    faults.HOST_SYNC: HostSync,
    faults.NO_WAIT: NoWait,
}


def break_device(device: Device, names: Sequence[str], clock: Clock, model: TimeModel) -> Device:
    """Return a device with the faults of a run.

    Args:
        device: A device that has no streams yet.
        names: Faults, as a run's options name them.
        clock: The device's clock.
        model: The device's time model.
    """
    active = {faults.parse_fault(name).name for name in names}
    for name, wrap in _WRAPPERS.items():
        if name in active:
            device = wrap(device)
    if faults.LATE_LAUNCH in active:
        device = LateLaunch(device, model, clock.host_advance if clock.name == VirtualClock.name else _sleep)
    return device


def slow_down(model: TimeModel, names: Sequence[str], rank: int) -> TimeModel:
    """Return the time model of one rank of a run.

    `straggler` breaks: ranks compute at the same speed. Must cause: `peer-wait`, form `straggler`.
    `slow-link` breaks: links are equally fast. Must cause: `peer-wait`, form `slow-link`.

    Args:
        model: The model of a rank without a fault.
        names: Faults, as a run's options name them.
        rank: Which rank.
    """
    for fault in map(faults.parse_fault, names):
        if fault.rank != rank:
            continue
        if fault.name == faults.STRAGGLER:
            slow = {
                f: getattr(model, f) / STRAGGLER_FACTOR for f in ("compute_gflops", "memory_gbytes_per_s")
            }
            model = replace(model, **slow)
        elif fault.name == faults.SLOW_LINK:
            latency_us = model.link_latency_us * SLOW_LINK_FACTOR
            model = replace(model, link_gbps=model.link_gbps / SLOW_LINK_FACTOR, link_latency_us=latency_us)
    return model


def _sleep(duration_ns: int) -> None:
    time.sleep(duration_ns / 1e9)
