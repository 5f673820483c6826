"""Several traces as one: their tables joined, each on its clock moved by a shift, and ids that clash numbered anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pandas as pd

from cptrace import schema
from cptrace.intervals import Int64Array
from cptrace.sources.columns import merge_columns, merged_places
from cptrace.trace import Trace, TraceMeta
from cptrace.units import plural

_TIMES: Final = ("start_ns", "end_ns", "time_ns")
_NUMBERED: Final = ("process", "thread")


def join_traces(traces: Sequence[Trace], shift_ns: Int64Array) -> Trace:
    """Return several traces as one.

    Process and thread ids that several files have are numbered anew: they name different ones.

    Args:
        traces: Traces, each rank in one of them alone.
        shift_ns: What to add to the times of each, int64 of shape (F,).
    """
    numbers = {name: _numbers(traces, name) for name in _NUMBERED}
    tables = {}
    for table in schema.TABLES:
        frames = [getattr(trace, table.name) for trace in traces]
        if table is schema.GPU_SAMPLES:
            frames = _samples(traces)
        tables[table.name] = _join(table, frames, shift_ns, numbers)
    return Trace(meta=_meta(traces), **tables)


def _join(
    table: schema.Table,
    frames: Sequence[pd.DataFrame],
    shift_ns: Int64Array,
    numbers: Mapping[str, Sequence[tuple[Int64Array, Int64Array]]],
) -> pd.DataFrame:
    parts: dict[str, list[Any]] = {}
    for column in table.columns:
        parts[column.name] = [frame[column.name].array for frame in frames]
        if column.name in _TIMES:
            parts[column.name] = [
                part + shift for part, shift in zip(parts[column.name], shift_ns, strict=True)
            ]
        elif column.name in numbers:
            parts[column.name] = [
                new[np.searchsorted(old, np.asarray(part))]
                for part, (old, new) in zip(parts[column.name], numbers[column.name], strict=True)
            ]
        if not isinstance(parts[column.name][0], (pd.Categorical, pd.arrays.IntegerArray)):
            parts[column.name] = [np.asarray(part) for part in parts[column.name]]
    places = merged_places([np.asarray(key, np.int64) for key in parts[table.order[0]]])
    return schema.make_frame(table, {name: merge_columns(column, places) for name, column in parts.items()})


def _numbers(traces: Sequence[Trace], name: str) -> list[tuple[Int64Array, Int64Array]]:
    """Return for each trace its process or thread ids, ascending, and their numbers in the whole: the same if free."""
    own = [_used(trace, name) for trace in traces]
    free = max((int(ids.max()) for ids in own if len(ids)), default=0) + 1
    taken, numbers = np.zeros(0, np.int64), []
    for ids in own:
        is_taken = np.isin(ids, taken)
        new = ids.copy()
        new[is_taken] = free + np.arange(np.count_nonzero(is_taken))
        free += int(np.count_nonzero(is_taken))
        taken = np.union1d(taken, new)
        numbers.append((ids, new))
    return numbers


def _used(trace: Trace, name: str) -> Int64Array:
    frames = [getattr(trace, table.name) for table in schema.TABLES if name in table.column_names]
    return np.unique(np.concatenate([pd.unique(frame[name].to_numpy()) for frame in frames]))


def _samples(traces: Sequence[Trace]) -> list[pd.DataFrame]:
    """Return the samples of the devices that each trace's ranks work on: others are in the files of their ranks.

    None where files name different devices alike: samples tell their device by nothing but its ordinal.
    """
    devices = pd.concat([trace.ranks["device"].drop_duplicates() for trace in traces])
    if devices.duplicated().any():
        return [trace.gpu_samples.head(0) for trace in traces]
    are_own = [trace.gpu_samples["device"].isin(trace.ranks["device"]).to_numpy() for trace in traces]
    return [trace.gpu_samples[is_own] for trace, is_own in zip(traces, are_own, strict=True)]


def _meta(traces: Sequence[Trace]) -> TraceMeta:
    """Return what is to say of all files together; their notes are said of each."""
    metas = [trace.meta for trace in traces]
    missing = dict.fromkeys(table for meta in metas for table in meta.missing_tables)
    return replace(
        metas[0],
        path=f"{metas[0].path} and {plural(len(metas) - 1, 'more file')}",
        session_start_utc_ns=min(
            (m.session_start_utc_ns for m in metas if m.session_start_utc_ns), default=None
        ),
        missing_tables=tuple(missing),
        notes=(),
        n_job_ranks=max((meta.n_job_ranks for meta in metas if meta.n_job_ranks), default=None),
    )
