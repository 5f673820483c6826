"""The library behind the command line: open traces, analyse them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from cptrace import intervals, timeline
from cptrace.analyses import ANALYSES, make_scope
from cptrace.analyses.account import hidden_ns
from cptrace.analyses.pauses import long_pauses, unequal_windows
from cptrace.analyses.scope import Scope, device_work_missing
from cptrace.analyses.start_causes import CLOCK_TOLERANCE_NS, by_cause
from cptrace.analyses.timeline import make_timeline
from cptrace.comparison import Comparison, compare_reports
from cptrace.errors import SourceError, UsageError
from cptrace.findings import Case, diagnose, make_case
from cptrace.findings.finding import importance
from cptrace.job import (
    TOO_LARGE,
    counted_notes,
    is_too_large,
    join_job,
    joined_notes,
    not_counted,
    number_ranks,
    one_by_one,
    with_files,
)
from cptrace.outcome import NotApplicable
from cptrace.peers import Arrivals, peers_missing
from cptrace.report import SECTIONS, Report, Row
from cptrace.requests import AnalyzeOptions, CompareOptions, ReadOptions
from cptrace.sources import Readings, as_paths, read_trace
from cptrace.timeline import Timeline
from cptrace.trace import Note, Trace
from cptrace.units import format_ns

_MAX_UNCLASSIFIED_NAMES: Final = 10
_REPORT_HEAD_BYTES: Final = 200
_OURS: Final = re.compile(rb'\s*\{\s*"schema"\s*:\s*"cptrace\.')


def open_trace(path: str | os.PathLike[str], options: ReadOptions | None = None) -> Trace:
    """Return the trace in a file.

    Args:
        path: Path of a trace of any known format; it is never written to.
        options: How to read it.

    Raises:
        SourceError: The file is missing, unreadable, damaged or of no known format.
        TraceError: Its content contradicts itself.

    Example:
        trace = cptrace.open_trace("report.sqlite")
        trace.ops.groupby("stream").size()
    """
    return read_trace(Path(path), options)


def analyze(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], options: AnalyzeOptions | None = None
) -> Report:
    """Return the report of one or more trace files.

    Args:
        paths: Path or paths of traces; several are the ranks or nodes of one job.
        options: How to analyse.

    Raises:
        SourceError: A file is missing, unreadable, damaged or of no known format.
        TraceError: A file's content contradicts itself.
        UsageError: A rank, step range or window was asked for that a trace does not have.

    Example:
        report = cptrace.analyze("report.sqlite")
        report.frame("ranks")[["rank", "comm_share", "overlap"]]
    """
    options = options or AnalyzeOptions()
    with Readings(as_paths(paths), options.read) as readings:
        return analyze_readings(readings, options)


def compare(
    runs: Sequence[Report | str | os.PathLike[str]], options: CompareOptions | None = None
) -> Comparison:
    """Return runs side by side, the first as the baseline, and whether each difference is more than noise.

    Args:
        runs: At least two: reports, paths of traces, or paths of reports saved as JSON.
        options: How to compare.

    Raises:
        SourceError: A file is missing, unreadable, damaged or of no known format.
        TraceError: A file's content contradicts itself.
        UsageError: The runs cannot be compared, and why.

    Example:
        comparison = cptrace.compare(["before.sqlite", "after.sqlite"])
        comparison.metrics[0]["verdict"]
    """
    options = options or CompareOptions()
    saved = [run if isinstance(run, Report) else _saved_report(Path(run)) or Path(run) for run in runs]
    reports = [run if isinstance(run, Report) else analyze(run, options.analyze) for run in saved]
    if saved == reports and options.analyze != AnalyzeOptions():
        raise UsageError(
            "how to analyse (window, steps, invalid work) can be chosen for traces only, and all these runs are reports"
            " already; analyze their traces again, or leave the choice out"
        )
    return compare_reports(reports, options.names, options.allow_different)


def _saved_report(path: Path) -> Report | None:
    """Return the report in a file, None where it holds none: it is a trace, or refused in the words of its reader."""
    try:
        with path.open("rb") as file:
            is_ours = _OURS.match(file.read(_REPORT_HEAD_BYTES)) is not None
        return Report.from_json(path.read_text(encoding="utf-8")) if is_ours else None
    except OSError:
        return None
    except UnicodeDecodeError as error:
        raise SourceError(f"cannot read {path} as a report: it is not UTF-8 ({error.reason})") from error
    except SourceError as error:
        raise SourceError(f"{path}: {error}") from error


def analyze_readings(readings: Readings, options: AnalyzeOptions | None = None) -> Report:
    """Return the report of traces that are being read.

    Args:
        readings: Files being read, in order.
        options: How to analyse; the files are being read already.

    Raises:
        CptraceError: As `analyze`.
    """
    options = options or AnalyzeOptions()
    parts: list[_Part] = []
    paths: dict[int, str] = {}
    held: list[Trace] = []
    for trace in readings:
        held.append(number_ranks(trace, paths))
        if parts or is_too_large(held):
            parts += [_analyze_one(one, options) for one in held]
            held = []
    _check_ranks(options.scope.ranks, paths)
    if parts:
        parts += [_analyze_one(one, options) for one in held]
        return _combine(parts, [one_by_one(TOO_LARGE)] if len(parts) > 1 else [])
    return _analyze_job(held, options)


def _check_ranks(wanted: Iterable[int], paths: Mapping[int, str]) -> None:
    unknown = sorted(set(wanted) - paths.keys())
    if unknown:
        there = ", ".join(map(str, sorted(paths))) or "(none)"
        files = ", ".join(dict.fromkeys(paths.values()))
        raise UsageError(f"rank {unknown[0]} is not in {files}; the ranks are {there}")


def _analyze_job(traces: Sequence[Trace], options: AnalyzeOptions) -> Report:
    """Return the report of traces that are in memory: of all as one where their clocks can be put on one."""
    if len(traces) == 1:
        return _combine([_analyze_one(traces[0], options)], [])
    joined = join_job(traces)
    if isinstance(joined, NotApplicable):
        parts = [_analyze_one(trace, options) for trace in traces]
        return _combine(parts, [one_by_one(joined.reason)], counted_notes(traces, are_joined=False))
    part = _analyze_one(joined.trace, options)
    metas = [trace.meta for trace in traces]
    notes = [row for meta in metas for row in _notes(meta.path, not_counted(meta.notes))]
    notes += _notes(
        joined.trace.meta.path, (*joined_notes(joined, traces), *counted_notes(traces, are_joined=True))
    )
    part.coverage["notes"] = notes + part.coverage["notes"]
    part.coverage["clocks"] = [
        {"path": meta.path, "shift_ns": shift, "error_ns": joined.error_ns}
        for meta, shift in zip(metas, joined.shift_ns.tolist(), strict=True)
    ]
    part = replace(
        part,
        inputs=tuple(_input(trace) for trace in traces),
        sections={
            **part.sections,
            "findings": with_files(part.sections.get("findings", ()), joined, traces),
        },
    )
    return _combine([part], [])


@dataclass(frozen=True, slots=True)
class _Part:
    """What one trace contributes to a report; nothing but its inputs where none of its ranks was asked for."""

    inputs: tuple[Row, ...]
    sections: dict[str, tuple[Row, ...]] = field(default_factory=dict)
    not_applicable: tuple[NotApplicable, ...] = ()
    coverage: dict[str, Any] = field(default_factory=dict)
    timeline: Timeline | None = None


def _analyze_one(trace: Trace, options: AnalyzeOptions) -> _Part:
    wanted = tuple(rank for rank in options.scope.ranks if rank in trace.ranks["rank"].tolist())
    if options.scope.ranks and not wanted:
        return _Part((_input(trace),))
    scope = make_scope(trace, replace(options.scope, ranks=wanted))
    sections: dict[str, tuple[Row, ...]] = {}
    not_applicable = list(_hidden(scope))
    if (reason := peers_missing(scope.arrivals)) is not None:
        not_applicable.append(reason)
    # They only read the scope; many more than two would only wait for each other.
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda analysis: analysis.run(scope), ANALYSES))
    for analysis, outcome in zip(ANALYSES, outcomes, strict=True):
        if isinstance(outcome, NotApplicable):
            not_applicable.append(outcome)
        else:
            sections[analysis.section] = _to_rows(outcome)
    coverage = _coverage(scope)
    if options.has_findings:
        not_applicable += _add_diagnosis(scope, sections, coverage)
    drawn = make_timeline(scope) if options.has_timeline else None
    return _Part((_input(trace),), sections, tuple(not_applicable), coverage, drawn)


def _add_diagnosis(
    scope: Scope, sections: dict[str, tuple[Row, ...]], coverage: dict[str, Any]
) -> Sequence[NotApplicable]:
    """Add scheme, start causes and findings to a report's parts, and return what could not be told."""
    if (missing := device_work_missing(scope.trace, "findings")) is not None:
        return (missing,)
    case = make_case(scope)
    found = diagnose(case)
    sections["schemes"] = ({"path": scope.trace.meta.path, **case.recognition.to_row()},)
    sections["start_causes"] = _to_rows(by_cause(scope, case.causes))
    sections["findings"] = tuple(finding.to_row() for finding in found.findings)
    coverage["dependencies"] = [{"path": scope.trace.meta.path, **_graph(case)}]
    return found.not_applicable


