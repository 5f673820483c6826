"""Runs with torch's profiler around the measured steps, and makes one report of the traces of all its processes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from cptrace.capture.launcher import FOLLOWED, RunOutcome, child_command, require_ready, run_child
from cptrace.capture.nsys_sqlite_writer import write_report
from cptrace.capture.records import ProcessRecord
from cptrace.capture.run_spec import RunSpec
from cptrace.errors import RunError, TraceError
from cptrace.sources import read_trace
from cptrace.trace import Trace

NAME: Final = "kineto"
RECORDED_BY: Final = "converted from traces of the PyTorch profiler"

_EFFECTS: Final = ("each operation of torch on the host takes some microseconds longer",)


def capture(spec: RunSpec, output: Path, on_progress: Callable[[str], None]) -> RunOutcome:
    """Run `spec` with torch's profiler and write what it recorded to `output`, in the schema of Nsight Systems.

    Args:
        spec: What to run.
        output: Where the report goes.
        on_progress: Called with a line about what happens now.

    Raises:
        UsageError: The options cannot be meant.
        RunError: The run could not start or did not finish, or left no trace.
        RenderError: The report could not be written.
    """
    require_ready(spec)
    with tempfile.TemporaryDirectory(prefix="cptrace-") as folder:
        own_record = Path(folder, "own.sqlite")
        command = [*command_of(spec, own_record), *FOLLOWED, "--parent-pid", str(os.getpid())]
        outcome = run_child(command, own_record, on_progress)
        traces = sorted(own_record.parent.glob("rank*.json"))
        if not traces:
            raise RunError("torch's profiler left no trace; use --profiler recorder, or --profiler nsys")
        on_progress("converting")
        metadata = with_capture(outcome)
        convert(traces, output, metadata)
    return RunOutcome(output, metadata)


def command_of(spec: RunSpec, own_record: Path) -> list[str]:
    """Return the command of a run; traces go beside its own record.

    Args:
        spec: What to run.
        own_record: Where the run writes what it recorded itself.
    """
    return [*child_command(spec, own_record), "--profiler", NAME]


def with_capture(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's description with its real processes, and how it was recorded.

    Args:
        outcome: What the run said at its end.
    """
    metadata = dict(outcome["run"])
    pids, ranks = outcome.get("pids") or [], metadata["ranks"]
    if len(pids) == len(ranks):
        metadata["ranks"] = [{**rank, "pid": pid} for rank, pid in zip(ranks, pids, strict=True)]
    metadata["capture"] = {"profiler": NAME, "observer_effects": list(_EFFECTS)}
    return metadata


def convert(paths: Sequence[Path], output: Path, metadata: Mapping[str, Any]) -> None:
    """Write traces of the processes of one job as one report in the schema of Nsight Systems.

    Args:
        paths: Traces of the PyTorch profiler.
        output: Where the report goes.
        metadata: The run's description, schema `cptrace.run/1`.

    Raises:
        SourceError: A trace cannot be read.
        TraceError: Two traces are of one rank.
        RenderError: The report could not be written.
    """
    from cptrace.capture.trace_records import process_records  # here: pandas takes its time to import

    traces = [read_trace(path) for path in paths]
    starts = [trace.meta.session_start_utc_ns or 0 for trace in traces]
    first = min(starts)
    records = [
        record
        for trace, start in zip(traces, starts, strict=True)
        for record in process_records(trace, start - first)
    ]
    write_report(
        output, _numbered(records, traces), metadata, session_start_ns=first, recorded_by=RECORDED_BY
    )


def _numbered(records: Sequence[ProcessRecord], traces: Sequence[Trace]) -> list[ProcessRecord]:
    """Return records with a rank each: as recorded, else in order."""
    ranks = [record.rank for record in records]
    if len(set(ranks)) == len(ranks):
        return list(records)
    if all(trace.ranks["is_recorded"].all() for trace in traces):
        raise TraceError(f"two traces are of rank {max(ranks, key=ranks.count)}; give each rank's trace once")
    return [replace(record, rank=number) for number, record in enumerate(records)]
