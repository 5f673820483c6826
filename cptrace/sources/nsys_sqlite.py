"""Source `nsys_sqlite`: SQLite exports of Nsight Systems, every schema generation from 2021 on.

Tables and columns come and go between versions and options, so each is used where it exists and reported where it
does not; nothing depends on a product version, on the order of columns or on the order of rows.

Source: the schema in the exports themselves, and "SQLite Schema Reference" in the Nsight Systems user guide.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from cptrace import labels, schema
from cptrace.errors import SourceError, TraceError
from cptrace.intervals import Int64Array
from cptrace.sources.base import BoolArray, ReadOptions, Source, all_missing, category, nullable
from cptrace.sources.sqlite_columns import MAGIC, Query, SqliteFile, decode_text, integers
from cptrace.trace import CPU_EMULATED, CUDA, Note, Trace, TraceMeta

NAME: Final = "nsys_sqlite"

KERNEL: Final = "CUPTI_ACTIVITY_KIND_KERNEL"
MEMCPY: Final = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSET: Final = "CUPTI_ACTIVITY_KIND_MEMSET"
GRAPH: Final = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
RUNTIME: Final = "CUPTI_ACTIVITY_KIND_RUNTIME"
SYNCHRONIZATION: Final = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
CUDA_EVENT: Final = "CUPTI_ACTIVITY_KIND_CUDA_EVENT"
NVTX: Final = "NVTX_EVENTS"
STRINGS: Final = "StringIds"
GPU_INFO: Final = "TARGET_INFO_GPU"
EXPECTED_TABLES: Final = (KERNEL, MEMCPY, MEMSET, RUNTIME, SYNCHRONIZATION, CUDA_EVENT, NVTX, GPU_INFO)

# The upper 40 bits of a global thread id are the global process id; of those, the lower 24 are the pid.
_PROCESS_MASK: Final = ~0xFFFFFF
_PID_SHIFT: Final = 24
_PID_MASK: Final = 0xFFFFFF
_NO_ID: Final = 4_294_967_295

_OP_COLUMNS: Final = {
    "start_ns": "start",
    "end_ns": "end",
    "process": "globalPid",
    "device": "deviceId",
    "context": "contextId",
    "stream": "streamId",
    "correlation_id": "correlationId",
}
_PAYLOADS: Final = ("int64Value", "uint64Value", "int32Value", "uint32Value")
_RANGE_KINDS: Final = {
    59: "push_pop",
    70: "push_pop",
    60: "start_end",
    71: "start_end",
    34: "mark",
    65: "mark",
}
_DOMAIN_CREATE: Final = 75
_COPY_NAMES: Final = {
    0: "memcpy",
    1: "memcpy HtoD",
    2: "memcpy DtoH",
    3: "memcpy HtoA",
    4: "memcpy AtoH",
    5: "memcpy AtoA",
    6: "memcpy AtoD",
    7: "memcpy DtoA",
    8: "memcpy DtoD",
    9: "memcpy HtoH",
    10: "memcpy PtoP",
    11: "memcpy unified HtoD",
    12: "memcpy unified DtoH",
    13: "memcpy unified DtoD",
}
_COPY_PEER: Final = 10
_COPIES_BETWEEN_DEVICES: Final = (0, 8, _COPY_PEER)
_SYNC_KINDS: Final = ("context", "stream", "event", "stream_wait")
_MAX_DIAGNOSTICS: Final = 5

Columns = dict[str, pa.ChunkedArray]


class _Part(NamedTuple):
    """Device work of one kind: the columns of `schema.OPS` before ranks are known."""

    columns: dict[str, Any]
    n_rows: int


def read(path: Path, options: ReadOptions) -> Trace:
    """Return the trace that an Nsight Systems SQLite export holds.

    Args:
        path: Path of an existing SQLite file; it is opened read-only.
        options: How to read it.

    Raises:
        SourceError: The file is damaged or is no Nsight Systems export.
        TraceError: Device work has impossible times.
    """
    file = SqliteFile(path)
    _check_is_export(file)
    present = [table for table in (*EXPECTED_TABLES, GRAPH) if file.has_rows(table)]
    queries = {table: query for table in present if (query := _query(file, table)) is not None}
    data = dict(zip(queries, file.read(list(queries.values()), options.progress), strict=True))
    notes: list[Note] = []
    run = _run_metadata(file)
    names = _device_names(file)
    ops, ranks = _ops_and_ranks(file, data, run, names, options, notes)
    tables = {
        "api_calls": _api_calls(file, data.get(RUNTIME), notes),
        "syncs": _syncs(file, data.get(SYNCHRONIZATION)),
        "event_records": _event_records(file, data.get(CUDA_EVENT)),
        "ranges": _ranges(file, data.get(NVTX), notes),
    }
    notes += _diagnostics(file)
    missing = tuple(table for table in EXPECTED_TABLES if table not in present)
    return Trace(meta=_meta(file, run, missing, notes), ops=ops, ranks=ranks, **tables)


def _recognises(_path: Path, first_bytes: bytes) -> bool:
    return first_bytes.startswith(MAGIC)


SOURCE: Final = Source(
    NAME, "Nsight Systems SQLite export (nsys export --type sqlite)", (".sqlite", ".db"), _recognises, read
)


def _check_is_export(file: SqliteFile) -> None:
    known = {
        *EXPECTED_TABLES,
        GRAPH,
        "META_DATA_EXPORT",
        "EXPORT_META_DATA",
        "TARGET_INFO_SESSION_START_TIME",
    }
    if not known & file.columns.keys():
        found = ", ".join(sorted(file.columns)[:4]) or "no table"
        raise SourceError(
            f"{file.path}: an SQLite file but no Nsight Systems export (it has {found}); make one with:"
            " nsys export --type sqlite REPORT.nsys-rep"
        )


# --- queries ---------------------------------------------------------------------------------------------------------


def _query(file: SqliteFile, table: str) -> Query | None:
    """Return what to read from a table, by the columns that this file's version has."""
    wanted = {
        KERNEL: {**_OP_COLUMNS, "name_id": "demangledName"},
        MEMCPY: {
            **_OP_COLUMNS,
            "bytes": "bytes",
            "copy_kind": "copyKind",
            "src": "srcDeviceId",
            "dst": "dstDeviceId",
        },
        MEMSET: {**_OP_COLUMNS, "bytes": "bytes"},
        GRAPH: _OP_COLUMNS,
        RUNTIME: {
            "start_ns": "start",
            "end_ns": "end",
            "thread": "globalTid",
            "correlation_id": "correlationId",
            "name_id": "nameId",
        },
        SYNCHRONIZATION: {
            **{name: column for name, column in _OP_COLUMNS.items() if name != "device"},
            "event_id": "eventId",
            "event_sync_id": "eventSyncId",
        },
        CUDA_EVENT: {
            **{name: _OP_COLUMNS[name] for name in ("process", "context", "stream", "correlation_id")},
            "event_id": "eventId",
            "event_sync_id": "eventSyncId",
        },
        NVTX: {
            "start_ns": "start",
            "end_ns": "end",
            "type": "eventType",
            "thread": "globalTid",
            "domain_id": "domainId",
            "text_id": "textId",
        },
    }.get(table)
    if wanted is None:
        return None
    has = file.columns[table]
    columns = {name: f'"{column}"' for name, column in wanted.items() if column in has}
    if table == NVTX:
        payloads = [f'"{column}"' for column in _PAYLOADS if column in has]
        if payloads:
            columns["payload"] = f"coalesce({', '.join(payloads)}, NULL)"
        if "text" in has:
            # As bytes: programs give NVTX what they like, and one text that is not UTF-8 must not cost the whole file.
            columns["text"] = "CAST(coalesce(text, '') AS BLOB)"
    return Query(table, columns)