def _graph(case: Case) -> dict[str, Any]:
    """Return how much of the order of ops is known, and how far the times agree with it."""
    dependencies = case.dependencies
    return {
        "n_waits": dependencies.n_waits,
        "n_waits_paired": dependencies.n_waits_paired,
        "n_event_edges": len(dependencies.events.producer),
        "n_blocking_calls": len(dependencies.blocking.thread),
        "n_violations": case.causes.n_violations,
        "clock_tolerance_ns": CLOCK_TOLERANCE_NS,
        "large_residual_ns": case.causes.large_residual_ns,
    }


def _input(trace: Trace) -> Row:
    meta = trace.meta
    return {
        "path": meta.path,
        "format": meta.format,
        "tool_version": meta.tool_version,
        "schema_version": meta.schema_version,
        "device_kind": meta.device_kind,
        "clock": meta.clock,
        "session_start_utc_ns": meta.session_start_utc_ns,
        "run": dict(meta.run) or None,
    }


def _hidden(scope: Scope) -> Iterable[NotApplicable]:
    """Yield why the shares of ranks whose work is hidden inside CUDA graphs cannot be told."""
    if hidden := hidden_ns(scope):
        total = sum(hidden.values())
        yield NotApplicable(
            "overlap",
            f"{format_ns(total)} of device time lie inside CUDA graphs that were traced as a whole, so what"
            " communicates in them is not known; record again with: nsys profile --cuda-graph-trace=node",
            ("CUPTI_ACTIVITY_KIND_KERNEL rows of graph nodes",),
        )


