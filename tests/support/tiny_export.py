"""Builds Nsight Systems SQLite exports of a few rows, so that a test shows the whole timeline that it is about.

    export = TinyExport()
    export.kernel("flash_fwd_kernel", 10, 30, launch=2)
    export.kernel("ncclDevKernel_SendRecv", 20, 40, stream=13, launch=4)
    export.range("step", 0, 8)
    export.write(tmp_path / "tiny.sqlite")

Times are nanoseconds. Process `pid` has the global id `global_pid(pid)`, and its only thread is numbered as the process
unless a row says otherwise. Ops with a `launch` get an API call that lasts one nanosecond and a correlation id of
their own.
"""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from tests.support import nsys_tables
from tests.support.nsys_tables import NONE

KERNEL: Final = "CUPTI_ACTIVITY_KIND_KERNEL"
MEMCPY: Final = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSET: Final = "CUPTI_ACTIVITY_KIND_MEMSET"
GRAPH: Final = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
RUNTIME: Final = "CUPTI_ACTIVITY_KIND_RUNTIME"
SYNCHRONIZATION: Final = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
CUDA_EVENT: Final = "CUPTI_ACTIVITY_KIND_CUDA_EVENT"
NVTX: Final = "NVTX_EVENTS"

SCHEMA: Final[Mapping[str, str]] = {
    **nsys_tables.SCHEMA,
    MEMSET: """
        start! end! deviceId! contextId! greenContextId streamId! correlationId globalPid value!
        bytes! graphNodeId memKind""",
    GRAPH: """
        start! end! deviceId! contextId! greenContextId streamId! correlationId globalPid graphId!
        graphExecId!""",
    "GPU_METRICS": "rawTimestamp timestamp! typeId! metricId! value!",
    "TARGET_INFO_GPU_METRICS": "typeId! sourceId! typeName:TEXT metricId! metricName:TEXT!",
    "CUDA_GPU_MEMORY_USAGE_EVENTS": """
        start! globalPid deviceId! contextId! address! pc bytes! memKind! memoryOperationType! name:TEXT
        correlationId streamId localMemoryPoolAddress""",
    "DIAGNOSTIC_EVENT": "timestamp! timestampType! source! severity! text:TEXT! globalPid",
}

PUSH_POP, START_END, MARK, DOMAIN_CREATE = 59, 60, 34, 75
DEFAULT_PID: Final = 100


def global_pid(pid: int) -> int:
    """Return the exporter's global id of a process."""
    return (1 << 48) | (pid << 24)


def global_tid(pid: int, thread: int | None = None) -> int:
    """Return the exporter's global id of a thread; without a number, of the process's main thread."""
    return global_pid(pid) | (pid if thread is None else thread)


