"""Trace: what one recorded file says, in columns, independent of the format that it came in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import pandas as pd

from cptrace import schema
from cptrace.labels import CUDA


@dataclass(frozen=True, slots=True)
class Note:
    """Something about a file that a reader of its figures should know.

    Attributes:
        code: Stable short name, such as `dropped-rows`.
        text: One sentence: what was found and what it means for the figures.
        count: How many rows it concerns, where that makes sense.
    """

    code: str
    text: str
    count: int | None = None


@dataclass(frozen=True, slots=True)
class TraceMeta:
    """Where a trace comes from.

    Attributes:
        path: Path as the user gave it.
        format: Name of the source that read it.
        tool_version: Version of the tool that exported it, where the file says so.
        schema_version: Version of the export's schema, where the file says so.
        device_kind: `cuda`, or `cpu-emulated` where no figure is a GPU's.
        clock: Clock of an emulated run (`real`, `paced`, `virtual`), else None.
        run: What an instrumented run recorded about itself, empty for other traces.
        session_start_utc_ns: Wall-clock time of time 0, in ns since 1970, good to milliseconds across hosts.
        trace_name: Name that the tool gave the trace, where the file says so.
        record_again: How to record such a trace so that nothing is missing.
        record_waits: What to record such a trace with so that waits for events have their records.
        missing_tables: Source tables that are absent or empty, in the source's own names.
        notes: What a reader should know.
        n_job_ranks: Number of ranks of the job, where the file says so: more than are in it, as a rule.
    """

    path: str
    format: str
    tool_version: str | None = None
    schema_version: str | None = None
    device_kind: str = CUDA
    clock: str | None = None
    run: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    session_start_utc_ns: int | None = None
    trace_name: str | None = None
    record_again: str = "nsys profile --trace=cuda,nvtx"
    record_waits: str = (
        "an Nsight Systems that traces event records, and event tracing on (it is an option of newer versions: nsys"
        " profile --help tells)"
    )
    missing_tables: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    n_job_ranks: int | None = None


def _empty(table: schema.Table) -> pd.DataFrame:
    return schema.empty_frame(table)


@dataclass(frozen=True, slots=True)
class Trace:
    """The tables of one trace; their columns are described in `cptrace.schema`.

    Attributes:
        meta: Where the trace comes from.
        ops: Device work. `cptrace.classify.classify` adds the columns of `schema.ROLES`.
        api_calls: CUDA calls on the host.
        syncs: Synchronisation calls on the host.
        event_records: The record side of CUDA events.
        ranges: NVTX ranges and marks.
        ranks: The (process, device) pairs that did device work.
        gpu_samples: Activity of the GPUs' units by their own counters.
        allocations: Changes of the device memory in use.
    """

    meta: TraceMeta
    ops: pd.DataFrame = field(default_factory=lambda: _empty(schema.OPS))
    api_calls: pd.DataFrame = field(default_factory=lambda: _empty(schema.API_CALLS))
    syncs: pd.DataFrame = field(default_factory=lambda: _empty(schema.SYNCS))
    event_records: pd.DataFrame = field(default_factory=lambda: _empty(schema.EVENT_RECORDS))
    ranges: pd.DataFrame = field(default_factory=lambda: _empty(schema.RANGES))
    ranks: pd.DataFrame = field(default_factory=lambda: _empty(schema.RANKS))
    gpu_samples: pd.DataFrame = field(default_factory=lambda: _empty(schema.GPU_SAMPLES))
    allocations: pd.DataFrame = field(default_factory=lambda: _empty(schema.ALLOCATIONS))