def _coverage(scope: Scope) -> dict[str, Any]:
    """Return how much of the ranks and windows looked at the figures rest on."""
    meta = scope.trace.meta
    launched = scope.launches.is_known[scope.is_inside]
    pieces = [
        intervals.intersect(scope.activities[r].unclassified, scope.windows[r].pieces) for r in scope.ranks
    ]
    return {
        "n_ops": len(launched),
        "n_launches_missing": int(np.count_nonzero(~launched)),
        "unclassified_ns": sum(intervals.total_ns(united) for united in pieces),
        "unclassified": list(_to_rows(_unclassified_names(scope))),
        "peers": [] if isinstance(scope.arrivals, NotApplicable) else [_peers(scope.arrivals)],
        "missing_tables": list(meta.missing_tables),
        "notes": _notes(meta.path, (*meta.notes, *long_pauses(scope), *unequal_windows(scope))),
        "clocks": [],
    }


def _notes(path: str, notes: Iterable[Note]) -> list[Row]:
    return [{"path": path, "code": n.code, "text": n.text, "count": n.count} for n in notes]


def _peers(arrivals: Arrivals) -> dict[str, Any]:
    """Return how communication of different ranks was matched, and how far the split of it can be trusted."""
    return {
        "basis": arrivals.basis,
        "n_ops": len(arrivals.rows),
        "n_matched": int(np.count_nonzero(arrivals.is_matched)),
        "end_spread_ns": arrivals.end_spread_ns,
    }


