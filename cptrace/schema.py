"""Columns of every Trace table: type, unit, whether a value may be missing, and meaning.

Identity, in one place. *process* is the exporter's global process id (unique within a file, unlike the operating
system's pid). A *queue* of device work is (process, context, stream): stream ids repeat across processes. A *launch*
is joined to its device work on (process, correlation_id): correlation ids repeat across processes too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd

from cptrace.errors import TraceError
from cptrace.intervals import Int64Array

INT64: Final = "int64"
INT32: Final = "int32"
NULLABLE_INT64: Final = "Int64"
CATEGORY: Final = "category"
BOOL: Final = "bool"
FLOAT64: Final = "float64"


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a Trace table."""

    name: str
    dtype: str
    meaning: str
    unit: str = ""
    is_nullable: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """One Trace table: its columns, and the order that makes equal input give equal bytes."""

    name: str
    meaning: str
    columns: tuple[Column, ...]
    order: tuple[str, ...]

    @property
    def column_names(self) -> list[str]:
        """Names of the columns, in order."""
        return [column.name for column in self.columns]


_PROCESS: Final = Column("process", INT64, "global process id of the exporter")
_CONTEXT: Final = Column("context", INT64, "CUDA context id, unique within its process")
_CORRELATION: Final = Column(
    "correlation_id", NULLABLE_INT64, "joins a host call to what it caused, per process", is_nullable=True
)
_HOST_TIMES: Final = (
    Column("start_ns", INT64, "start of the host call", "ns"),
    Column("end_ns", INT64, "end of the host call", "ns"),
)
_THREAD: Final = Column("thread", INT64, "global thread id of the calling host thread")

OPS: Final = Table(
    "ops",
    "device work: one row per kernel, copy, memset or whole-graph launch",
    (
        Column("start_ns", INT64, "start on the device", "ns"),
        Column("end_ns", INT64, "end on the device, never before the start", "ns"),
        Column("rank", INT32, "rank that the (process, device) pair is"),
        _PROCESS,
        Column("device", INT64, "device ordinal"),
        _CONTEXT,
        Column("stream", INT64, "stream id, unique within its process and context"),
        _CORRELATION,
        Column("kind", CATEGORY, "kernel, memcpy, memset or graph"),
        Column(
            "name",
            CATEGORY,
            "demangled kernel name; for copies the direction, for graphs `CUDA graph launch`",
        ),
        Column(
            "bytes",
            NULLABLE_INT64,
            "bytes copied or set; for a collective what the rank hands in, where the trace tells",
            "bytes",
            is_nullable=True,
        ),
        Column("is_peer_copy", BOOL, "a copy whose two ends are different devices"),
        Column(
            "group",
            CATEGORY,
            "process group of a collective, where the trace tells it (`3 of 4 ranks [0, 2, 4, 6]`)",
            is_nullable=True,
        ),
    ),
    ("start_ns", "end_ns", "rank", "context", "stream", "kind", "name", "correlation_id", "bytes", "process"),
)

ROLES: Final = Table(
    "roles",
    "what the classifier adds to ops",
    (
        Column("role", CATEGORY, "comm, compute, copy or other"),
        Column("collective", CATEGORY, "kind of collective, for comm only", is_nullable=True),
        Column("rule", CATEGORY, "name of the rule that decided the role"),
        Column("is_unclassified", BOOL, "only a fallback rule applied"),
    ),
    (),
)

API_CALLS: Final = Table(
    "api_calls",
    "CUDA runtime and driver calls on the host",
    (
        *_HOST_TIMES,
        _PROCESS,
        _THREAD,
        _CORRELATION,
        Column("name", CATEGORY, "function name with its version suffix", is_nullable=True),
    ),
    ("start_ns", "end_ns", "process", "thread", "correlation_id", "name"),
)

