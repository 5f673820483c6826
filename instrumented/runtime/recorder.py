"""Collects what one rank's device does, as the records that the report writer takes.

Ids are given out by the host thread only, in program order, so they are the same on every run. Ops are
appended by stream threads; appending to a list is atomic, and the writer sorts.
"""

from __future__ import annotations

from itertools import count
from typing import Final

from cptrace.capture.records import (
    ApiCall,
    EventRecord,
    Op,
    ProcessRecord,
    Range,
    Stream,
    Synchronization,
)

_FIRST_PID: Final = 1000  # synthetic: a real pid would make two equal runs differ


class Recorder:
    """Records one rank. The host thread's id equals the process id, as for a Linux main thread."""

    context = 1

    def __init__(self, rank: int, device_name: str, device: int | None = None) -> None:
        """Start with nothing recorded.

        Args:
            rank: This rank.
            device_name: What its device is called.
            device: Its ordinal; None where each rank has the one of its own number.
        """
        self.rank = rank
        self.pid = _FIRST_PID + rank
        self.device = rank if device is None else device
        self._device_name = device_name
        self._correlation_ids = count(1)
        self._event_sync_ids = count(1)
        self._streams: list[Stream] = []
        self._ops: list[Op] = []
        self._api_calls: list[ApiCall] = []
        self._synchronizations: list[Synchronization] = []
        self._event_records: list[EventRecord] = []
        self._ranges: list[Range] = []

    def correlation_id(self) -> int:
        """Return the id of the next API call."""
        return next(self._correlation_ids)

    def event_sync_id(self) -> int:
        """Return the id of the next event record."""
        return next(self._event_sync_ids)

    def stream(self, stream_id: int) -> None:
        """Record that a stream exists."""
        self._streams.append(Stream(self.context, stream_id))

    def api_call(self, name: str, start_ns: int, end_ns: int, correlation_id: int) -> None:
        """Record one host call."""
        self._api_calls.append(ApiCall(name, start_ns, end_ns, self.pid, correlation_id))

    def op(self, op: Op) -> None:
        """Record one finished op."""
        self._ops.append(op)

    def event_record(self, stream: int, event: int, event_sync_id: int, correlation_id: int) -> None:
        """Record that an event was put on a stream."""
        self._event_records.append(EventRecord(self.context, stream, event, event_sync_id, correlation_id))

    def synchronization(
        self,
        start_ns: int,
        end_ns: int,
        correlation_id: int,
        *,
        stream: int | None = None,
        event: int | None = None,
        event_sync_id: int | None = None,
    ) -> None:
        """Record one ordering host call."""
        self._synchronizations.append(
            Synchronization(start_ns, end_ns, self.context, stream, event, event_sync_id, correlation_id)
        )

    def range(self, item: Range) -> None:
        """Record one closed NVTX range."""
        self._ranges.append(item)

    def record(self) -> ProcessRecord:
        """Return everything recorded so far; the device must be idle."""
        return ProcessRecord(
            rank=self.rank,
            pid=self.pid,
            device=self.device,
            device_name=self._device_name,
            context=self.context,
            streams=tuple(self._streams),
            ops=tuple(self._ops),
            api_calls=tuple(self._api_calls),
            synchronizations=tuple(self._synchronizations),
            event_records=tuple(self._event_records),
            ranges=tuple(self._ranges),
        )
