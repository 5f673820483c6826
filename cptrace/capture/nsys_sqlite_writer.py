"""Writes recorded processes as one report in the Nsight Systems SQLite schema.

The same records give the same bytes: tables and rows are inserted in a fixed order and nothing is taken
from the clock, the host or the environment.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from cptrace import __version__
from cptrace.capture import nsys_sqlite_schema as schema
from cptrace.capture.records import Op, OpKind, ProcessRecord, Synchronization
from cptrace.errors import RenderError
from cptrace.labels import RUN_METADATA_KEY

EMULATED: Final = "emulated device, not recorded by nsys"

_VM_ID: Final = 1 << 48
_KERNEL_SHAPE: Final = (
    1,
    1,
    1,
    1,
    1,
    1,
)  # grid and block; an emulated kernel has neither, and 0 is not legal
_DRIVER_PREFIX: Final = "cu"
_RUNTIME_PREFIX: Final = "cuda"

Row = tuple[Any, ...]


def write_report(
    path: Path,
    processes: Sequence[ProcessRecord],
    run_metadata: Mapping[str, Any],
    *,
    session_start_ns: int = 0,
    recorded_by: str = EMULATED,
) -> None:
    """Write all processes into one report at `path`, replacing a file that is there.

    The report appears under its name only when it is complete.

    Args:
        path: Where the report goes; its folder must exist.
        processes: One record per rank.
        run_metadata: The run's description, schema `cptrace.run/1`; it must be expressible as JSON.
        session_start_ns: Wall-clock time of the session's start, ns since 1970 (0 for a virtual clock).
        recorded_by: Where the records come from, for the version that the report states.

    Raises:
        RenderError: The report cannot be written there.

    Source: schema of SQLite exports of Nsight Systems 2025.5, see `nsys_sqlite_schema`.
    """
    partial = partial_path(path)
    try:
        _write_database(partial, processes, run_metadata, session_start_ns, recorded_by)
        os.replace(partial, path)
    except (OSError, sqlite3.Error) as error:
        raise RenderError(f"cannot write the report {path}: {error}") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def partial_path(path: Path) -> Path:
    """Return the name under which a report is built before it takes its place."""
    return path.with_name(f".{path.name}.partial")


def global_pid(pid: int) -> int:
    """Return the serialized id of a process: hardware and VM bits, then the pid in bits 24 to 47.

    Example:
        >>> global_pid(144)
        281477392629760
    """
    return _VM_ID | (pid << 24)


class _Strings:
    """Gives each distinct text a StringIds id, in order of first use."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def __getitem__(self, text: str) -> int:
        return self._ids.setdefault(text, len(self._ids))

    def rows(self) -> Iterator[Row]:
        return ((identity, text) for text, identity in self._ids.items())


def _write_database(
    path: Path,
    processes: Sequence[ProcessRecord],
    run_metadata: Mapping[str, Any],
    session_start_ns: int,
    recorded_by: str,
) -> None:
    path.unlink(missing_ok=True)
    ordered = sorted(processes, key=lambda process: process.rank)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = OFF")  # the file is thrown away if anything fails
        connection.execute("BEGIN")
        for table, columns in schema.TABLES.items():
            connection.execute(f"CREATE TABLE {table} ({columns})")
        for table, entries in schema.ENUMS.items():
            connection.execute(f"CREATE TABLE {table} ({schema.ENUM_COLUMNS})")
            _insert(connection, table, entries)
        for table, rows in _content(ordered, run_metadata, session_start_ns, recorded_by):
            _insert(connection, table, rows)
        connection.execute("COMMIT")


def _insert(connection: sqlite3.Connection, table: str, rows: Iterable[Row]) -> None:
    materialised = list(rows)
    if materialised:
        marks = ", ".join("?" * len(materialised[0]))
        connection.executemany(f"INSERT INTO {table} VALUES ({marks})", materialised)