def _ints(file: SqliteFile, table: str, data: Columns, name: str) -> tuple[Int64Array, BoolArray | None]:
    """Return an integer column, all missing where the file's version lacks it."""
    n_rows = len(next(iter(data.values())))
    if name not in data:
        return np.zeros(n_rows, np.int64), np.ones(n_rows, bool)
    try:
        return integers(data[name])
    except TypeError as error:
        raise SourceError(
            f"{file.path}: {table}.{name} holds {error} where Nsight Systems writes integers; the file was changed"
            " after the export: export the report again"
        ) from error


# --- device work -----------------------------------------------------------------------------------------------------


def _ops_and_ranks(
    file: SqliteFile,
    data: dict[str, Columns],
    run: dict[str, Any],
    device_names: dict[int, str],
    options: ReadOptions,
    notes: list[Note],
) -> tuple[pd.DataFrame, pd.DataFrame]:
    parts = [
        make(file, data[table], options, notes)
        for table, make in ((KERNEL, _kernels), (MEMCPY, _copies), (MEMSET, _memsets), (GRAPH, _graphs))
        if table in data
    ]
    parts = [part for part in parts if part.n_rows]
    if not parts:
        return schema.empty_frame(schema.OPS), schema.empty_frame(schema.RANKS)
    names = [column for column in schema.OPS.column_names if column != "rank"]
    columns: dict[str, Any] = {name: _join([part.columns[name] for part in parts]) for name in names}
    columns["rank"], ranks = _assign_ranks(columns["process"], columns["device"], run, device_names)
    return schema.make_frame(schema.OPS, columns), ranks