SYNCS: Final = Table(
    "syncs",
    "synchronisation calls; the times are the host call's, never a wait on the device",
    (
        *_HOST_TIMES,
        _PROCESS,
        _CONTEXT,
        Column("kind", CATEGORY, "context (or device), stream, event (or its query) or stream_wait"),
        Column("stream", NULLABLE_INT64, "stream that is waited for, or that waits", is_nullable=True),
        Column("event_id", NULLABLE_INT64, "event waited for; ids are reused", is_nullable=True),
        Column(
            "event_sync_id", NULLABLE_INT64, "names one record of an event, from 2025.1", is_nullable=True
        ),
        _CORRELATION,
    ),
    ("start_ns", "end_ns", "process", "context", "kind", "stream", "event_id", "correlation_id"),
)

EVENT_RECORDS: Final = Table(
    "event_records",
    "cudaEventRecord: the record side of events; its time is that of the API call with the same correlation id",
    (
        _PROCESS,
        _CONTEXT,
        Column("stream", INT64, "stream that the event was recorded in"),
        Column("event_id", INT64, "event; ids are reused"),
        Column("event_sync_id", NULLABLE_INT64, "names this one record, from 2025.1", is_nullable=True),
        _CORRELATION,
    ),
    ("process", "correlation_id", "context", "stream", "event_id"),
)

RANGES: Final = Table(
    "ranges",
    "NVTX ranges and marks on the host",
    (
        Column("start_ns", INT64, "start on the host", "ns"),
        Column(
            "end_ns",
            NULLABLE_INT64,
            "end on the host; missing for marks and unclosed ranges",
            "ns",
            is_nullable=True,
        ),
        _PROCESS,
        _THREAD,
        Column("kind", CATEGORY, "push_pop (nested per thread), start_end or mark"),
        Column(
            "domain",
            CATEGORY,
            "NVTX domain; missing for the default domain and for unnamed ones",
            is_nullable=True,
        ),
        Column("name", CATEGORY, "text of the range", is_nullable=True),
        Column("payload", NULLABLE_INT64, "integer payload", is_nullable=True),
    ),
    ("start_ns", "end_ns", "process", "thread", "kind", "domain", "name", "payload"),
)

RANKS: Final = Table(
    "ranks",
    "one row per (process, device) pair that did device work",
    (
        Column("rank", INT32, "rank as recorded with the run, else by order of (device, process)"),
        _PROCESS,
        Column("pid", INT64, "process id of the operating system"),
        Column("device", INT64, "device ordinal"),
        Column("device_name", CATEGORY, "device name", is_nullable=True),
        Column("is_recorded", BOOL, "the rank was recorded with the run, not counted by us"),
    ),
    ("rank",),
)

GPU_SAMPLES: Final = Table(
    "gpu_samples",
    "samples of the GPU's own counters",
    (
        Column("time_ns", INT64, "when the sample was taken", "ns"),
        Column("device", INT64, "device ordinal"),
        Column("metric", CATEGORY, "sm_active or tensor_active"),
        Column("share", FLOAT64, "part of the units that were active, 0 to 1"),
    ),
    ("time_ns", "device", "metric"),
)

ALLOCATIONS: Final = Table(
    "allocations",
    "device memory that was allocated or released",
    (
        Column("time_ns", INT64, "when the call was made", "ns"),
        _PROCESS,
        Column("device", INT64, "device ordinal"),
        Column("change_bytes", INT64, "what the memory in use grew by; negative for a release", "bytes"),
    ),
    ("time_ns", "process", "device", "change_bytes"),
)

TABLES: Final = (OPS, API_CALLS, SYNCS, EVENT_RECORDS, RANGES, RANKS, GPU_SAMPLES, ALLOCATIONS)


def make_frame(table: Table, columns: dict[str, Any]) -> pd.DataFrame:
    """Return a frame of a table's columns in its total order of rows, so that shuffled input gives the same frame.

    Args:
        table: Table that the frame shall be.
        columns: One array per column of the table, of that column's dtype.

    Raises:
        TraceError: A column lacks, is not known or has another type.
    """
    ordered = _in_order({name: columns[name] for name in table.column_names}, table.order)
    frame = pd.DataFrame(ordered, copy=False)
    check_frame(table, frame)
    return frame


