"""Device work and calls of an emulated device, from the NVTX ranges in which it says them.

A profiler records no device work where there is no CUDA. Our emulated device says its ops, calls and events in ranges
of the domain `cptrace` (see `cptrace.labels`): ops on the thread of their stream, which makes one lane per stream
thread, calls on the host's. Here they become the tables that a trace of CUDA has, and are no longer ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from cptrace import labels, schema
from cptrace.intervals import BoolArray, Int64Array
from cptrace.launches import distinct_names, names_match
from cptrace.sources.columns import category, no_category, nullable
from cptrace.trace import Note

_CONTEXT: Final = 1  # an emulated device has one
_MIRRORED: Final = rf"^({'|'.join(labels.MIRRORED)}) "
_OP_KINDS: Final = ("kernel", "memcpy", "memset")
_COPY_NAMES: Final = {"memcpy": "memcpy DtoD", "memset": "memset"}
_SYNC_KINDS: Final = ("context", "stream", "event", "stream_wait")

AssignRanks = Callable[[Int64Array, Int64Array], tuple[Int64Array, pd.DataFrame]]


@dataclass(frozen=True, slots=True)
class Lanes:
    """What ranges said of an emulated device, as the tables of `cptrace.schema`.

    Attributes:
        ops: Device work.
        ranks: Ranks that did it.
        api_calls: Calls on the host.
        syncs: Synchronisation calls.
        event_records: The record side of events.
        ranges: The other ranges.
        notes: What a reader should know.
    """

    ops: pd.DataFrame
    ranks: pd.DataFrame
    api_calls: pd.DataFrame
    syncs: pd.DataFrame
    event_records: pd.DataFrame
    ranges: pd.DataFrame
    notes: tuple[Note, ...]


def find_lanes(ranges: pd.DataFrame, assign_ranks: AssignRanks) -> Lanes | None:
    """Return the tables that ranges of an emulated device stand for, None where no op is among them.

    Args:
        ranges: Ranges as `schema.RANGES`.
        assign_ranks: Returns the rank of each op and the table of ranks, from the process and device of each.
    """
    said = _Said.of(ranges)
    executed = said.closed(labels.EXECUTE)
    if executed is None:
        return None
    device = executed.ints("device")
    rank, ranks = assign_ranks(executed.column("process"), device)
    calls = said.called()
    return Lanes(
        ops=_ops(executed, device, rank),
        ranks=ranks,
        api_calls=_api_calls(calls),
        syncs=_syncs(calls.of(labels.WAIT)),
        event_records=_event_records(calls.of(labels.RECORD)),
        ranges=ranges[~said.is_said].reset_index(drop=True),
        notes=_notes(executed, said),
    )


@dataclass(frozen=True, slots=True)
class _Labelled:
    """Ranges of N rows with our labels.

    Attributes:
        frame: The ranges.
        parsed: Distinct labels.
        slot: Which of them each range has, int64 of shape (N,).
    """

    frame: pd.DataFrame
    parsed: Sequence[labels.Label]
    slot: Int64Array

    def column(self, name: str) -> Int64Array:
        return self.frame[name].to_numpy(dtype=np.int64)

    def names(self) -> npt.NDArray[np.object_]:
        return np.array([label.name for label in self.parsed], object)[self.slot]

    def ints(self, field: str) -> Int64Array:
        """Return an integer field of each range's label, 0 where it has none."""
        values = [label.fields.get(field, "") for label in self.parsed]
        numbers = [int(value) if value.isdecimal() else 0 for value in values]
        return np.array(numbers, np.int64)[self.slot]

    def has(self, field: str) -> BoolArray:
        return np.array([field in label.fields for label in self.parsed], bool)[self.slot]

    def optional(self, field: str) -> pd.arrays.IntegerArray:
        return nullable(self.ints(field), ~self.has(field))

    def texts(self, texts: Sequence[str | None]) -> pd.Categorical:
        """Return a text of each distinct label as a column."""
        return category(self.slot, texts)

    def of(self, name: str) -> _Labelled:
        return self.keep(self.names() == name)

    def keep(self, is_kept: BoolArray) -> _Labelled:
        return _Labelled(self.frame[is_kept], self.parsed, self.slot[is_kept])


