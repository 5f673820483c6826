"""The CUDA device: the same calls on torch's streams and events, and a record of them.

A launch runs its body with the stream as the current one, so that every kernel in it lands there. What a
communicator moves, and how, is its transport's: `nccl` between processes, `local_d2d` between the ranks of one.

Lifetime. All tensors that two streams share come from `empty`, before the first step, and live until the end, so
the allocator never hands their memory out again and `record_stream` is not needed. What a body makes and drops
belongs to the stream that was current, and is given out again on that stream alone.

Record. Events with timing stand before and after every op, on its stream: an op's time is from when the stream
reached it to when it was done. A transfer's time therefore holds its wait for peers, as with a communication
kernel. The events cost the device about a microsecond an op. A profiler sees the kernels themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, NamedTuple

import torch

from cptrace.capture.records import CopyKind, Op, OpKind, ProcessRecord, Range
from cptrace.labels import DOMAIN
from instrumented.runtime.api import Cost, Message, Partition
from instrumented.runtime.nvtx_emitter import NvtxEmitter, SilentEmitter
from instrumented.runtime.recorder import Recorder
from instrumented.runtime.transport import Transport

_EMULATED_PREFIX: Final = "cptrace_cpu::"
_PREFIX: Final = "cptrace_cuda::"
_FIRST_STREAM: Final = 7  # what CUPTI calls the default stream of a first context
_NEXT_STREAM: Final = 13
_NS_PER_MS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class CudaStream:
    """A stream of torch's under the number that the record gives it."""

    stream_id: int
    raw: Any


class CudaEvent:
    """An event; `sync_id` names its latest record, None before the first."""

    def __init__(self, event_id: int, raw: Any) -> None:
        """Make an event that was never recorded."""
        self.event_id = event_id
        self.raw = raw
        self.sync_id: int | None = None


class HostClock:
    """Host time in nanoseconds since a start that all ranks share, also on different hosts."""

    def __init__(self, session_start_ns: int) -> None:
        """Count from a wall-clock time; the monotonic clock, which never steps, counts on."""
        self._offset_ns = time.time_ns() - time.monotonic_ns() - session_start_ns

    def now(self) -> int:
        """Return the time."""
        return time.monotonic_ns() + self._offset_ns


class _Pending(NamedTuple):
    """An op between two events that may not have happened yet."""

    kind: OpKind
    name: str
    stream_id: int
    correlation_id: int
    begin: Any
    end: Any
    n_bytes: int | None