def _join(columns: list[Any]) -> Any:
    """Return parts of one column as one."""
    if len(columns) == 1:
        return columns[0]
    if isinstance(columns[0], pd.Categorical):
        return pd.api.types.union_categoricals(columns)
    if isinstance(columns[0], pd.arrays.IntegerArray):
        return pd.concat([pd.Series(column) for column in columns], ignore_index=True).array
    return np.concatenate(columns)


def _op_part(
    file: SqliteFile, table: str, kind: str, data: Columns, options: ReadOptions, notes: list[Note]
) -> tuple[dict[str, Any], BoolArray | None]:
    """Return the columns that all kinds of device work share, and which rows are kept (None for all)."""
    ints = {name: _ints(file, table, data, name) for name in _OP_COLUMNS}
    keep = _valid_times(file, table, ints, options, notes)
    correlation, is_missing = ints.pop("correlation_id")
    columns: dict[str, Any] = {name: values for name, (values, _) in ints.items()}
    for name in ("device", "context", "stream"):
        columns[name] = columns[name].astype(np.int32)
    columns["correlation_id"] = nullable(correlation, is_missing)
    n_rows = len(correlation)
    columns["kind"] = category(np.zeros(n_rows, np.int8), [kind])
    columns["bytes"] = all_missing(n_rows)
    columns["is_peer_copy"] = np.zeros(n_rows, bool)
    return columns, keep


def _finish(columns: dict[str, Any], keep: BoolArray | None) -> _Part:
    if keep is not None:
        columns = {name: column[keep] for name, column in columns.items()}
    return _Part(columns, len(columns["start_ns"]))


def _kernels(file: SqliteFile, data: Columns, options: ReadOptions, notes: list[Note]) -> _Part:
    columns, keep = _op_part(file, KERNEL, "kernel", data, options, notes)
    columns["name"] = _texts(file, *_ints(file, KERNEL, data, "name_id"), fallback="(unnamed kernel)")
    return _finish(columns, keep)


def _copies(file: SqliteFile, data: Columns, options: ReadOptions, notes: list[Note]) -> _Part:
    columns, keep = _op_part(file, MEMCPY, "memcpy", data, options, notes)
    columns["bytes"] = nullable(*_ints(file, MEMCPY, data, "bytes"))
    kind, _ = _ints(file, MEMCPY, data, "copy_kind")
    names = [_COPY_NAMES.get(code, f"memcpy kind {code}") for code in range(int(kind.max(initial=0)) + 1)]
    columns["name"] = category(kind, names)
    ends = [_device_end(*_ints(file, MEMCPY, data, name)) for name in ("src", "dst")]
    is_between = (
        np.isin(kind, _COPIES_BETWEEN_DEVICES) & (ends[0] >= 0) & (ends[1] >= 0) & (ends[0] != ends[1])
    )
    columns["is_peer_copy"] = (kind == _COPY_PEER) | is_between
    return _finish(columns, keep)


