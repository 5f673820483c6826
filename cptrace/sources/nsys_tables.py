"""Makes a Trace of the columns of an Nsight Systems export."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pandas as pd

from cptrace import schema
from cptrace.labels import CPU_EMULATED
from cptrace.launches import shared_ids
from cptrace.requests import ReadOptions
from cptrace.sources.columns import category, nullable
from cptrace.sources.doubts import forget_ambiguous_launches, note_overlaps
from cptrace.sources.nsys_meta import FileInfo, make_meta, read_info
from cptrace.sources.nsys_ops import OP_TABLES, assign_ranks, make_ops
from cptrace.sources.nsys_ranges import PROCESS_MASK, make_ranges
from cptrace.sources.nsys_raw import RawTable
from cptrace.sources.nsys_samples import read_allocations, read_samples
from cptrace.sources.nsys_sqlite import CUDA_EVENT, EXPECTED_TABLES, NVTX, RUNTIME, SYNCHRONIZATION
from cptrace.sources.nvtx_lanes import find_lanes
from cptrace.sources.sqlite_columns import PendingColumns, SqliteFile
from cptrace.trace import Note, Trace

Maker = Callable[[RawTable], tuple[pd.DataFrame, list[Note]]]

_SYNC_KINDS: Final = ("context", "stream", "event", "stream_wait")


def assemble(file: SqliteFile, pending: PendingColumns, options: ReadOptions) -> Trace:
    """Return the trace that an export holds.

    Args:
        file: The export.
        pending: Its columns, as they come.
        options: How to read it.

    Raises:
        SourceError: The file is damaged.
        TraceError: Device work has impossible times, or what a run recorded about itself cannot be understood.
    """
    info = read_info(file)

    def take(name: str) -> RawTable | None:
        columns = pending.pop(name)
        return None if columns is None else RawTable(file, name, columns)

    def make(table: schema.Table, name: str, maker: Maker) -> tuple[pd.DataFrame, list[Note]]:
        raw = take(name)
        return (schema.empty_frame(table), []) if raw is None else maker(raw)

    with ThreadPoolExecutor(len(_HOST_TABLES)) as pool:  # each as soon as it is read, beside the others
        jobs = {table.name: pool.submit(make, table, name, maker) for table, name, maker in _HOST_TABLES}
        samples, allocations = pool.submit(read_samples, file), pool.submit(read_allocations, file)
        shared_job = pool.submit(lambda: shared_ids(jobs[schema.API_CALLS.name].result()[0]))
        works = [raw for name in OP_TABLES if (raw := take(name)) is not None]
        ops, ranks, notes = make_ops(works, info, options)
        note_overlaps(ops, notes)
        hosts = {name: job.result() for name, job in jobs.items()}
        shared = shared_job.result()
    ops = forget_ambiguous_launches(ops, shared, notes)
    missing = tuple(table for table in EXPECTED_TABLES if not file.has_rows(table))
    meta = make_meta(file, info, missing, [*notes, *(note for _, some in hosts.values() for note in some)])
    frames = {name: frame for name, (frame, _) in hosts.items()}
    counted = {"gpu_samples": samples.result(), "allocations": allocations.result()}
    trace = Trace(meta, ops=ops, ranks=ranks, **frames, **counted)
    return with_lanes(trace, info) if ops.empty else trace


def with_lanes(trace: Trace, info: FileInfo) -> Trace:
    """Return a trace without device work with that of an emulated device, where its ranges say any.

    Args:
        trace: Trace as it was read.
        info: What the file says about itself.
    """
    lanes = find_lanes(trace.ranges, lambda process, device: assign_ranks(process, device, info))
    if lanes is None:
        return trace
    tables = {
        name: getattr(lanes, name)
        for name in ("ops", "ranks", "api_calls", "syncs", "event_records", "ranges")
    }
    meta = replace(trace.meta, device_kind=CPU_EMULATED, notes=(*trace.meta.notes, *lanes.notes))
    return replace(trace, meta=meta, **tables)


def _api_calls(raw: RawTable) -> tuple[pd.DataFrame, list[Note]]:
    (start, _), (end, _), (thread, _) = (raw.ints(name) for name in ("start_ns", "end_ns", "thread"))
    columns: dict[str, Any] = {
        "start_ns": start,
        "end_ns": end,
        "process": thread & PROCESS_MASK,
        "thread": thread,
        "correlation_id": raw.optional("correlation_id"),
        "name": raw.texts("name_id"),
    }
    is_reversed = end < start
    notes = []
    if is_reversed.any():
        n_reversed = int(np.count_nonzero(is_reversed))
        notes.append(
            Note("dropped-rows", f"{raw.name}: calls that end before they start were left out", n_reversed)
        )
        columns = {name: column[~is_reversed] for name, column in columns.items()}
    return schema.make_frame(schema.API_CALLS, columns), notes


def _syncs(raw: RawTable) -> tuple[pd.DataFrame, list[Note]]:
    (stream, has_stream), (event, has_event), (sync, has_sync) = (
        raw.ids(name) for name in ("stream", "event_id", "event_sync_id")
    )
    # Never from syncType: its meaning changed between versions and contradicts the file's own enumeration.
    kind = has_stream.astype(np.int8) + 2 * has_event.astype(np.int8)
    columns: dict[str, Any] = {
        "start_ns": raw.ints("start_ns")[0],
        "end_ns": raw.ints("end_ns")[0],
        "process": raw.ints("process")[0],
        "context": raw.ints("context")[0],
        "kind": category(kind, list(_SYNC_KINDS)),
        "stream": nullable(stream, ~has_stream),
        "event_id": nullable(event, ~has_event),
        "event_sync_id": nullable(sync, ~has_sync),
        "correlation_id": raw.optional("correlation_id"),
    }
    return schema.make_frame(schema.SYNCS, columns), []


def _event_records(raw: RawTable) -> tuple[pd.DataFrame, list[Note]]:
    sync, has_sync = raw.ids("event_sync_id")
    columns: dict[str, Any] = {
        "process": raw.ints("process")[0],
        "context": raw.ints("context")[0],
        "stream": raw.ints("stream")[0],
        "event_id": raw.ints("event_id")[0],
        "event_sync_id": nullable(sync, ~has_sync),
        "correlation_id": raw.optional("correlation_id"),
    }
    return schema.make_frame(schema.EVENT_RECORDS, columns), []


_HOST_TABLES: Final[tuple[tuple[schema.Table, str, Maker], ...]] = (
    (schema.RANGES, NVTX, make_ranges),
    (schema.SYNCS, SYNCHRONIZATION, _syncs),
    (schema.EVENT_RECORDS, CUDA_EVENT, _event_records),
    (schema.API_CALLS, RUNTIME, _api_calls),
)