def empty_frame(table: Table) -> pd.DataFrame:
    """Return a frame of a table's columns without rows.

    Args:
        table: Table that the frame shall be.
    """
    return pd.DataFrame({column.name: pd.Series([], dtype=_empty_dtype(column)) for column in table.columns})


def check_frame(table: Table, frame: pd.DataFrame, extra: Iterable[Column] = ()) -> None:
    """Check that a frame has a table's columns and types.

    Args:
        table: Table that the frame shall be.
        frame: Frame to check.
        extra: Columns that another table adds.

    Raises:
        TraceError: A column lacks or has another type.
    """
    for column in (*table.columns, *extra):
        if column.name not in frame.columns:
            raise TraceError(
                f"table {table.name} lacks its column {column.name!r}; it has {list(frame.columns)}"
            )
        found = str(frame[column.name].dtype)
        if found != column.dtype:
            raise TraceError(f"column {table.name}.{column.name} must be {column.dtype}, found {found}")


def _in_order(columns: dict[str, Any], order: tuple[str, ...]) -> dict[str, Any]:
    """Return the columns sorted by the keys.

    Sorting a million rows by all keys costs many times a sort by the first one, which most files are already sorted
    by, and ties in it are rare: they alone are sorted by the rest.
    """
    first = np.asarray(columns[order[0]])
    is_sorted = not np.any(first[1:] < first[:-1])
    positions = np.arange(len(first)) if is_sorted else np.argsort(first, kind="stable")
    ties = _find_ties(first[positions])
    if len(ties):
        rows = positions[ties]
        positions[ties] = rows[np.lexsort([_sort_key(columns[name][rows]) for name in reversed(order)])]
    if not is_sorted:
        return {name: column[positions] for name, column in columns.items()}
    moved = ties[positions[ties] != ties]
    return _move(columns, positions[moved], moved) if len(moved) else columns


def _find_ties(ordered: Int64Array) -> Int64Array:
    """Return the places of ordered values that equal the one before or behind."""
    is_tie = np.zeros(len(ordered), bool)
    is_tie[1:] = ordered[1:] == ordered[:-1]
    is_tie[:-1] |= is_tie[1:]
    return np.flatnonzero(is_tie)


def _move(columns: dict[str, Any], source: Int64Array, target: Int64Array) -> dict[str, Any]:
    """Return the columns with a few rows put to other places; in place where the memory is ours."""
    moved = {}
    for name, column in columns.items():
        is_ours = not isinstance(column, np.ndarray) or column.flags.writeable
        moved[name] = column if is_ours else column.copy()
        moved[name][target] = column[source]
    return moved


def _sort_key(column: Any) -> Int64Array:
    """Return integers that sort as the values do; missing values come first."""
    if isinstance(column, pd.Categorical):
        # Codes follow the order in which the file names things; only the order of the texts is the same for all files.
        # As objects, and only those in use: numpy's own texts each take the room of the longest one of the file.
        used, slot = np.unique(column.codes, return_inverse=True)
        texts = column.categories.to_numpy(dtype=object)[used[used >= 0]]
        by_text = np.concatenate(
            (used[used < 0], np.argsort(np.argsort(texts, kind="stable"), kind="stable"))
        )
        return np.asarray(by_text[slot], np.int64)
    if isinstance(column, pd.arrays.IntegerArray):
        return column.to_numpy(dtype=np.int64, na_value=np.iinfo(np.int64).min)
    return np.asarray(column, np.int64)


def _empty_dtype(column: Column) -> Any:
    return pd.CategoricalDtype(pd.Index([], dtype=str)) if column.dtype == CATEGORY else column.dtype