def _device_end(device: Int64Array, is_missing: BoolArray | None) -> Int64Array:
    """Return the device at one end of a copy, -1 where it is not known: a helper of this comparison only."""
    is_known = (device != _NO_ID) if is_missing is None else (device != _NO_ID) & ~is_missing
    return np.where(is_known, device, -1)


def _memsets(file: SqliteFile, data: Columns, options: ReadOptions, notes: list[Note]) -> _Part:
    columns, keep = _op_part(file, MEMSET, "memset", data, options, notes)
    columns["bytes"] = nullable(*_ints(file, MEMSET, data, "bytes"))
    columns["name"] = category(np.zeros(len(columns["bytes"]), np.int8), ["memset"])
    return _finish(columns, keep)


def _graphs(file: SqliteFile, data: Columns, options: ReadOptions, notes: list[Note]) -> _Part:
    columns, keep = _op_part(file, GRAPH, "graph", data, options, notes)
    columns["name"] = category(np.zeros(len(columns["bytes"]), np.int8), ["CUDA graph launch"])
    return _finish(columns, keep)


def _valid_times(
    file: SqliteFile,
    table: str,
    ints: dict[str, tuple[Int64Array, BoolArray | None]],
    options: ReadOptions,
    notes: list[Note],
) -> BoolArray | None:
    """Return which rows have possible times, None for all; refuse the file where one has not, unless told to drop."""
    (start, no_start), (end, no_end) = ints["start_ns"], ints["end_ns"]
    is_bad = end < start
    if not _is_time_shifted(file):
        is_bad |= start < 0
    for mask in (no_start, no_end):
        is_bad = is_bad if mask is None else is_bad | mask
    n_bad = int(np.count_nonzero(is_bad))
    if not n_bad:
        return None
    if not options.drop_invalid:
        row = int(np.argmax(is_bad))
        raise TraceError(
            f"{file.path}: {n_bad} of {len(start)} rows of {table} have missing, negative or reversed times"
            f" (the first: start {start[row]}, end {end[row]}); export the report again, or leave such rows out"
            " with --drop-invalid"
        )
    notes.append(
        Note("dropped-rows", f"{table}: rows with missing, negative or reversed times were left out", n_bad)
    )
    return ~is_bad


def _is_time_shifted(file: SqliteFile) -> bool:
    """Return whether the export was asked to shift times, which may make them negative."""
    value = _metadata(file).get("EXPORT_CONFIG_TIME_SHIFT", "0")
    return value not in ("", "0")


def _assign_ranks(
    process: Int64Array, device: Int64Array, run: dict[str, Any], device_names: dict[int, str]
) -> tuple[Int64Array, pd.DataFrame]:
    """Return the rank of each op and the table of ranks: as recorded, else counted by (device, process)."""
    # Device ordinals are small: together with the process id they make one integer key.
    codes, _ = pd.factorize(process)
    key = codes.astype(np.int64) * (int(device.max()) + 1) + device
    slot, first_keys = pd.factorize(key)
    first = np.zeros(len(first_keys), np.int64)
    first[slot[::-1]] = np.arange(len(slot))[::-1]
    frame = pd.DataFrame({"process": process[first], "device": device[first]})
    frame["pid"] = (frame["process"].to_numpy() >> _PID_SHIFT) & _PID_MASK
    recorded = {(entry["pid"], entry["device"]): entry["rank"] for entry in run.get("ranks", [])}
    pairs = list(zip(frame["pid"].tolist(), frame["device"].tolist(), strict=True))
    is_recorded = bool(recorded) and all(pair in recorded for pair in pairs)
    if is_recorded:
        frame["rank"] = [recorded[pair] for pair in pairs]
    else:
        by_device = np.lexsort((frame["process"].to_numpy(), frame["device"].to_numpy()))
        frame["rank"] = np.argsort(by_device)
    frame["rank"] = frame["rank"].astype(np.int32)
    frame["is_recorded"] = is_recorded
    ordinals = sorted(set(frame["device"].tolist()))
    texts = [device_names.get(ordinal, "") for ordinal in ordinals]
    codes = np.searchsorted(ordinals, frame["device"].to_numpy())
    frame["device_name"] = category(np.where([bool(texts[c]) for c in codes], codes, -1), texts)
    ranks = schema.make_frame(schema.RANKS, {name: frame[name].array for name in frame.columns})
    return frame["rank"].to_numpy()[slot], ranks


