"""The CPU device: CUDA's stream semantics on threads, with a record of every call, op and event.

Only the host thread calls its methods. Host calls take their ids and times here; ops take theirs on the
stream's thread. What a call orders is fixed at the call: `wait_event` waits for the record that is the
latest *now*.

Kernels that compute share the device's arithmetic units, which one attention kernel fills: they run one at a
time in launch order, on whatever streams. Kernels that only move memory run beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Final

import torch

from cptrace.capture.records import CopyKind, Op, OpKind, ProcessRecord, Range
from cptrace.labels import CALL, DOMAIN, EXECUTE, RECORD, WAIT
from instrumented.runtime import clocks, collectives
from instrumented.runtime.api import Cost, Message, Partition
from instrumented.runtime.clocks import Clock, TimeModel
from instrumented.runtime.collectives import Member, Round
from instrumented.runtime.cpu_stream import CpuStream, DeviceFault, Point
from instrumented.runtime.gloo import GlooCommunicator
from instrumented.runtime.nvtx_emitter import Mirror, NvtxEmitter, SilentEmitter, has_listener
from instrumented.runtime.recorder import Recorder
from instrumented.runtime.turns import TurnOrder

DEVICE_NAME: Final = "CPU emulation (cptrace, {clock} clock)"
SEND_RECV_NAME: Final = "cptrace_cpu::gloo_SendRecv"
ALL_GATHER_NAME: Final = "cptrace_cpu::gloo_AllGather"
REDUCE_SCATTER_NAME: Final = "cptrace_cpu::gloo_ReduceScatter"
ALL_REDUCE_NAME: Final = "cptrace_cpu::gloo_AllReduce"
ALL_TO_ALL_NAME: Final = "cptrace_cpu::gloo_AllToAll"

_FIRST_STREAM: Final = 7  # what CUPTI calls the default stream of a first context
_NEXT_STREAM: Final = 13
_POLL_S: Final = 0.05  # how soon a blocked host notices that another stream has failed


class CpuEvent:
    """An event; `latest` is its latest record: the point and its sync id."""

    def __init__(self, event_id: int) -> None:
        """Make an event that was never recorded."""
        self.event_id = event_id
        self.latest: tuple[Point, int] | None = None


class CpuDevice:
    """One rank's emulated device; implements `instrumented.runtime.api.Device`."""

    def __init__(
        self, rank: int, size: int, clock: Clock, model: TimeModel, emitter: NvtxEmitter | None = None
    ) -> None:
        """Make a device without streams.

        Args:
            rank: This rank.
            size: Number of ranks.
            clock: Where times come from.
            model: How long ops take where the clock models time.
            emitter: Where ranges go besides the record.
        """
        self.rank = rank
        self.size = size
        self.allocated_bytes = 0
        self._clock = clock
        self._model = model
        self._emitter = emitter or SilentEmitter()
        self._mirror = Mirror(self._emitter, is_on=has_listener())
        self._recorder = Recorder(rank, DEVICE_NAME.format(clock=clock.name))
        self._fault = DeviceFault()
        self._streams: list[CpuStream] = []
        self._event_ids = count(1)
        self._arithmetic = TurnOrder()

    # ── resources ──────────────────────────────────────────────────────────────────────────────────

    def empty(self, shape: Sequence[int], data_type: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor."""
        tensor = torch.empty(tuple(shape), dtype=data_type)
        self.allocated_bytes += tensor.nbytes
        return tensor

    def stream(self) -> CpuStream:
        """Return a new stream; the first is the default stream."""
        stream_id = _NEXT_STREAM + len(self._streams) - 1 if self._streams else _FIRST_STREAM
        stream = CpuStream(stream_id, self._fault)
        self._streams.append(stream)
        self._recorder.stream(stream_id)
        return stream

    def event(self) -> CpuEvent:
        """Return a new event."""
        return CpuEvent(next(self._event_ids))

    def communicator(self, name: str, partition: Partition | None = None) -> GlooCommunicator:
        """Return a new communicator of this rank's group."""
        return GlooCommunicator(name, partition)

    @property
    def peak_memory_bytes(self) -> int:
        """The most bytes of this device's tensors at once; all are allocated up front and kept until the end."""
        return self.allocated_bytes

    # ── work ───────────────────────────────────────────────────────────────────────────────────────

    def launch(
        self, stream: CpuStream, name: str, function: Callable[..., None], *arguments: object, cost: Cost
    ) -> None:
        """Queue `function(*arguments)` as one kernel; one that fills the device takes its turn."""
        model_ns = self._model.op_ns(cost)
        correlation_id, launched_ns = self._host_call("cudaLaunchKernel_v7000", clocks.LAUNCH_NS)
        before, turn = self._arithmetic.take() if cost.flops else (None, None)

        def work(ready_ns: int) -> int:
            start_ns = self._clock.op_start(max(ready_ns, before.wait()) if before else ready_ns)
            with self._executing(OpKind.KERNEL, stream, correlation_id, name=name):
                function(*arguments)
                end_ns = self._clock.op_end(start_ns, model_ns)
            self._record_kernel(name, start_ns, end_ns, stream, correlation_id)
            if turn:
                turn.finish(end_ns)
            return end_ns

        stream.run(launched_ns, work)
        if turn:
            stream.finally_run(turn.release)

    def copy(self, stream: CpuStream, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy within this device."""
        model_ns = self._model.op_ns(Cost(memory_bytes=source.nbytes + target.nbytes))
        correlation_id, launched_ns = self._host_call("cudaMemcpyAsync_v3020", clocks.LAUNCH_NS)

        def work(ready_ns: int) -> int:
            start_ns = self._clock.op_start(ready_ns)
            with self._executing(OpKind.MEMCPY, stream, correlation_id, bytes=target.nbytes):
                target.copy_(source)
                end_ns = self._clock.op_end(start_ns, model_ns)
            self._record_copy(start_ns, end_ns, stream, correlation_id, target.nbytes)
            return end_ns

        stream.run(launched_ns, work)

    def send_recv(
        self,
        stream: CpuStream,
        communicator: GlooCommunicator,
        sends: Sequence[Message],
        receives: Sequence[Message],
    ) -> None:
        """Queue one grouped exchange."""
        self._transfer(stream, communicator, SEND_RECV_NAME, collectives.send_recv(sends, receives))

    def all_gather(
        self,
        stream: CpuStream,
        communicator: GlooCommunicator,
        targets: Sequence[Sequence[torch.Tensor]],
        sources: Sequence[torch.Tensor],
    ) -> None:
        """Queue one grouped all-gather."""
        rounds = collectives.all_gather(self._member(communicator), targets, sources)
        self._transfer(stream, communicator, ALL_GATHER_NAME, rounds)

    def reduce_scatter(
        self,
        stream: CpuStream,
        communicator: GlooCommunicator,
        targets: Sequence[torch.Tensor],
        sources: Sequence[Sequence[torch.Tensor]],
    ) -> None:
        """Queue one grouped reduce-scatter."""
        rounds = collectives.reduce_scatter(self._member(communicator), targets, sources)
        self._transfer(stream, communicator, REDUCE_SCATTER_NAME, rounds)

    def all_reduce(self, stream: CpuStream, communicator: GlooCommunicator, tensor: torch.Tensor) -> None:
        """Queue one all-reduce in place."""
        rounds = collectives.all_reduce(self._member(communicator), tensor)
        self._transfer(stream, communicator, ALL_REDUCE_NAME, rounds)

    def all_to_all(
        self,
        stream: CpuStream,
        communicator: GlooCommunicator,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
    ) -> None:
        """Queue one all-to-all."""
        rounds = collectives.all_to_all(self._member(communicator), targets, sources)
        self._transfer(stream, communicator, ALL_TO_ALL_NAME, rounds)

    def _member(self, communicator: GlooCommunicator) -> Member:
        return Member(communicator.ranks, self.rank)

    def _transfer(
        self, stream: CpuStream, communicator: GlooCommunicator, name: str, rounds: Sequence[Round]
    ) -> None:
        """Queue one communication kernel; its data moves when all its peers have arrived."""
        peers = sorted(set().union(*(step.peers for step in rounds)))
        model_ns = sum(self._model.transfer_ns(step.link_bytes) for step in rounds)
        correlation_id, launched_ns = self._host_call("cuLaunchKernelEx", clocks.COLLECTIVE_LAUNCH_NS)
        before, turn = communicator.turns.take()

        def work(ready_ns: int) -> int:
            start_ns = self._clock.op_start(max(ready_ns, before.wait()))
            with self._executing(OpKind.KERNEL, stream, correlation_id, name=name):
                arrivals = communicator.announce(start_ns, peers)
                for step in rounds:
                    step.finish(communicator.exchange(step.sends, step.receives))
                end_ns = self._clock.op_end(arrivals.latest(), model_ns)
            self._record_kernel(name, start_ns, end_ns, stream, correlation_id)
            turn.finish(end_ns)
            return end_ns

        stream.run(launched_ns, work)
        stream.finally_run(turn.release)

    # ── order ──────────────────────────────────────────────────────────────────────────────────────

    def record_event(self, event: CpuEvent, stream: CpuStream) -> None:
        """Make `event` stand for all work queued on `stream` so far."""
        point, event_sync_id = Point(), self._recorder.event_sync_id()
        what = {"stream": stream.stream_id, "event": event.event_id, "event_sync_id": event_sync_id}
        correlation_id, _ = self._host_call("cudaEventRecord_v3020", clocks.EVENT_NS, RECORD, **what)
        event.latest = (point, event_sync_id)
        self._recorder.event_record(**what, correlation_id=correlation_id)
        stream.mark(point)

    def wait_event(self, stream: CpuStream, event: CpuEvent) -> None:
        """Make later work on `stream` wait for the latest record of `event`.

        An event that was never recorded holds nothing up: the call is recorded, a synchronization is not.
        """
        start_ns, name = self._clock.host_now(), "cudaStreamWaitEvent_v3020"
        if event.latest is None:
            self._host_call(name, clocks.EVENT_NS)
            return
        point, event_sync_id = event.latest
        what = {"stream": stream.stream_id, "event": event.event_id, "event_sync_id": event_sync_id}
        correlation_id, end_ns = self._host_call(name, clocks.EVENT_NS, WAIT, **what)
        self._recorder.synchronization(start_ns, end_ns, correlation_id, **what)
        stream.wait(point)

    def synchronize(self, target: CpuStream | CpuEvent | None = None) -> None:
        """Block the host until `target` (None: all streams) has caught up.

        Raises:
            BaseException: The first error of any stream of this device.
        """
        if isinstance(target, CpuEvent):
            self._synchronize_event(target)
        elif isinstance(target, CpuStream):
            self._block("cudaStreamSynchronize_v3020", [_mark(target)], stream=target.stream_id)
        else:
            self._block("cudaDeviceSynchronize_v3020", [_mark(stream) for stream in self._streams])

    def _synchronize_event(self, event: CpuEvent) -> None:
        if event.latest is None:
            self._block("cudaEventSynchronize_v3020", [], event=event.event_id)
            return
        point, event_sync_id = event.latest
        self._block("cudaEventSynchronize_v3020", [point], event=event.event_id, event_sync_id=event_sync_id)

    def _block(self, name: str, points: Sequence[Point], **what: int) -> None:
        start_ns = self._clock.host_now()
        correlation_id = self._recorder.correlation_id()
        with self._mirror.shown(WAIT, correlation_id, api=name, **what):
            for point in points:
                while not point.wait(_POLL_S):
                    self._raise_fault()
            self._raise_fault()
            not_before_ns = max((point.time_ns for point in points), default=0)
            end_ns = self._clock.host_advance(clocks.SYNCHRONIZE_NS, not_before_ns)
        self._recorder.api_call(name, start_ns, end_ns, correlation_id)
        self._recorder.synchronization(start_ns, end_ns, correlation_id, **what)

    def _raise_fault(self) -> None:
        if self._fault.error is not None:
            raise self._fault.error

    # ── record ─────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def range(self, label: str, *, payload: int | None = None, category: str | None = None) -> Iterator[None]:
        """Mark the enclosed host calls with an NVTX range of the domain `cptrace`."""
        start_ns = self._clock.host_now()
        self._clock.host_advance(clocks.RANGE_NS)
        self._emitter.push(label, payload, category)
        try:
            yield
        finally:
            self._emitter.pop()
            end_ns = self._clock.host_advance(clocks.RANGE_NS)
            self._recorder.range(
                Range(label, start_ns, end_ns, self._recorder.pid, DOMAIN, category, payload)
            )

    def settle(self) -> None:
        """Return at once: setup queues nothing that is not done already."""

    def record(self) -> ProcessRecord:
        """Return what was recorded; the device must have been synchronised."""
        return self._recorder.record()

    def close(self) -> None:
        """End all streams after what is queued."""
        for stream in self._streams:
            stream.close()

    def _host_call(self, name: str, cost_ns: int, label: str = CALL, **what: int) -> tuple[int, int]:
        """Record one API call that does not block, and return its correlation id and its end."""
        begin_ns = self._clock.host_now()
        correlation_id = self._recorder.correlation_id()
        with self._mirror.shown(label, correlation_id, api=name, **what):
            end_ns = self._clock.host_advance(cost_ns)
        self._recorder.api_call(name, begin_ns, end_ns, correlation_id)
        return correlation_id, end_ns

    def _executing(
        self, kind: OpKind, stream: CpuStream, correlation_id: int, **what: int | str
    ) -> AbstractContextManager[None]:
        """Enclose what an op does, on its stream's thread."""
        where: dict[str, int | str] = {"kind": kind, "device": self.rank, "stream": stream.stream_id}
        return self._mirror.shown(EXECUTE, correlation_id, **where, **what)

    def _record_kernel(
        self, name: str, start_ns: int, end_ns: int, stream: CpuStream, correlation_id: int
    ) -> None:
        context = self._recorder.context
        place = (self.rank, context, stream.stream_id, correlation_id)
        self._recorder.op(Op(OpKind.KERNEL, name, start_ns, end_ns, *place))

    def _record_copy(
        self, start_ns: int, end_ns: int, stream: CpuStream, correlation_id: int, n_bytes: int
    ) -> None:
        place = (self.rank, self._recorder.context, stream.stream_id, correlation_id)
        what = (n_bytes, CopyKind.DEVICE_TO_DEVICE, self.rank, self.rank)
        self._recorder.op(Op(OpKind.MEMCPY, "[CUDA memcpy DtoD]", start_ns, end_ns, *place, *what))


def _mark(stream: CpuStream) -> Point:
    point = Point()
    stream.mark(point)
    return point