@dataclass(frozen=True, slots=True)
class _Said:
    """Ranges that stand for something else: which of all ranges they are, and what they say."""

    is_said: BoolArray
    labelled: _Labelled

    @classmethod
    def of(cls, ranges: pd.DataFrame) -> _Said:
        is_ours = (ranges["domain"] == labels.DOMAIN).to_numpy(dtype=bool)
        is_said = is_ours & names_match(ranges["name"], _MIRRORED)
        texts, slot = distinct_names(ranges["name"][is_said])
        parsed = [labels.parse_label(text or "") or labels.Label("") for text in texts]
        return cls(is_said, _Labelled(ranges[is_said], parsed, np.asarray(slot, np.int64)))

    def closed(self, name: str) -> _Labelled | None:
        """Return the ranges of a name that were closed, None where there are none."""
        rows = self.labelled.of(name)
        rows = rows.keep(rows.frame["end_ns"].notna().to_numpy())
        return None if rows.frame.empty else rows

    def called(self) -> _Labelled:
        """Return the calls on the host that were closed."""
        rows = self.labelled.keep(self.labelled.names() != labels.EXECUTE)
        return rows.keep(rows.frame["end_ns"].notna().to_numpy())

    @property
    def n_open(self) -> int:
        return int(self.labelled.frame["end_ns"].isna().sum())


def _times(rows: _Labelled) -> dict[str, Any]:
    columns: dict[str, Any] = {name: rows.column(name) for name in ("start_ns", "end_ns", "process")}
    return {**columns, "correlation_id": rows.frame["payload"].array}


def _ops(rows: _Labelled, device: Int64Array, rank: Int64Array) -> pd.DataFrame:
    kinds = [label.fields.get("kind", "") for label in rows.parsed]
    names = [
        _COPY_NAMES.get(kind) or label.fields.get("name", "(unnamed kernel)")
        for kind, label in zip(kinds, rows.parsed, strict=True)
    ]
    columns: dict[str, Any] = {
        **_times(rows),
        "rank": rank,
        "device": device,
        "context": np.full(len(rank), _CONTEXT, np.int64),
        "stream": rows.ints("stream"),
        "kind": rows.texts([kind if kind in _OP_KINDS else _OP_KINDS[0] for kind in kinds]),
        "name": rows.texts(names),
        "bytes": rows.optional("bytes"),
        "is_peer_copy": np.zeros(len(rank), bool),
        "group": no_category(len(rank)),
    }
    return schema.make_frame(schema.OPS, columns)


def _api_calls(rows: _Labelled) -> pd.DataFrame:
    names = rows.texts([label.fields.get("api") for label in rows.parsed])
    columns = {**_times(rows), "thread": rows.column("thread"), "name": names}
    return schema.make_frame(schema.API_CALLS, columns)


def _syncs(rows: _Labelled) -> pd.DataFrame:
    kind = rows.has("stream").astype(np.int8) + 2 * rows.has("event").astype(np.int8)
    columns = {
        **_times(rows),
        "context": np.full(len(kind), _CONTEXT, np.int64),
        "kind": category(kind, list(_SYNC_KINDS)),
        "stream": rows.optional("stream"),
        "event_id": rows.optional("event"),
        "event_sync_id": rows.optional("event_sync_id"),
    }
    return schema.make_frame(schema.SYNCS, columns)


def _event_records(rows: _Labelled) -> pd.DataFrame:
    columns = {
        "process": rows.column("process"),
        "context": np.full(len(rows.frame), _CONTEXT, np.int64),
        "stream": rows.ints("stream"),
        "event_id": rows.ints("event"),
        "event_sync_id": rows.optional("event_sync_id"),
        "correlation_id": rows.frame["payload"].array,
    }
    return schema.make_frame(schema.EVENT_RECORDS, columns)


def _notes(executed: _Labelled, said: _Said) -> tuple[Note, ...]:
    n_threads = executed.frame["thread"].nunique()
    text = (
        "the report has no device work; operations, calls and events are those that an emulated device says in its"
        f" NVTX ranges, one lane for each of {n_threads} stream threads: no figure is a GPU's"
    )
    notes = [Note("nvtx-lanes", text, len(executed.frame))]
    if said.n_open:
        notes.append(
            Note(
                "dropped-rows", "operations or calls whose range was never closed were left out", said.n_open
            )
        )
    return tuple(notes)
