"""Writes large Nsight Systems SQLite exports that look like training, for benchmarks and stress tests.

    python -m tests.support.synthetic_nsys OUT --kernels 1000000 --api-calls 1050000 --ranges 200000

The tables and columns are those of export schema 3.25; the timeline is that of `synthetic_timeline`. The same
arguments give the same bytes with one version of numpy and SQLite.
"""

from __future__ import annotations

import argparse
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

import numpy as np

from tests.support.nsys_tables import NONE, SCHEMA, create_table, insert_rows
from tests.support.synthetic_timeline import (
    API_NAMES,
    KERNELS,
    RECORD,
    REGISTERED,
    SYNC,
    WAIT,
    Array,
    Layout,
    Rows,
    simulate,
)

STRINGS: Final = tuple(
    dict.fromkeys(
        [text for kernel in KERNELS for text in (kernel.demangled, kernel.short, kernel.mangled)]
        + [*API_NAMES, *REGISTERED]
    )
)
EXPORT_METADATA: Final = (
    ("EXPORT_PRODUCT_VERSION", "2026.2.1.210"),
    ("EXPORT_SCHEMA_VERSION", "3.25.0"),
    ("DERIVED_BY", "synthetic_nsys.py"),
)
FIRST_STREAM: Final = 7
FIRST_PID: Final = 41_000


def write_synthetic(
    path: Path, n_kernels: int, n_api_calls: int, n_ranges: int, **layout: int | bool
) -> None:
    """Write a synthetic export.

    Args:
        path: The file to write; one that exists is replaced.
        n_kernels: Rows of CUPTI_ACTIVITY_KIND_KERNEL.
        n_api_calls: Rows of CUPTI_ACTIVITY_KIND_RUNTIME, at least `n_kernels`. What the launches leave
            over becomes copies, event records, stream waits and synchronizes.
        n_ranges: Rows of NVTX_EVENTS, the step ranges included.
        **layout: Fields of `Layout`.

    Raises:
        ValueError: The counts cannot make such an export.
    """
    shape = Layout(**layout)
    _check(n_kernels, n_api_calls, n_ranges, shape)
    tables = simulate(n_kernels, n_api_calls, n_ranges, shape)
    path = Path(path)
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        # A half-written file is worthless here, so there is nothing for a journal to protect.
        connection.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; BEGIN;")
        for table in SCHEMA:
            connection.execute(create_table(table))
        _write_small_tables(connection, shape)
        _write_large_tables(connection, tables, shape)
        connection.execute("COMMIT")


def _check(n_kernels: int, n_api_calls: int, n_ranges: int, shape: Layout) -> None:
    n_parts = shape.n_processes * shape.n_steps
    if n_kernels < n_parts:
        raise ValueError(f"{n_kernels} kernels do not fill {n_parts} steps of all processes")
    if n_api_calls < n_kernels:
        raise ValueError(f"{n_api_calls} API calls cannot launch {n_kernels} kernels")
    if not n_parts <= n_ranges <= n_api_calls:
        raise ValueError(f"{n_ranges} ranges: need {n_parts} for the steps, and at most one per API call")
    if shape.n_streams < 2:
        raise ValueError("communication needs a stream of its own: n_streams must be at least 2")


def _write_large_tables(connection: sqlite3.Connection, tables: Mapping[str, Rows], shape: Layout) -> None:
    tables = {name: _ordered(rows, shape, salt) for salt, (name, rows) in enumerate(tables.items())}
    _write_kernels(connection, tables["kernel"], shape)
    _write_copies(connection, tables["copy"], shape)
    _write_calls(connection, tables["call"], shape)
    _write_events(connection, tables["call"], shape)
    _write_ranges(connection, tables["range"], shape)


def _ordered(rows: Rows, shape: Layout, salt: int) -> Rows:
    if shape.is_shuffled:
        order = np.random.default_rng([shape.seed, salt]).permutation(rows["start"].size)
    else:
        order = np.argsort(rows["start"], kind="stable")
    return {name: column[order] for name, column in rows.items()}


def _pids(shape: Layout) -> Array:
    return FIRST_PID + np.arange(shape.n_processes)


def _global_pids(shape: Layout) -> Array:
    return (1 << 48) + (_pids(shape) << 24)


def _stream_ids(shape: Layout) -> Array:
    """Return the stream id of each process and slot: process 0 computes on 7, process 1 on 15."""
    slots = 4 * np.arange(shape.n_streams)
    return (FIRST_STREAM + 8 * np.arange(shape.n_processes)[:, None] + slots).ravel()


