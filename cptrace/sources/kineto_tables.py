"""Makes a Trace of the events of a PyTorch profiler trace."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import pandas as pd

from cptrace import schema
from cptrace.labels import CPU_EMULATED, CUDA
from cptrace.launches import shared_ids
from cptrace.requests import ReadOptions
from cptrace.sources.columns import category, nullable
from cptrace.sources.doubts import forget_ambiguous_launches, note_overlaps
from cptrace.sources.kineto_events import (
    CALLS,
    DEVICE,
    RANGES,
    RECORDS,
    SYNCS,
    EventTables,
    Kind,
    is_called_like_step,
)
from cptrace.sources.kineto_file import FileInfo
from cptrace.sources.kineto_ops import make_ops, owners
from cptrace.sources.kineto_raw import RawEvents, keep_possible, keep_works
from cptrace.sources.kineto_syncs import make_event_records, make_syncs
from cptrace.trace import Note, Trace, TraceMeta

_EXPECTED: Final = ("kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cuda_sync", "user_annotation")
# What other versions and devices call the same.
_TODAY: Final = {
    "memcpy": "gpu_memcpy",
    "memset": "gpu_memset",
    **dict.fromkeys((*CALLS.categories,), "cuda_runtime"),
    **dict.fromkeys(("cpu_op", "operator"), "user_annotation"),
}
_THREAD_BITS: Final = 32
_RECORD_AGAIN: Final = "torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])"
_RECORD_WAITS: Final = (
    "sync events: torch.profiler.profile(...,"
    " experimental_config=torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True))"
)
_MAX_UNKNOWN: Final = 5
# Times before 2001 cannot be absolute ones: the format is younger.
_EARLIEST_UTC_NS: Final = 10**18


def assemble(name: str, info: FileInfo, tables: EventTables, options: ReadOptions) -> Trace:
    """Return the trace that a file holds.

    Args:
        name: Name of the source.
        info: What the file says about itself.
        tables: Its events.
        options: How to read it.

    Raises:
        TraceError: Device work cannot be read, or has impossible times.
    """
    notes = _notes(tables)

    def take(kind: Kind, what: str) -> RawEvents:
        return keep_possible(RawEvents(info.path, what, tables.finish(kind)), notes)

    works = RawEvents(info.path, "device events", tables.finish(DEVICE))
    works = keep_works(works, tables.misfits, options, notes)
    calls, ranges = take(CALLS, "API calls"), take(RANGES, "ranges")
    syncs = take(SYNCS, "synchronisations")
    records = RawEvents(info.path, "event records", tables.finish(RECORDS))  # their times mean nothing
    pid = _main_pid(tables, calls, ranges)
    _note_device_steps(tables.n_device_steps, ranges, notes)
    ops, ranks = make_ops(works, calls, pid, info, notes)
    api_calls = _api_calls(calls, pid)
    note_overlaps(ops, notes)
    ops = forget_ambiguous_launches(ops, shared_ids(api_calls), notes)
    missing = tuple(
        category for category in _EXPECTED if category not in _categories(works, calls, syncs, ranges)
    )
    return Trace(
        _meta(name, info, ops, missing, notes),
        ops=ops,
        api_calls=api_calls,
        syncs=make_syncs(syncs, partial(owners, ops, main_pid=pid)),
        event_records=make_event_records(records, syncs, partial(owners, ops, main_pid=pid)),
        ranges=_ranges(ranges, pid),
        ranks=ranks,
    )


def _meta(
    name: str, info: FileInfo, ops: pd.DataFrame, missing: tuple[str, ...], notes: list[Note]
) -> TraceMeta:
    # Without a base, times have counted from 1970 since the format exists; AMD's once counted from the boot.
    is_absolute = not ops.empty and int(ops["start_ns"].iloc[0]) >= _EARLIEST_UTC_NS
    return TraceMeta(
        path=info.display_path,
        format=name,
        schema_version=info.schema_version,
        device_kind=CPU_EMULATED if info.own.get("device_kind") == CPU_EMULATED else CUDA,
        clock=clock if isinstance(clock := info.own.get("clock"), str) else None,
        run=MappingProxyType(run if isinstance(run := info.own.get("run"), dict) else {}),
        session_start_utc_ns=(0 if is_absolute else None) if info.base_ns is None else info.base_ns,
        trace_name=info.trace_name,
        record_again=_RECORD_AGAIN,
        record_waits=_RECORD_WAITS,
        missing_tables=missing,
        notes=tuple(notes),
        n_job_ranks=info.world_size or None,
    )


def _notes(tables: EventTables) -> list[Note]:
    notes = []
    if tables.misfits.n_others:
        text = "events that are no objects of the expected types, none of them device work, were left out"
        notes.append(Note("dropped-rows", text, tables.misfits.n_others))
    if tables.n_unknown:
        common = sorted(tables.n_unknown.items(), key=lambda item: (-item[1], item[0]))[:_MAX_UNKNOWN]
        names = ", ".join(f"{category or '(none)'} ({count})" for category, count in common)
        text = f"events of categories that are not known were left out: {names}"
        notes.append(Note("unknown-categories", text, tables.n_unknown.total()))
    return notes


def _note_device_steps(n_device_steps: int, ranges: RawEvents, notes: list[Note]) -> None:
    """Say where steps are marked on the device's side alone: work is tied to steps by its launch, on the host's."""
    _, names = ranges.coded("name")
    if n_device_steps and not any(is_called_like_step(name) for name in names):
        text = (
            "user annotations called like steps are on the device side only (gpu_user_annotation), which ties no launch"
            f" to them: no step is taken from them; record with: {_RECORD_AGAIN}"
        )
        notes.append(Note("device-side-steps", text, n_device_steps))


def _categories(*tables: RawEvents) -> set[str]:
    """Return the categories that occur, by the names that Kineto gives them today."""
    found = [raw.coded("category") for raw in tables]
    there = {texts[code] for codes, texts in found for code in np.unique(codes).tolist()}
    return there | {_TODAY[category] for category in there if category in _TODAY}


def _main_pid(tables: EventTables, *host: RawEvents) -> int:
    """Return the process that the trace is of: that of most host events, else the one labelled as the CPU's, else 0."""
    for raw in host:
        pids, counts = np.unique(raw.ints("pid")[raw.is_there("pid")], return_counts=True)
        if len(pids):
            return int(pids[np.argmax(counts)])
    return min(tables.host_pids, default=0)


def _host_columns(raw: RawEvents, main_pid: int) -> dict[str, Any]:
    pid = np.where(raw.is_there("pid"), raw.ints("pid"), main_pid)
    return {
        "start_ns": raw.ints("start_ns"),
        "process": pid,
        # Threads of different processes, in a file of several, may have one id.
        "thread": (pid << _THREAD_BITS) | (raw.ints("tid") & (2**_THREAD_BITS - 1)),
        "name": raw.texts("name"),
    }


def _api_calls(raw: RawEvents, main_pid: int) -> pd.DataFrame:
    columns = {
        **_host_columns(raw, main_pid),
        "end_ns": raw.ints("end_ns"),
        "correlation_id": raw.optional("correlation"),
    }
    return schema.make_frame(schema.API_CALLS, columns)


def _ranges(raw: RawEvents, main_pid: int) -> pd.DataFrame:
    columns = {
        **_host_columns(raw, main_pid),
        "end_ns": nullable(raw.ints("end_ns"), None),
        "kind": category(np.zeros(raw.n_rows, np.int8), ["push_pop"]),
        "domain": raw.texts("domain"),
        "payload": raw.optional("payload"),
    }
    return schema.make_frame(schema.RANGES, columns)