def _unclassified_names(scope: Scope) -> pd.DataFrame:
    """Return the names that no rule knows with most time, at most ten."""
    ops = scope.trace.ops
    rows = np.flatnonzero(ops["is_unclassified"].to_numpy() & scope.is_inside)
    inside_ns = pd.Series(scope.inside_ns[rows]).groupby(ops["name"].iloc[rows].to_numpy(), observed=True)
    names = (
        inside_ns.agg(count="size", total_ns="sum").rename_axis("name").reset_index().astype({"name": str})
    )
    return names.sort_values(["total_ns", "name"], ascending=[False, True]).head(_MAX_UNCLASSIFIED_NAMES)


def _combine(
    parts: Sequence[_Part], not_applicable: Sequence[NotApplicable], notes: Sequence[Note] = ()
) -> Report:
    """Return one report of all traces, with what cannot be told, and what is to be noted, of them together."""
    sections: dict[str, list[Row]] = {section: [] for section in SECTIONS}
    for part in parts:
        for section, rows in part.sections.items():
            sections[section] += rows
    sections["findings"].sort(key=importance)
    coverage = _combine_coverage([part.coverage for part in parts if part.coverage])
    coverage["notes"] = [*coverage["notes"], *_notes(parts[0].inputs[0]["path"], notes)]
    return Report(
        inputs=tuple(row for part in parts for row in part.inputs),
        sections={section: tuple(rows) for section, rows in sections.items()},
        not_applicable=_once(not_applicable, (entry for part in parts for entry in part.not_applicable)),
        coverage=coverage,
        timeline=timeline.join(tuple(part.timeline for part in parts if part.timeline is not None)),
    )


def _once(of_all: Sequence[NotApplicable], of_files: Iterable[NotApplicable]) -> tuple[NotApplicable, ...]:
    """Return what cannot be told, each once: why all files cannot be taken together is why each alone cannot tell."""
    names = {entry.analysis for entry in of_all}
    return tuple(dict.fromkeys([*of_all, *(entry for entry in of_files if entry.analysis not in names)]))


def _combine_coverage(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if len(parts) == 1:
        return parts[0]
    sums = {
        name: sum(part[name] for part in parts) for name in ("n_ops", "n_launches_missing", "unclassified_ns")
    }
    lists = {name: [entry for part in parts for entry in part[name]] for name in ("unclassified", "notes")}
    missing = list(dict.fromkeys(table for part in parts for table in part["missing_tables"]))
    return {
        **sums,
        "unclassified": lists["unclassified"],
        "peers": [entry for part in parts for entry in part["peers"]],
        "missing_tables": missing,
        "notes": lists["notes"],
        "clocks": [],
        "dependencies": [entry for part in parts for entry in part.get("dependencies", ())],
    }


def _to_rows(frame: pd.DataFrame) -> tuple[Row, ...]:
    """Return the rows of a frame as plain Python values, None where a value is missing."""
    columns = {name: _plain(frame[name]) for name in frame.columns}
    return tuple(dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))


def _plain(column: pd.Series) -> list[Any]:
    if isinstance(column.dtype, np.dtype) and column.dtype.kind in "biu":
        return column.tolist()
    is_missing = column.isna().tolist()
    return [None if missing else value for value, missing in zip(column.tolist(), is_missing, strict=True)]


def _notebook_view(report: Report) -> str:
    from cptrace.renderers import html  # here: plotly takes its time to import

    return html.summary(report)


Report.notebook_view = _notebook_view
