"""Synchronisation that the host asked for and that the trace has no record of.

A profiler that records CUDA calls alone (the PyTorch profiler without its sync events, or a capture that lost some)
shows that a stream was told to wait, but neither which stream nor for what. Of a call that blocked it shows from when
to when, and what ended just before it returned is what it waited for.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

import numpy as np
import pandas as pd

from cptrace import schema
from cptrace.intervals import BoolArray, Int64Array
from cptrace.labels import CUDA
from cptrace.launches import Launches, call_times, calls_of, names_match
from cptrace.trace import Trace

_WAITS: Final = r"^(cu(da)?|hip)StreamWaitEvent"
_BLOCKING: Final = r"^(cu(da)?|hip)(Ctx|Device|Thread|Stream|Event)Synchronize"
_WHOLE_DEVICE: Final = r"^(cu(da)?|hip)(Ctx|Device|Thread)Synchronize"
_SYNC_TABLE: Final = re.compile(r"SYNCHRONIZATION|cuda_sync")
# A host that waited goes on within this time of the end of the work: an interrupt and a change of context at most.
_RETURNS_WITHIN_NS: Final = 50_000


def count_unrecorded_waits(trace: Trace) -> int:
    """Return how many calls that make a stream wait have no row in the table of syncs.

    Args:
        trace: Trace as a source read it.
    """
    if trace.meta.device_kind != CUDA and not _has_no_syncs(trace):
        return 0  # our emulated device leaves out waits for events that were never recorded: they wait for nothing
    return len(_without_row(trace, _WAITS))


def _has_no_syncs(trace: Trace) -> bool:
    """Return whether the source had no table of syncs, or an empty one."""
    return any(_SYNC_TABLE.search(table) for table in trace.meta.missing_tables)


def with_inferred_syncs(trace: Trace, launches: Launches) -> tuple[Trace, int]:
    """Return a trace whose blocking calls all have a row in the table of syncs, and how many rows were inferred.

    A call for a stream or an event is taken to wait for the stream of the op that ended last before it returned.

    Args:
        trace: Trace as a source read it.
        launches: The launching call of each op.
    """
    calls = _without_row(trace, _BLOCKING)
    process, start, end = (
        trace.api_calls[name].to_numpy()[calls] for name in ("process", "start_ns", "end_ns")
    )
    op, is_found = _ended_last(trace, launches, process, start, end)
    if not is_found.any():
        return trace, 0
    calls, op = calls[is_found], op[is_found]
    is_device = names_match(trace.api_calls["name"], _WHOLE_DEVICE)[calls]
    frame = pd.concat(
        [trace.syncs.astype({"kind": "str"}), _rows(trace, calls, op, is_device)], ignore_index=True
    )
    frame = frame.astype({"kind": "category"})
    syncs = schema.make_frame(schema.SYNCS, {name: frame[name].array for name in schema.SYNCS.column_names})
    return replace(trace, syncs=syncs), len(calls)


def _without_row(trace: Trace, names: str) -> Int64Array:
    """Return the calls of some names that no row in the table of syncs belongs to."""
    if not len(trace.api_calls):
        return np.zeros(0, np.int64)
    has_row = np.zeros(len(trace.api_calls), bool)
    recorded = calls_of(trace.syncs, trace.api_calls)
    has_row[recorded.call[recorded.is_known]] = True
    return np.flatnonzero(names_match(trace.api_calls["name"], names) & ~has_row)


def _ended_last(
    trace: Trace, launches: Launches, process: Int64Array, start_ns: Int64Array, end_ns: Int64Array
) -> tuple[Int64Array, BoolArray]:
    """Return for each call the op of its process that ended last before it returned, and whether it waited for that."""
    op, is_found = np.zeros(len(process), np.int64), np.zeros(len(process), bool)
    owner, ends = (trace.ops[name].to_numpy() for name in ("process", "end_ns"))
    launched = call_times(trace.api_calls, launches)["start_ns"]
    for number in np.unique(process).tolist():
        mine = np.flatnonzero((owner == number) & launches.is_known)
        if not len(mine):
            continue
        mine = mine[np.argsort(ends[mine], kind="stable")]
        calls = np.flatnonzero(process == number)
        last = np.searchsorted(ends[mine], end_ns[calls], side="right") - 1
        op[calls] = mine[np.maximum(last, 0)]
        is_before = (last >= 0) & (launched[op[calls]] < start_ns[calls])
        # What returns long after the last op ended waited for something that is not in the trace.
        waited_from = np.maximum(ends[op[calls]], start_ns[calls])
        is_found[calls] = is_before & (end_ns[calls] - waited_from <= _RETURNS_WITHIN_NS)
    return op, is_found


def _rows(trace: Trace, calls: Int64Array, op: Int64Array, is_device: BoolArray) -> pd.DataFrame:
    """Return rows of syncs for calls that waited for the stream of an op, or for the whole device."""
    of_call, of_op = (
        trace.api_calls.iloc[calls].reset_index(drop=True),
        trace.ops.iloc[op].reset_index(drop=True),
    )
    return pd.DataFrame(
        {
            **{name: of_call[name] for name in ("start_ns", "end_ns", "process", "correlation_id")},
            "context": of_op["context"],
            "kind": np.where(is_device, "context", "stream"),
            "stream": of_op["stream"].astype("Int64").mask(is_device),
            "event_id": pd.array([pd.NA] * len(calls), "Int64"),
            "event_sync_id": pd.array([pd.NA] * len(calls), "Int64"),
        }
    )