def _content(
    processes: Sequence[ProcessRecord],
    run_metadata: Mapping[str, Any],
    session_start_ns: int,
    recorded_by: str,
) -> Iterator[tuple[str, Iterable[Row]]]:
    """Yield each table's rows; StringIds comes last, when all texts are known."""
    strings = _Strings()
    yield "TARGET_INFO_SESSION_START_TIME", [_session_start(session_start_ns)]
    yield "TARGET_INFO_GPU", map(_gpu_row, processes)
    yield "TARGET_INFO_CUDA_CONTEXT_INFO", map(_context_row, processes)
    yield "META_DATA_CAPTURE", _capture_metadata(run_metadata)
    yield "META_DATA_EXPORT", _export_metadata(recorded_by)
    for process in processes:
        yield "TARGET_INFO_CUDA_STREAM", _stream_rows(process)
        yield "CUPTI_ACTIVITY_KIND_KERNEL", _kernel_rows(process, strings)
        yield "CUPTI_ACTIVITY_KIND_MEMCPY", _memcpy_rows(process)
        yield "CUPTI_ACTIVITY_KIND_MEMSET", _memset_rows(process)
        yield "CUPTI_ACTIVITY_KIND_RUNTIME", _runtime_rows(process, strings)
        yield "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", _synchronization_rows(process)
        yield "CUPTI_ACTIVITY_KIND_CUDA_EVENT", _event_rows(process)
    yield "NVTX_EVENTS", _nvtx_rows(processes, strings)
    yield "StringIds", strings.rows()


