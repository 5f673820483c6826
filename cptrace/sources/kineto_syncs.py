"""Synchronisations and event records of a PyTorch profiler trace.

Kineto writes a synchronisation as an event of the category cuda_sync on the timeline of the device, but it is no device
work: its times are those of the host's call. It says which record of its event it waits for by the correlation id of
the cudaEventRecord call; this id names the record in both tables here. The records themselves, of the category
cuda_event, are there since CUDA 12.8; before, those are known that something waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from cptrace import schema
from cptrace.intervals import BoolArray, Int64Array
from cptrace.sources.columns import category, nullable
from cptrace.sources.kineto_raw import RawEvents

_KINDS: Final = ("context", "stream", "event", "stream_wait")
_KIND_OF: Final = {
    "context sync": "context",
    "device sync": "context",
    "stream sync": "stream",
    "event sync": "event",
    "stream wait event": "stream_wait",
}
# CUPTI's word for no stream and no event, as a signed and as an unsigned number.
_NONE: Final = (-1, 2**32 - 1)


Owners = Callable[[Int64Array], Int64Array]


def make_syncs(raw: RawEvents, owners: Owners) -> pd.DataFrame:
    """Return the table of synchronisations.

    Args:
        raw: Events of the category cuda_sync.
        owners: Returns the process that each of some devices belongs to.
    """
    columns: dict[str, Any] = {
        "start_ns": raw.ints("start_ns"),
        "end_ns": raw.ints("end_ns"),
        "process": owners(raw.first_of("device", "pid")),
        "context": raw.ints("context"),
        "kind": category(_kinds(raw), list(_KINDS)),
        "stream": nullable(raw.ints("stream"), ~_is_id(raw, "stream")),
        "event_id": nullable(raw.ints("wait_event"), ~_is_id(raw, "wait_event")),
        "event_sync_id": nullable(raw.ints("wait_record"), ~_is_id(raw, "wait_record")),
        "correlation_id": raw.optional("correlation"),
    }
    return schema.make_frame(schema.SYNCS, columns)


def make_event_records(records: RawEvents, syncs: RawEvents, owners: Owners) -> pd.DataFrame:
    """Return the table of event records: those that the trace lists, and those that a synchronisation names.

    Args:
        records: Events of the category cuda_event.
        syncs: Events of the category cuda_sync.
        owners: Returns the process that each of some devices belongs to.
    """
    listed = _record_rows(records, "stream", "event_id", "correlation")
    named = _record_rows(syncs, "wait_stream", "wait_event", "wait_record")
    rows = pd.concat((listed, named))
    rows = rows.assign(process=owners(rows["device"].to_numpy())).drop_duplicates(["process", "correlation"])
    number = rows["correlation"].to_numpy()
    columns: dict[str, Any] = {
        "process": rows["process"].to_numpy(),
        "context": rows["context"].to_numpy(),
        "stream": rows["stream"].to_numpy(),
        "event_id": rows["event_id"].to_numpy(),
        "event_sync_id": nullable(number, None),
        "correlation_id": nullable(number.copy(), None),
    }
    return schema.make_frame(schema.EVENT_RECORDS, columns)


def _record_rows(raw: RawEvents, stream: str, event_id: str, correlation: str) -> pd.DataFrame:
    """Return the events that name a record, its stream and its event; in an order that the file's does not change."""
    names = {"correlation": correlation, "context": "context", "stream": stream, "event_id": event_id}
    is_known = _is_id(raw, stream) & _is_id(raw, event_id) & _is_id(raw, correlation)
    rows = pd.DataFrame({name: raw.ints(column)[is_known] for name, column in names.items()})
    rows["device"] = raw.first_of("device", "pid")[is_known]
    return rows.sort_values(list(names), ignore_index=True)


def _is_id(raw: RawEvents, name: str) -> BoolArray:
    is_id: BoolArray = raw.is_there(name) & ~np.isin(raw.ints(name), _NONE)
    return is_id


def _kinds(raw: RawEvents) -> npt.NDArray[np.int64]:
    """Return the code of each one's kind: as the event says, else by what it names."""
    told = _told_kinds(raw, "sync_kind")
    told = np.where(told < 0, _told_kinds(raw, "name"), told)
    by_ids = _is_id(raw, "stream").astype(np.int64) + 2 * _is_id(raw, "wait_event")
    return np.where(told < 0, by_ids, told)


def _told_kinds(raw: RawEvents, name: str) -> Int64Array:
    codes, texts = raw.coded(name)
    kinds = [_KIND_OF.get(text.lower()) for text in texts]
    of_text = np.array([*(-1 if kind is None else _KINDS.index(kind) for kind in kinds), -1], np.int64)
    return of_text[codes]
