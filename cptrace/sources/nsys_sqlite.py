"""Source `nsys_sqlite`: SQLite exports of Nsight Systems, every schema generation from 2021 on.

Tables and columns come and go between versions and options, so each is used where it exists and reported where it
does not; nothing depends on a product version, on the order of columns or on the order of rows.

This module says what to read and starts to read it; `nsys_tables` makes a Trace of it. It stays free of pandas, which
takes longer to import than a hundred thousand rows take to read.

Source: the schema in the exports themselves, and "SQLite Schema Reference" in the Nsight Systems user guide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cptrace.errors import SourceError
from cptrace.requests import ReadOptions
from cptrace.sources.base import Source
from cptrace.sources.sqlite_columns import MAGIC, PendingColumns, Query, SqliteFile

if TYPE_CHECKING:
    from cptrace.trace import Trace

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
SESSION: Final = "TARGET_INFO_SESSION_START_TIME"
DIAGNOSTICS: Final = "DIAGNOSTIC_EVENT"
METADATA: Final = ("EXPORT_META_DATA", "META_DATA_EXPORT", "META_DATA_CAPTURE")
EXPECTED_TABLES: Final = (KERNEL, MEMCPY, MEMSET, RUNTIME, SYNCHRONIZATION, CUDA_EVENT, NVTX, GPU_INFO)

OP_COLUMNS: Final = {
    "start_ns": "start",
    "end_ns": "end",
    "process": "globalPid",
    "device": "deviceId",
    "context": "contextId",
    "stream": "streamId",
    "correlation_id": "correlationId",
}
_PAYLOADS: Final = ("int64Value", "uint64Value", "int32Value", "uint32Value")
# In the order of reading: device work first. Its table takes longest to make, and that goes on while the rest is read.
_COLUMNS: Final[dict[str, dict[str, str]]] = {
    KERNEL: {**OP_COLUMNS, "name_id": "demangledName"},
    MEMCPY: {
        **OP_COLUMNS,
        "bytes": "bytes",
        "copy_kind": "copyKind",
        "src": "srcDeviceId",
        "dst": "dstDeviceId",
    },
    MEMSET: {**OP_COLUMNS, "bytes": "bytes"},
    GRAPH: OP_COLUMNS,
    NVTX: {
        "start_ns": "start",
        "end_ns": "end",
        "type": "eventType",
        "thread": "globalTid",
        "domain_id": "domainId",
        "text_id": "textId",
    },
    SYNCHRONIZATION: {
        "start_ns": "start",
        "end_ns": "end",
        "process": "globalPid",
        "context": "contextId",
        "stream": "streamId",
        "event_id": "eventId",
        "event_sync_id": "eventSyncId",
        "correlation_id": "correlationId",
    },
    CUDA_EVENT: {
        "process": "globalPid",
        "context": "contextId",
        "stream": "streamId",
        "event_id": "eventId",
        "event_sync_id": "eventSyncId",
        "correlation_id": "correlationId",
    },
    RUNTIME: {
        "start_ns": "start",
        "end_ns": "end",
        "thread": "globalTid",
        "correlation_id": "correlationId",
        "name_id": "nameId",
    },
}


# Without these a table says nothing; every version has them.
_REQUIRED: Final[dict[str, tuple[str, ...]]] = {
    KERNEL: ("start", "end", "deviceId", "contextId", "streamId", "demangledName"),
    MEMCPY: ("start", "end", "deviceId", "contextId", "streamId", "copyKind"),
    MEMSET: ("start", "end", "deviceId", "contextId", "streamId"),
    GRAPH: ("start", "end", "deviceId", "contextId", "streamId"),
    RUNTIME: ("start", "end", "globalTid", "nameId"),
    SYNCHRONIZATION: ("start", "end", "contextId", "streamId", "eventId"),
    CUDA_EVENT: ("contextId", "streamId", "eventId"),
    NVTX: ("start", "end", "eventType", "globalTid"),
}


@dataclass(frozen=True, slots=True)
class NsysReading:
    """An export that is being read.

    Attributes:
        file: The export.
        columns: Its columns, as they come.
        options: How to read it.
    """

    file: SqliteFile
    columns: PendingColumns
    options: ReadOptions

    def finish(self) -> Trace:
        """Return the trace, once everything is read."""
        from cptrace.sources.nsys_tables import assemble  # here: it brings pandas

        try:
            return assemble(self.file, self.columns, self.options)
        finally:
            self.file.close()

    def cancel(self) -> None:
        """Give up what has not been read yet."""
        self.columns.cancel()
        self.file.close()


def start(path: Path, options: ReadOptions) -> NsysReading:
    """Start to read an Nsight Systems SQLite export.

    Args:
        path: Path of an existing SQLite file; it is opened read-only.
        options: How to read it.

    Raises:
        SourceError: The file is damaged or is no Nsight Systems export.
    """
    file = SqliteFile(path)
    try:
        _check_is_export(file)
        present = [table for table in _COLUMNS if file.has_rows(table)]
        _check_is_whole(file, present)
        queries = {table: _query(file, table) for table in present}
        return NsysReading(file, file.start_reading(queries, options.progress), options)
    except SourceError:
        file.close()
        raise


def _recognises(_path: Path, first_bytes: bytes) -> bool:
    return first_bytes.startswith(MAGIC)


SOURCE: Final = Source(
    NAME, "Nsight Systems SQLite export (nsys export --type sqlite)", (".sqlite", ".db"), _recognises, start
)


def _check_is_export(file: SqliteFile) -> None:
    known = {*_COLUMNS, *METADATA[:2], SESSION}
    if not known & file.columns.keys():
        found = ", ".join(sorted(file.columns)[:4]) or "no table"
        raise SourceError(
            f"{file.path}: an SQLite file but no Nsight Systems export (it has {found}); make one with:"
            " nsys export --type sqlite REPORT.nsys-rep"
        )


def _check_is_whole(file: SqliteFile, present: Sequence[str]) -> None:
    for table in present:
        lacking = [column for column in _REQUIRED[table] if column not in file.columns[table]]
        if lacking:
            raise SourceError(
                f"{file.path}: {table} lacks its column {lacking[0]}, which every Nsight Systems export has; the file"
                " was changed after the export: export the report again"
            )
    if KERNEL in present and not file.has_rows(STRINGS):
        raise SourceError(
            f"{file.path}: it has kernels but nothing in the table {STRINGS}, so their names are not known and"
            " communication cannot be told from compute; export the report again with all tables"
        )


def _query(file: SqliteFile, table: str) -> Query:
    """Return what to read from a table, by the columns that this file's version has."""
    has = file.columns[table]
    columns = {name: f'"{column}"' for name, column in _COLUMNS[table].items() if column in has}
    if table == NVTX:
        payloads = [f'"{column}"' for column in _PAYLOADS if column in has]
        if payloads:
            columns["payload"] = f"coalesce({', '.join(payloads)}, NULL)"
        if "text" in has:
            # As bytes: programs give NVTX what they like, and one text that is not UTF-8 must not cost the whole file.
            columns["text"] = "CAST(coalesce(text, '') AS BLOB)"
    return Query(table, columns)