def _session_start(session_start_ns: int) -> Row:
    text = datetime.fromtimestamp(session_start_ns // 1_000_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return session_start_ns, text, f"{text} +0000 UTC"


def _gpu_row(process: ProcessRecord) -> Row:
    n_columns = schema.TABLES["TARGET_INFO_GPU"].count(",") + 1
    values: list[Any] = [None] * n_columns
    values[:3] = [_VM_ID, process.device, process.device_name]
    return tuple(values)


def _context_row(process: ProcessRecord) -> Row:
    null_stream = min((stream.stream for stream in process.streams), default=0)
    return null_stream, 0, 1, process.pid, process.device, process.context, 0, 0


def _stream_rows(process: ProcessRecord) -> Iterator[Row]:
    null_stream = min((stream.stream for stream in process.streams), default=0)
    for context, stream in sorted(process.streams):
        flag = schema.STREAM_NULL if stream == null_stream else schema.STREAM_NON_BLOCKING
        yield stream, 0, 1, process.pid, context, 0, flag


def _ops(process: ProcessRecord, kind: OpKind) -> list[Op]:
    return sorted(
        (op for op in process.ops if op.kind is kind), key=lambda op: (op.start_ns, op.correlation_id)
    )


def _op_columns(process: ProcessRecord, op: Op) -> Row:
    pid = global_pid(process.pid)
    return op.start_ns, op.end_ns, op.device, op.context, None, op.stream, op.correlation_id, pid


def _kernel_rows(process: ProcessRecord, strings: _Strings) -> Iterator[Row]:
    for grid_id, op in enumerate(_ops(process, OpKind.KERNEL), start=1):
        name, short = strings[op.name], strings[op.name.rpartition("::")[2]]
        attributes = (name, short, name, schema.LAUNCH_REGULAR, None, 0, *_KERNEL_SHAPE, 0, 0, 0, 0, grid_id)
        yield (*_op_columns(process, op), *attributes, *(None,) * 13)


def _memcpy_rows(process: ProcessRecord) -> Iterator[Row]:
    kind = schema.MEMORY_KIND_DEVICE
    for op in _ops(process, OpKind.MEMCPY):
        devices = (op.source_device, None, op.destination_device, None)
        yield (*_op_columns(process, op), op.bytes, op.copy_kind, None, kind, kind, *devices, *(None,) * 3, 1)


def _memset_rows(process: ProcessRecord) -> Iterator[Row]:
    for op in _ops(process, OpKind.MEMSET):
        yield (*_op_columns(process, op), op.value, op.bytes, None, schema.MEMORY_KIND_DEVICE)


def _runtime_rows(process: ProcessRecord, strings: _Strings) -> Iterator[Row]:
    for call in sorted(process.api_calls, key=lambda call: (call.start_ns, call.correlation_id)):
        is_driver = call.name.startswith(_DRIVER_PREFIX) and not call.name.startswith(_RUNTIME_PREFIX)
        event_class = schema.EVENT_CLASS_DRIVER if is_driver else schema.EVENT_CLASS_RUNTIME
        thread = global_pid(process.pid) | call.thread_id
        yield (
            call.start_ns,
            call.end_ns,
            event_class,
            thread,
            call.correlation_id,
            strings[call.name],
            0,
            None,
        )


def _sync_type(sync: Synchronization) -> int:
    if sync.stream is None:
        return schema.SYNC_CONTEXT if sync.event is None else schema.SYNC_EVENT
    return schema.SYNC_STREAM if sync.event is None else schema.SYNC_STREAM_WAIT_EVENT


def _or_none_id(identity: int | None) -> int:
    return schema.NONE_ID if identity is None else identity


def _synchronization_rows(process: ProcessRecord) -> Iterator[Row]:
    pid = global_pid(process.pid)
    for sync in sorted(process.synchronizations, key=lambda sync: (sync.start_ns, sync.correlation_id)):
        place = (process.device, sync.context, None, _or_none_id(sync.stream), sync.correlation_id, pid)
        event = (_or_none_id(sync.event), _or_none_id(sync.event_sync_id))
        yield (sync.start_ns, sync.end_ns, *place, None, _sync_type(sync), *event)


def _event_rows(process: ProcessRecord) -> Iterator[Row]:
    pid = global_pid(process.pid)
    for record in sorted(process.event_records, key=lambda record: record.correlation_id):
        place = (process.device, record.context, None, record.stream, record.correlation_id, pid)
        # Completion on the device: real exports leave it 0 unless event tracing was asked for.
        yield (0, *place, record.event, record.event_sync_id)


def _nvtx_rows(processes: Sequence[ProcessRecord], strings: _Strings) -> Iterator[Row]:
    domains = _numbered(item.domain for process in processes for item in process.ranges)
    categories = _numbered(
        item.category for process in processes for item in process.ranges if item.category is not None
    )
    for process in processes:
        yield from _nvtx_declarations(process, domains, categories)
        for item in sorted(process.ranges, key=lambda item: (item.start_ns, -item.end_ns, item.text)):
            category = None if item.category is None else categories[item.category]
            thread, text_id = global_pid(process.pid) | item.thread_id, strings[item.text]
            names = (category, None, None, thread, None, text_id, domains[item.domain])
            payload = (None, item.payload, *(None,) * 7)
            yield (item.start_ns, item.end_ns, schema.NVTX_PUSH_POP_RANGE, None, *names, *payload)


def _numbered(names: Iterable[str]) -> dict[str, int]:
    """Return ids from 1, by name; 0 is the default domain and no category."""
    return {name: identity for identity, name in enumerate(sorted(set(names)), start=1)}


def _nvtx_declarations(
    process: ProcessRecord, domains: Mapping[str, int], categories: Mapping[str, int]
) -> Iterator[Row]:
    if not process.ranges:
        return
    start = min(item.start_ns for item in process.ranges)
    thread = global_pid(process.pid) | min(item.thread_id for item in process.ranges)
    tail = (None,) * 9
    for name, domain in domains.items():
        yield (
            start,
            None,
            schema.NVTX_DOMAIN_CREATE,
            None,
            None,
            None,
            name,
            thread,
            None,
            None,
            domain,
            *tail,
        )
    pairs = sorted({(item.domain, item.category) for item in process.ranges if item.category is not None})
    for domain_name, category in pairs:
        place = (category, thread, None, None, domains[domain_name])
        yield (start, None, schema.NVTX_CATEGORY, None, categories[category], None, *place, *tail)


def _capture_metadata(run_metadata: Mapping[str, Any]) -> list[Row]:
    return [
        ("CAPTURE_EVENT_TYPE", "NvtxEvents"),
        ("CAPTURE_EVENT_TYPE", "Cuda"),
        (RUN_METADATA_KEY, json.dumps(run_metadata, separators=(",", ":"), allow_nan=False)),
    ]


def _export_metadata(recorded_by: str) -> list[Row]:
    major, minor, micro = schema.SCHEMA_VERSION
    return [
        ("EXPORT_PRODUCT_VERSION", f"cptrace {__version__} ({recorded_by})"),
        ("EXPORT_SCHEMA_VERSION", f"{major}.{minor}.{micro}"),
        ("EXPORT_SCHEMA_VERSION_MAJOR", str(major)),
        ("EXPORT_SCHEMA_VERSION_MINOR", str(minor)),
        ("EXPORT_SCHEMA_VERSION_MICRO", str(micro)),
        ("EXPORT_PARAM_EXPORT_TYPE", "SQLite"),
        ("EXPORT_PARAM_LAZY", "false"),
    ]