def _device_names(file: SqliteFile) -> dict[int, str]:
    """Return the name of each CUDA device; other GPUs of the machine are listed beside them."""
    columns = file.columns.get(GPU_INFO, frozenset())
    if not {"id", "name"} <= columns:
        return {}
    ordinal = "coalesce(cuDevice, id)" if "cuDevice" in columns else "id"
    rows = file.rows(f"SELECT {ordinal}, name FROM {GPU_INFO} ORDER BY id DESC")
    return {device: name for device, name in rows if device is not None and isinstance(name, str)}


# --- host side -------------------------------------------------------------------------------------------------------


def _api_calls(file: SqliteFile, data: Columns | None, notes: list[Note]) -> pd.DataFrame:
    if data is None:
        return schema.empty_frame(schema.API_CALLS)
    start, end = (_ints(file, RUNTIME, data, name)[0] for name in ("start_ns", "end_ns"))
    thread, _ = _ints(file, RUNTIME, data, "thread")
    columns: dict[str, Any] = {
        "start_ns": start,
        "end_ns": end,
        "process": thread & _PROCESS_MASK,
        "thread": thread,
        "correlation_id": nullable(*_ints(file, RUNTIME, data, "correlation_id")),
        "name": _texts(file, *_ints(file, RUNTIME, data, "name_id")),
    }
    return schema.make_frame(schema.API_CALLS, _drop_reversed(columns, end < start, RUNTIME, notes))


def _drop_reversed(
    columns: dict[str, Any], is_bad: BoolArray, table: str, notes: list[Note]
) -> dict[str, Any]:
    n_bad = int(np.count_nonzero(is_bad))
    if not n_bad:
        return columns
    notes.append(Note("dropped-rows", f"{table}: rows that end before they start were left out", n_bad))
    return {name: column[~is_bad] for name, column in columns.items()}


def _syncs(file: SqliteFile, data: Columns | None) -> pd.DataFrame:
    if data is None:
        return schema.empty_frame(schema.SYNCS)
    ints = {name: _ints(file, SYNCHRONIZATION, data, name) for name in data}
    stream, has_stream = _optional_id(*ints["stream"])
    event, has_event = _optional_id(*ints["event_id"])
    # Never from syncType: its meaning changed between versions and contradicts the file's own enumeration.
    kind = has_stream.astype(np.int8) + 2 * has_event.astype(np.int8)
    n_rows = len(kind)
    columns: dict[str, Any] = {
        "start_ns": ints["start_ns"][0],
        "end_ns": ints["end_ns"][0],
        "process": ints["process"][0],
        "context": ints["context"][0].astype(np.int32),
        "kind": category(kind, list(_SYNC_KINDS)),
        "stream": nullable(stream, ~has_stream),
        "event_id": nullable(event, ~has_event),
        "event_sync_id": _optional_column(ints, "event_sync_id", n_rows),
        "correlation_id": _optional_column(ints, "correlation_id", n_rows),
    }
    return schema.make_frame(schema.SYNCS, columns)


def _optional_id(values: Int64Array, is_missing: BoolArray | None) -> tuple[Int64Array, BoolArray]:
    """Return ids and which of them are really there: the exporter writes all ones for none."""
    is_there = values != _NO_ID
    return values, is_there if is_missing is None else is_there & ~is_missing