def _where(rows: Rows, slot: Array, shape: Layout) -> dict[str, object]:
    process = rows["process"]
    return {
        "deviceId": process,
        "contextId": process + 1,
        "globalPid": (_global_pids(shape), process),
        "streamId": (_stream_ids(shape), process.astype(np.int64) * shape.n_streams + slot),
        "correlationId": rows["correlation"],
    }


def _ids(texts: Sequence[str]) -> list[int]:
    return [STRINGS.index(text) + 1 for text in texts]


def _write_kernels(connection: sqlite3.Connection, rows: Rows, shape: Layout) -> None:
    constants = """
        greenContextId=0 launchType=1 cacheConfig=1 registersPerThread=168 gridY=1 gridZ=1 blockY=1 blockZ=1
        staticSharedMemory=0 dynamicSharedMemory=0 localMemoryPerThread=0 localMemoryTotal=250871808
        sharedMemoryExecuted=32768 sharedMemoryLimitConfig=0 clusterX=0 clusterY=0 clusterZ=0
        clusterSchedulingPolicy=1 maxPotentialClusterSize=0 maxActiveClusters=0
        tensorSizeMinusOneElements='[]'"""
    kernel = rows["kernel"]
    columns = {
        "start": rows["start"],
        "end": rows["end"],
        **_where(rows, rows["slot"], shape),
        "demangledName": (_ids([each.demangled for each in KERNELS]), kernel),
        "shortName": (_ids([each.short for each in KERNELS]), kernel),
        "mangledName": (_ids([each.mangled for each in KERNELS]), kernel),
        "gridX": ([each.grid for each in KERNELS], kernel),
        "blockX": ([each.block for each in KERNELS], kernel),
        "gridId": np.arange(1, kernel.size + 1),
    }
    insert_rows(connection, "CUPTI_ACTIVITY_KIND_KERNEL", constants, columns)


def _write_copies(connection: sqlite3.Connection, rows: Rows, shape: Layout) -> None:
    constants = "greenContextId=0 bytes=8388608 copyKind=8 srcKind=2 dstKind=2 copyCount=1"
    columns = {"start": rows["start"], "end": rows["end"], **_where(rows, rows["slot"], shape)}
    insert_rows(connection, "CUPTI_ACTIVITY_KIND_MEMCPY", constants, columns)


def _write_calls(connection: sqlite3.Connection, rows: Rows, shape: Layout) -> None:
    columns = {
        "start": rows["start"],
        "end": rows["end"],
        "eventClass": ([int(name.startswith("cuLaunch")) for name in API_NAMES], rows["kind"]),
        "globalTid": (_global_pids(shape) + _pids(shape), rows["process"]),
        "correlationId": rows["correlation"],
        "nameId": (_ids(API_NAMES), rows["kind"]),
    }
    insert_rows(connection, "CUPTI_ACTIVITY_KIND_RUNTIME", "returnValue=0", columns)