class TinyExport:
    """Rows of an export, one method per kind of row; each returns the export, so that calls may be chained."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self._strings: dict[str, int] = {}
        self._n_correlations = 0
        self.add("META_DATA_EXPORT", name="EXPORT_PRODUCT_VERSION", value="2026.2.1.210")
        self.add("META_DATA_EXPORT", name="EXPORT_SCHEMA_VERSION", value="3.25.0")

    def add(self, table: str, **columns: Any) -> TinyExport:
        """Add a row as it is."""
        self.rows.setdefault(table, []).append(columns)
        return self

    def text_id(self, text: str) -> int:
        """Return the id of a text in StringIds."""
        return self._strings.setdefault(text, len(self._strings) + 1)

    def kernel(self, name: str, start: int | None, end: int | None, **where: Any) -> TinyExport:
        """Add a kernel; `where` as in `op`."""
        text = self.text_id(name)
        return self.op(KERNEL, start, end, demangledName=text, shortName=text, **where)

    def copy(
        self,
        start: int,
        end: int,
        *,
        kind: int = 8,
        size: int | None = 64,
        src: int | None = None,
        dst: int | None = None,
        **where: Any,
    ) -> TinyExport:
        """Add a copy of `size` bytes; kind 1 HtoD, 2 DtoH, 8 DtoD, 10 between two devices."""
        return self.op(
            MEMCPY, start, end, bytes=size, copyKind=kind, srcDeviceId=src, dstDeviceId=dst, **where
        )

    def memset(self, start: int, end: int, *, size: int = 64, **where: Any) -> TinyExport:
        """Add a memset."""
        return self.op(MEMSET, start, end, bytes=size, **where)

    def graph(self, start: int, end: int, **where: Any) -> TinyExport:
        """Add the launch of a CUDA graph that was traced as a whole."""
        return self.op(GRAPH, start, end, graphId=1, **where)

    def op(
        self,
        table: str,
        start: int | None,
        end: int | None,
        *,
        pid: int = DEFAULT_PID,
        device: int = 0,
        context: int = 1,
        stream: int = 7,
        launch: int | None = None,
        thread: int | None = None,
        correlation: int | None = None,
        **columns: Any,
    ) -> TinyExport:
        """Add a row of device work.

        Args:
            table: Its table.
            start: Start on the device.
            end: End on the device.
            pid: Process.
            device: Device ordinal.
            context: Context id.
            stream: Stream id.
            launch: Host time of its launch; None for work whose launch was not recorded.
            thread: Thread that launches it.
            correlation: Correlation id; by default one of its own where there is a launch.
            **columns: Other columns.
        """
        if launch is not None:
            correlation = self._next_correlation() if correlation is None else correlation
            self.call(
                "cudaLaunchKernel_v7000",
                launch,
                launch + 1,
                pid=pid,
                thread=thread,
                correlation=correlation,
            )
        where = {"deviceId": device, "contextId": context, "streamId": stream, "globalPid": global_pid(pid)}
        return self.add(table, start=start, end=end, **where, correlationId=correlation, **columns)

    def _next_correlation(self) -> int:
        self._n_correlations += 1
        return self._n_correlations

    def call(
        self,
        name: str,
        start: int,
        end: int,
        *,
        pid: int = DEFAULT_PID,
        thread: int | None = None,
        correlation: int | None = None,
    ) -> TinyExport:
        """Add a CUDA API call."""
        return self.add(
            RUNTIME,
            start=start,
            end=end,
            globalTid=global_tid(pid, thread),
            correlationId=correlation,
            nameId=self.text_id(name),
        )

    def sync(
        self,
        start: int,
        end: int,
        *,
        stream: int = NONE,
        event: int = NONE,
        event_sync: int | None = None,
        sync_type: int = 0,
        pid: int = DEFAULT_PID,
        context: int = 1,
    ) -> TinyExport:
        """Add a synchronisation call; it is of its kind by which of `stream` and `event` it has."""
        columns = {"contextId": context, "streamId": stream, "globalPid": global_pid(pid), "eventId": event}
        return self.add(
            SYNCHRONIZATION, start=start, end=end, **columns, eventSyncId=event_sync, syncType=sync_type
        )

    def record(
        self,
        event: int,
        *,
        stream: int = 7,
        event_sync: int | None = None,
        correlation: int | None = None,
        pid: int = DEFAULT_PID,
    ) -> TinyExport:
        """Add the recording of an event."""
        columns = {"contextId": 1, "streamId": stream, "globalPid": global_pid(pid), "eventId": event}
        return self.add(CUDA_EVENT, timestamp=0, **columns, eventSyncId=event_sync, correlationId=correlation)

    def range(
        self,
        text: str | bytes | None,
        start: int,
        end: int | None,
        *,
        pid: int = DEFAULT_PID,
        thread: int | None = None,
        event_type: int = PUSH_POP,
        domain: int = 0,
        is_registered: bool = False,
        payload: int | None = None,
    ) -> TinyExport:
        """Add an NVTX range; the text of a registered one is in StringIds."""
        name = {"textId": self.text_id(str(text))} if is_registered else {"text": text}
        return self.add(
            NVTX,
            start=start,
            end=end,
            eventType=event_type,
            globalTid=global_tid(pid, thread),
            domainId=domain,
            int64Value=payload,
            **name,
        )

    def domain(
        self, number: int, name: str, *, pid: int = DEFAULT_PID, is_registered: bool = False
    ) -> TinyExport:
        """Name an NVTX domain of a process."""
        return self.range(
            name, 0, None, pid=pid, event_type=DOMAIN_CREATE, domain=number, is_registered=is_registered
        )

    def run(self, **metadata: Any) -> TinyExport:
        """Add what an instrumented run records about itself."""
        value = json.dumps({"schema": "cptrace.run/1", **metadata})
        return self.add("META_DATA_CAPTURE", name="CPTRACE_RUN", value=value)

    def write(
        self,
        path: Path,
        *,
        order: random.Random | None = None,
        is_strict: bool = True,
        extra_columns: Iterable[str] = (),
    ) -> Path:
        """Write the export and return its path.

        Args:
            path: File to write.
            order: Shuffles the rows and the columns of each table; None to leave them in order.
            is_strict: Declare NOT NULL as Nsight Systems does, and fill such columns with 0 where a row has no value.
            extra_columns: Columns that every table has in addition, all NULL.
        """
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("BEGIN")
            for table, rows in self.rows.items():
                _write_table(connection, table, rows, order, is_strict, tuple(extra_columns))
            strings = [{"id": number, "value": text} for text, number in self._strings.items()]
            _write_table(connection, "StringIds", strings, order, is_strict, ())
            connection.execute("COMMIT")
        return path


def _write_table(
    connection: sqlite3.Connection,
    table: str,
    rows: list[dict[str, Any]],
    order: random.Random | None,
    is_strict: bool,
    extra_columns: tuple[str, ...],
) -> None:
    words = [*SCHEMA[table].split(), *extra_columns]
    rows = list(rows)
    if order is not None:
        order.shuffle(words)
        order.shuffle(rows)
    declarations, names, required = [], [], set()
    for word in words:
        name, _, kind = word.rstrip("!").partition(":")
        if word.endswith("!") and is_strict:
            required.add(name)
        names.append(name)
        kind = (kind or "INTEGER").replace("_", " ")
        declarations.append(f'"{name}" {kind}{" NOT NULL" if name in required else ""}')
    unknown = {name for row in rows for name in row} - set(names)
    if unknown:
        raise ValueError(f"{table} has no column {unknown}")
    connection.execute(f"CREATE TABLE {table} ({', '.join(declarations)})")
    slots = ", ".join("?" * len(names))
    for row in rows:
        values = [0 if (value := row.get(name)) is None and name in required else value for name in names]
        connection.execute(f"INSERT INTO {table} VALUES ({slots})", values)


def edit(path: Path, *statements: str) -> Path:
    """Run SQL statements on a file and return its path."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)
    return path