def _optional_column(
    ints: dict[str, tuple[Int64Array, BoolArray | None]], name: str, n_rows: int
) -> pd.arrays.IntegerArray:
    if name not in ints:
        return all_missing(n_rows)
    values, is_there = _optional_id(*ints[name])
    return nullable(values, ~is_there)


def _event_records(file: SqliteFile, data: Columns | None) -> pd.DataFrame:
    if data is None:
        return schema.empty_frame(schema.EVENT_RECORDS)
    ints = {name: _ints(file, CUDA_EVENT, data, name) for name in data}
    n_rows = len(ints["process"][0])
    columns: dict[str, Any] = {
        "process": ints["process"][0],
        "context": ints["context"][0].astype(np.int32),
        "stream": ints["stream"][0].astype(np.int32),
        "event_id": ints["event_id"][0],
        "event_sync_id": _optional_column(ints, "event_sync_id", n_rows),
        "correlation_id": _optional_column(ints, "correlation_id", n_rows),
    }
    return schema.make_frame(schema.EVENT_RECORDS, columns)


# --- NVTX ------------------------------------------------------------------------------------------------------------


def _ranges(file: SqliteFile, data: Columns | None, notes: list[Note]) -> pd.DataFrame:
    if data is None:
        return schema.empty_frame(schema.RANGES)
    event_type, _ = _ints(file, NVTX, data, "type")
    kinds = sorted(set(_RANGE_KINDS.values()))
    kind_of_type = np.full(int(event_type.max(initial=0)) + 1, -1, np.int8)
    for code, kind in _RANGE_KINDS.items():
        if code < len(kind_of_type):
            kind_of_type[code] = kinds.index(kind)
    kind_codes = kind_of_type[event_type]
    start, _ = _ints(file, NVTX, data, "start_ns")
    end, no_end = _ints(file, NVTX, data, "end_ns")
    thread, _ = _ints(file, NVTX, data, "thread")
    columns: dict[str, Any] = {
        "start_ns": start,
        "end_ns": nullable(end, no_end),
        "process": thread & _PROCESS_MASK,
        "thread": thread,
        "kind": category(kind_codes, kinds),
        "domain": _domains(file, data, event_type, thread & _PROCESS_MASK),
        "name": _range_names(file, data),
        "payload": nullable(*_ints(file, NVTX, data, "payload")),
    }
    is_range = kind_codes >= 0
    if not is_range.all():
        columns = {name: column[is_range] for name, column in columns.items()}
        start, end = start[is_range], end[is_range]
        no_end = no_end if no_end is None else no_end[is_range]
    is_reversed = (end < start) if no_end is None else (end < start) & ~no_end
    return schema.make_frame(schema.RANGES, _drop_reversed(columns, is_reversed, NVTX, notes))


def _range_names(file: SqliteFile, data: Columns) -> pd.Categorical:
    """Return the texts of ranges: written out in the row or as an id of a registered string, mixed in one file."""
    registered = _texts(file, *_ints(file, NVTX, data, "text_id"))
    if "text" not in data:
        return registered
    column = data["text"].combine_chunks()
    written = pc.if_else(pc.equal(column, b""), None, column).dictionary_encode()
    codes = written.indices.fill_null(-1).to_numpy().astype(np.int64)
    n_written = len(written.dictionary)
    from_id = np.where(registered.codes < 0, -1, registered.codes.astype(np.int64) + n_written)
    texts = pa.concat_arrays([_as_text(written.dictionary), pa.array(registered.categories, pa.string())])
    return category(np.where(codes < 0, from_id, codes), texts)


def _as_text(raw: pa.Array) -> pa.Array:
    """Return bytes as text; only where some are not UTF-8, one by one."""
    try:
        return raw.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([decode_text(text) for text in raw.to_pylist()], pa.string())


