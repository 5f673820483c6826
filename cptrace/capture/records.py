"""What one process recorded: device ops, the host calls that caused them, and the events that order them.

Nothing here depends on who records. A device backend fills these records and a writer turns them into a
report. All times are integer nanoseconds since the common start of the session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NamedTuple


class OpKind(StrEnum):
    """The three sorts of device work."""

    KERNEL = "kernel"
    MEMCPY = "memcpy"
    MEMSET = "memset"


class CopyKind(IntEnum):
    """Direction of a memory copy, with the numbers that CUPTI gives them."""

    HOST_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    DEVICE_TO_DEVICE = 8
    PEER_TO_PEER = 10


class Op(NamedTuple):
    """One piece of work on a device stream.

    `bytes`, `copy_kind` and the two devices belong to copies; `bytes` and `value` to memsets; a kernel has
    none.
    """

    kind: OpKind
    name: str
    start_ns: int
    end_ns: int
    device: int
    context: int
    stream: int
    correlation_id: int
    bytes: int | None = None
    copy_kind: CopyKind | None = None
    source_device: int | None = None
    destination_device: int | None = None
    value: int | None = None


class ApiCall(NamedTuple):
    """One call of the host into the runtime."""

    name: str
    start_ns: int
    end_ns: int
    thread_id: int
    correlation_id: int


class Synchronization(NamedTuple):
    """One host call that orders work: which parts are None tells its sort.

    No stream and no event waits for the whole context, an event alone for that event, a stream alone for that
    stream; both make the stream wait for the event and do not block the host.
    """

    start_ns: int
    end_ns: int
    context: int
    stream: int | None
    event: int | None
    event_sync_id: int | None
    correlation_id: int


class EventRecord(NamedTuple):
    """One record of an event on a stream; `event` repeats when it is reused, `event_sync_id` never does."""

    context: int
    stream: int
    event: int
    event_sync_id: int
    correlation_id: int


class Range(NamedTuple):
    """One NVTX push/pop range of a host thread."""

    text: str
    start_ns: int
    end_ns: int
    thread_id: int
    domain: str
    category: str | None = None
    payload: int | None = None


class Stream(NamedTuple):
    """One stream of a context."""

    context: int
    stream: int


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """Everything that one rank's process recorded on its one device."""

    rank: int
    pid: int
    device: int
    device_name: str
    context: int
    streams: Sequence[Stream] = field(default=())
    ops: Sequence[Op] = field(default=())
    api_calls: Sequence[ApiCall] = field(default=())
    synchronizations: Sequence[Synchronization] = field(default=())
    event_records: Sequence[EventRecord] = field(default=())
    ranges: Sequence[Range] = field(default=())