class CudaDevice:
    """One rank's CUDA device; implements `instrumented.runtime.api.Device`."""

    def __init__(
        self,
        rank: int,
        size: int,
        place: torch.device,
        transport: Transport,
        clock: HostClock,
        emitter: NvtxEmitter | None = None,
    ) -> None:
        """Make a device without streams.

        Args:
            rank: This rank.
            size: Number of ranks.
            place: Which of the machine's devices.
            transport: What moves data between ranks.
            clock: The host's time.
            emitter: Where ranges go besides the record.
        """
        self.rank = rank
        self.size = size
        self.allocated_bytes = 0
        self._place = place
        self._transport = transport
        self._clock = clock
        self._emitter = emitter or SilentEmitter()
        torch.cuda.set_device(place)
        torch.cuda.reset_peak_memory_stats(place)
        self._recorder = Recorder(rank, torch.cuda.get_device_name(place), place.index or 0)
        self._streams: list[CudaStream] = []
        self._event_ids = count(1)
        self._pending: list[_Pending] = []
        self._base, self._base_ns = self._mark_time(torch.cuda.current_stream(place))

    # ── resources ──────────────────────────────────────────────────────────────────────────────────

    def empty(self, shape: Sequence[int], data_type: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor on the device."""
        tensor = torch.empty(tuple(shape), dtype=data_type, device=self._place)
        self.allocated_bytes += tensor.nbytes
        return tensor

    def stream(self) -> CudaStream:
        """Return a new stream; the first is the default stream where the rank has the device for itself."""
        if self._streams or self._transport.shares_device:
            raw = torch.cuda.Stream(self._place)
        else:
            raw = torch.cuda.default_stream(self._place)
        number = _NEXT_STREAM + len(self._streams) - 1 if self._streams else _FIRST_STREAM
        stream = CudaStream(number, raw)
        self._streams.append(stream)
        self._recorder.stream(number)
        return stream

    def event(self) -> CudaEvent:
        """Return a new event without timing, as order needs none."""
        return CudaEvent(next(self._event_ids), torch.cuda.Event())

    def communicator(self, name: str, partition: Partition | None = None) -> Any:
        """Return a new communicator of this rank's group."""
        return self._transport.communicator(name, partition)

    @property
    def peak_memory_bytes(self) -> int | None:
        """The most bytes of tensors at once; None where several ranks share the device, which counts them as one."""
        return None if self._transport.shares_device else torch.cuda.max_memory_allocated(self._place)

    # ── work ───────────────────────────────────────────────────────────────────────────────────────

    def launch(
        self, stream: CudaStream, name: str, function: Callable[..., None], *arguments: object, cost: Cost
    ) -> None:
        """Queue `function(*arguments)`; the device takes what it takes, so the cost does not matter."""
        named = _PREFIX + name.removeprefix(_EMULATED_PREFIX)
        with self._op(stream, OpKind.KERNEL, named, "cudaLaunchKernel_v7000"):
            function(*arguments)

    def copy(self, stream: CudaStream, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy within this device."""
        call, name = "cudaMemcpyAsync_v3020", "[CUDA memcpy DtoD]"
        with self._op(stream, OpKind.MEMCPY, name, call, target.nbytes):
            target.copy_(source, non_blocking=True)

    def send_recv(
        self, stream: CudaStream, communicator: Any, sends: Sequence[Message], receives: Sequence[Message]
    ) -> None:
        """Queue one grouped exchange."""
        with self._comm_op(stream, "SendRecv"):
            self._transport.send_recv(stream.raw, communicator, sends, receives)

    def all_gather(
        self,
        stream: CudaStream,
        communicator: Any,
        targets: Sequence[Sequence[torch.Tensor]],
        sources: Sequence[torch.Tensor],
    ) -> None:
        """Queue one grouped all-gather."""
        with self._comm_op(stream, "AllGather"):
            self._transport.all_gather(stream.raw, communicator, targets, sources)

    def reduce_scatter(
        self,
        stream: CudaStream,
        communicator: Any,
        targets: Sequence[torch.Tensor],
        sources: Sequence[Sequence[torch.Tensor]],
    ) -> None:
        """Queue one grouped reduce-scatter."""
        with self._comm_op(stream, "ReduceScatter"):
            self._transport.reduce_scatter(stream.raw, communicator, targets, sources)

    def all_reduce(self, stream: CudaStream, communicator: Any, tensor: torch.Tensor) -> None:
        """Queue one all-reduce in place."""
        with self._comm_op(stream, "AllReduce"):
            self._transport.all_reduce(stream.raw, communicator, tensor)

    def all_to_all(
        self,
        stream: CudaStream,
        communicator: Any,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
    ) -> None:
        """Queue one all-to-all."""
        with self._comm_op(stream, "AllToAll"):
            self._transport.all_to_all(stream.raw, communicator, targets, sources)

    def _comm_op(self, stream: CudaStream, kind: str) -> Any:
        name = f"{_PREFIX}{self._transport.kernel_prefix}{kind}"
        return self._op(stream, OpKind.KERNEL, name, "cuLaunchKernelEx")

    @contextmanager
    def _op(
        self, stream: CudaStream, kind: OpKind, name: str, call: str, n_bytes: int | None = None
    ) -> Iterator[None]:
        """Enclose the launch of one op: the stream is current, and events with timing stand around it."""
        start_ns, correlation_id = self._clock.now(), self._recorder.correlation_id()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream.raw):
            begin.record(stream.raw)
            yield
            end.record(stream.raw)
        self._recorder.api_call(call, start_ns, self._clock.now(), correlation_id)
        self._pending.append(_Pending(kind, name, stream.stream_id, correlation_id, begin, end, n_bytes))

    # ── order ──────────────────────────────────────────────────────────────────────────────────────

    def record_event(self, event: CudaEvent, stream: CudaStream) -> None:
        """Make `event` stand for all work queued on `stream` so far."""
        start_ns, correlation_id = self._clock.now(), self._recorder.correlation_id()
        event.raw.record(stream.raw)
        event.sync_id = self._recorder.event_sync_id()
        self._recorder.api_call("cudaEventRecord_v3020", start_ns, self._clock.now(), correlation_id)
        self._recorder.event_record(stream.stream_id, event.event_id, event.sync_id, correlation_id)

    def wait_event(self, stream: CudaStream, event: CudaEvent) -> None:
        """Make later work on `stream` wait for the latest record of `event`; no record, no wait."""
        start_ns, correlation_id = self._clock.now(), self._recorder.correlation_id()
        if event.sync_id is not None:
            stream.raw.wait_event(event.raw)
        end_ns = self._clock.now()
        self._recorder.api_call("cudaStreamWaitEvent_v3020", start_ns, end_ns, correlation_id)
        if event.sync_id is not None:
            what = {"stream": stream.stream_id, "event": event.event_id, "event_sync_id": event.sync_id}
            self._recorder.synchronization(start_ns, end_ns, correlation_id, **what)

    def synchronize(self, target: CudaStream | CudaEvent | None = None) -> None:
        """Block the host until `target` (None: all streams of this rank) has caught up."""
        start_ns, correlation_id = self._clock.now(), self._recorder.correlation_id()
        what: dict[str, int] = {}
        if isinstance(target, CudaEvent):
            call, what = "cudaEventSynchronize_v3020", {"event": target.event_id}
            if target.sync_id is not None:
                target.raw.synchronize()
                what["event_sync_id"] = target.sync_id
        elif target is not None:
            call, what = "cudaStreamSynchronize_v3020", {"stream": target.stream_id}
            target.raw.synchronize()
        else:
            call = "cudaDeviceSynchronize_v3020"
            for stream in self._streams:
                stream.raw.synchronize()
        end_ns = self._clock.now()
        self._recorder.api_call(call, start_ns, end_ns, correlation_id)
        self._recorder.synchronization(start_ns, end_ns, correlation_id, **what)
        if target is None:
            self._read_times()

    def settle(self) -> None:
        """Wait for the whole device, also for what setup queued on other streams; not recorded."""
        torch.cuda.synchronize(self._place)

    # ── record ─────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def range(self, label: str, *, payload: int | None = None, category: str | None = None) -> Iterator[None]:
        """Mark the enclosed host calls with an NVTX range of the domain `cptrace`."""
        start_ns = self._clock.now()
        self._emitter.push(label, payload, category)
        try:
            yield
        finally:
            self._emitter.pop()
            thread = self._recorder.pid
            self._recorder.range(Range(label, start_ns, self._clock.now(), thread, DOMAIN, category, payload))

    def record(self) -> ProcessRecord:
        """Return what was recorded; the device must have been synchronised."""
        self._read_times()
        return self._recorder.record()

    def close(self) -> None:
        """Let go of the transport."""
        self._transport.close()

    def _mark_time(self, raw: Any) -> tuple[Any, int]:
        """Return an event that has happened, and the host's time just after: the device's clock in the host's."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(raw)
        event.synchronize()
        return event, self._clock.now()

    def _read_times(self) -> None:
        """Turn events that have happened into times, from a mark that is at most a step old.

        CUDA gives the distance of two events as milliseconds in fp32: short distances are exact to the clock's half
        microsecond, long ones are not, so the mark moves on with every step.
        """
        for item in self._pending:
            start_ns, end_ns = (
                self._base_ns + round(self._base.elapsed_time(event) * _NS_PER_MS)
                for event in (item.begin, item.end)
            )
            device = self._recorder.device
            op_place = (device, self._recorder.context, item.stream_id, item.correlation_id)
            copied = (
                (item.n_bytes, CopyKind.DEVICE_TO_DEVICE, device, device)
                if item.kind is OpKind.MEMCPY
                else ()
            )
            self._recorder.op(Op(item.kind, item.name, start_ns, max(start_ns, end_ns), *op_place, *copied))
        if self._pending:
            raw = self._streams[0].raw
            mark = torch.cuda.Event(enable_timing=True)
            mark.record(raw)
            mark.synchronize()
            self._base_ns += round(self._base.elapsed_time(mark) * _NS_PER_MS)
            self._base = mark
        self._pending.clear()