def _write_events(connection: sqlite3.Connection, rows: Rows, shape: Layout) -> None:
    """Write event records, stream waits and synchronizes; a wait names the record before it."""
    kind = rows["kind"]
    is_sync = kind == SYNC
    number = _record_numbers(rows)
    where = _where(rows, np.where(kind == WAIT, shape.n_streams - 1, 0), shape)
    records = {**where, "eventId": 1 + number % 64, "eventSyncId": number}
    streams, index = where["streamId"]
    waits = {
        **where,
        "start": rows["start"],
        "end": rows["end"],
        "streamId": np.where(is_sync, NONE, streams[index]),
        "syncType": np.where(is_sync, 4, 2),
        "eventId": np.where(is_sync, NONE, 1 + number % 64),
        "eventSyncId": np.where(is_sync, NONE, number),
    }
    records, waits = _pick(records, kind == RECORD), _pick(waits, is_sync | (kind == WAIT))
    insert_rows(connection, "CUPTI_ACTIVITY_KIND_CUDA_EVENT", "timestamp=0 greenContextId=0", records)
    insert_rows(connection, "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "", waits)


def _record_numbers(rows: Rows) -> Array:
    """Return how many event records its process had made by each call, whatever the order of rows."""
    order = np.lexsort((rows["start"], rows["process"]))
    is_record = (rows["kind"] == RECORD)[order]
    total = np.cumsum(is_record)
    process = rows["process"][order]
    before_process = np.concatenate([[0], total])[np.searchsorted(process, process)]
    numbers = np.empty(order.size, dtype=np.int64)
    numbers[order] = total - before_process
    return numbers


def _pick(columns: Mapping[str, object], mask: Array) -> dict[str, object]:
    """Return the rows of columns, in each form that `insert_rows` takes, where the mask is true."""
    return {
        name: (column[0], column[1][mask]) if isinstance(column, tuple) else column[mask]
        for name, column in columns.items()
    }


def _write_ranges(connection: sqlite3.Connection, rows: Rows, shape: Layout) -> None:
    ids = [None, *_ids(REGISTERED)]
    numbers = zip(rows["step"].tolist(), rows["registered"].tolist(), rows["start"].tolist(), strict=True)
    columns = {
        "start": rows["start"],
        "end": rows["end"],
        "text": [_range_text(step, registered, start) for step, registered, start in numbers],
        "textId": [ids[registered + 1] for registered in rows["registered"].tolist()],
        "globalTid": (_global_pids(shape) + _pids(shape), rows["process"]),
    }
    insert_rows(connection, "NVTX_EVENTS", "eventType=59 domainId=0", columns)


def _range_text(step: int, registered: int, start: int) -> str | None:
    if registered >= 0:
        return None
    return f"step {step}" if step >= 0 else f"aten::linear, op_id = {start // 1000 % 1_000_000}"


def _small_tables(shape: Layout) -> dict[str, tuple[str, list[tuple[object, ...]]]]:
    """Return the columns and rows of the tables that describe the session."""
    processes = list(enumerate(_pids(shape).tolist()))
    streams = _stream_ids(shape).reshape(shape.n_processes, shape.n_streams).tolist()
    return {
        "StringIds": ("id value", list(enumerate(STRINGS, start=1))),
        "ENUM_CUDA_MEMCPY_OPER": ("id label", [(1, "Host-to-Device"), (8, "Device-to-Device")]),
        "META_DATA_CAPTURE": (
            "name value",
            [("CAPTURE_EVENT_TYPE", "NvtxEvents"), ("CAPTURE_EVENT_TYPE", "Cuda")],
        ),
        "META_DATA_EXPORT": ("name value", list(EXPORT_METADATA)),
        "TARGET_INFO_SESSION_START_TIME": (
            "utcEpochNs utcTime",
            [(1_790_000_000_000_000_000, "2026-09-21T14:13:20")],
        ),
        "TARGET_INFO_GPU": (
            "vmId id name isDiscrete totalMemory smCount cuDevice computeMajor computeMinor",
            [(1 << 48, device, "Synthetic GPU", 1, 80 << 30, 132, device, 9, 0) for device, _ in processes],
        ),
        "TARGET_INFO_CUDA_DEVICE": ("gpuId cudaId pid", [(device, device, pid) for device, pid in processes]),
        "TARGET_INFO_CUDA_CONTEXT_INFO": (
            "nullStreamId hwId vmId processId deviceId contextId isGreenContext",
            [(streams[device][0], 0, 1, pid, device, device + 1, 0) for device, pid in processes],
        ),
        "TARGET_INFO_CUDA_STREAM": (
            "streamId hwId vmId processId contextId priority flag",
            [
                (stream, 0, 1, pid, device + 1, 0, 2)
                for device, pid in processes
                for stream in streams[device]
            ],
        ),
    }


def _write_small_tables(connection: sqlite3.Connection, shape: Layout) -> None:
    for table, (words, rows) in _small_tables(shape).items():
        names = words.split()
        slots = ", ".join("?" * len(names))
        connection.executemany(f"INSERT INTO {table} ({', '.join(names)}) VALUES ({slots})", rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a synthetic export as the command line asks."""
    parser = argparse.ArgumentParser(description="Write a synthetic Nsight Systems SQLite export.")
    parser.add_argument("out", type=Path)
    for option, default in (("kernels", 10_000), ("api-calls", None), ("ranges", None)):
        parser.add_argument(f"--{option}", type=int, default=default)
    for option in ("processes", "streams", "steps"):
        parser.add_argument(f"--{option}", type=int, default=getattr(Layout(), f"n_{option}"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shuffled", action="store_true")
    given = parser.parse_args(arguments)
    write_synthetic(
        given.out,
        given.kernels,
        given.kernels * 21 // 20 if given.api_calls is None else given.api_calls,
        given.kernels // 5 if given.ranges is None else given.ranges,
        n_processes=given.processes,
        n_streams=given.streams,
        n_steps=given.steps,
        seed=given.seed,
        is_shuffled=given.shuffled,
    )


if __name__ == "__main__":
    main()