def _domains(file: SqliteFile, data: Columns, event_type: Int64Array, process: Int64Array) -> pd.Categorical:
    """Return the domain name of each row; ids are per process and named by a row of their own, which may be missing."""
    domain, _ = _ints(file, NVTX, data, "domain_id")
    is_create = event_type == _DOMAIN_CREATE
    codes = np.full(len(domain), -1, np.int64)
    if not is_create.any():
        return category(codes, [])
    names = _range_names(file, {name: column.filter(pa.array(is_create)) for name, column in data.items()})
    for position, row in enumerate(np.flatnonzero(is_create)):
        codes[(process == process[row]) & (domain == domain[row])] = position
    is_named = np.append(names.codes >= 0, False)
    return category(
        np.where(is_named[codes], codes, -1), ["" if name is None else str(name) for name in names]
    )


def _texts(
    file: SqliteFile, ids: Int64Array, is_missing: BoolArray | None, fallback: str | None = None
) -> pd.Categorical:
    """Return the texts of string ids; where an id or its text is missing, the fallback or a missing value."""
    slot, unique = pd.factorize(ids)
    found = file.strings(STRINGS, unique.tolist()) if STRINGS in file.columns else {}
    texts = [found.get(key, "") for key in unique.tolist()]
    is_known = np.array([bool(text) for text in texts], bool)[slot]
    if is_missing is not None:
        is_known &= ~is_missing
    if fallback is None:
        return category(np.where(is_known, slot, -1), texts)
    return category(np.where(is_known, slot, len(texts)), [*texts, fallback])


# --- about the file --------------------------------------------------------------------------------------------------


def _metadata(file: SqliteFile) -> dict[str, str]:
    rows: dict[str, str] = {}
    for table in ("EXPORT_META_DATA", "META_DATA_EXPORT", "META_DATA_CAPTURE"):
        if {"name", "value"} <= file.columns.get(table, frozenset()):
            rows.update(file.rows(f"SELECT name, value FROM {table} WHERE value IS NOT NULL"))
    return rows


def _run_metadata(file: SqliteFile) -> dict[str, Any]:
    """Return what an instrumented run recorded about itself, empty where there is none."""
    text = _metadata(file).get(labels.RUN_METADATA_KEY)
    if text is None:
        return {}
    try:
        run = json.loads(text)
    except ValueError as error:
        raise TraceError(f"{file.path}: its row {labels.RUN_METADATA_KEY} is not JSON ({error})") from error
    if not isinstance(run, dict) or run.get("schema") != labels.RUN_METADATA_SCHEMA:
        raise TraceError(
            f"{file.path}: its row {labels.RUN_METADATA_KEY} is not of schema {labels.RUN_METADATA_SCHEMA};"
            " it needs another version of cptrace"
        )
    return run


def _meta(file: SqliteFile, run: dict[str, Any], missing: tuple[str, ...], notes: list[Note]) -> TraceMeta:
    metadata = _metadata(file)
    session = "TARGET_INFO_SESSION_START_TIME"
    start = (
        file.rows(f"SELECT utcEpochNs FROM {session}")
        if "utcEpochNs" in file.columns.get(session, ())
        else []
    )
    return TraceMeta(
        path=str(file.path),
        format=NAME,
        tool_version=metadata.get("EXPORT_PRODUCT_VERSION"),
        schema_version=metadata.get("EXPORT_SCHEMA_VERSION"),
        device_kind=CPU_EMULATED if run.get("device_kind") == CPU_EMULATED else CUDA,
        clock=run.get("clock"),
        run=MappingProxyType(run),
        session_start_utc_ns=start[0][0] if start else None,
        missing_tables=missing,
        notes=tuple(notes),
    )


def _diagnostics(file: SqliteFile) -> list[Note]:
    """Return what Nsight Systems itself warned about during the capture."""
    if not {"severity", "text"} <= file.columns.get("DIAGNOSTIC_EVENT", frozenset()):
        return []
    rows = file.rows(
        "SELECT text, count(*) FROM DIAGNOSTIC_EVENT WHERE severity IN (2, 3)"
        f" GROUP BY text ORDER BY max(severity) DESC, count(*) DESC, text LIMIT {_MAX_DIAGNOSTICS}"
    )
    return [
        Note("capture-diagnostic", f"Nsight Systems said: {' '.join(text.split())}", count)
        for text, count in rows
    ]
