"""One trace of several files of one job, so that ranks of different files are compared, matched and replayed together.

Each file has a clock of its own. They are put on that of the first by the wall-clock times at which the recordings
began, good to milliseconds, and then by collectives that they have in common, good to microseconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pandas as pd

from cptrace import labels
from cptrace.classify import COMM, classify
from cptrace.clocks import Offsets, ends_together, find_offsets
from cptrace.errors import TraceError
from cptrace.intervals import Int64Array
from cptrace.joined import join_traces
from cptrace.launches import Launches, distinct_names, find_launches, names_match
from cptrace.matching import BY_LABEL, match_transfers
from cptrace.outcome import NotApplicable
from cptrace.peers import MAX_END_SPREAD_NS, find_arrivals
from cptrace.requests import ReadOptions
from cptrace.sources import Readings
from cptrace.trace import Note, Trace
from cptrace.units import format_ns, plural

MAX_JOINED_OPS: Final = 10_000_000
"""Files with more device work in all are analysed one by one: joined they take about 0.5 GB for each million."""
TOO_LARGE: Final = (
    f"the files have more than {MAX_JOINED_OPS:,} ops, which are not held in memory at once; give fewer files, or"
    " record fewer steps"
)

_ANALYSIS: Final = "peer_wait"
# Hosts of one cluster agree to milliseconds. Clocks further apart may as well be recordings of different steps, of
# which each collective would meet the one of a step before, unless the steps are numbered and the same.
_MAX_WALL_CLOCK_ERROR_NS: Final = 10_000_000
# GPUs of one host are put on one clock about as well as this, in one file or in several.
_ONE_CLOCK_NS: Final = 50_000
_NUMBERED_STEP: Final = re.compile(r"(?i)(?:profiler)?(?:step|iteration|iter)[ _#:]*(\d+)")
_COUNTED: Final = "counted-ranks"
_OF_ONE_PROCESS: Final = ("ranks", "capture")


class Joined(NamedTuple):
    """One trace of several files.

    Attributes:
        trace: All of them, on one clock.
        shift_ns: By how much each file's times differ from those in the file, int64 of shape (F,).
        error_ns: Uncertainty of that.
        is_whole_told: Whether the files tell which ranks take part, so that absent ones would be known.
    """

    trace: Trace
    shift_ns: Int64Array
    error_ns: int
    is_whole_told: bool


def number_ranks(trace: Trace, paths: dict[int, str]) -> Trace:
    """Return the trace with ranks that no earlier trace has, and add them to the paths of ranks.

    Ranks recorded with a run keep their numbers; the others are counted on from file to file. They keep theirs where
    those are free: a source that knows the size of the job numbers what is no rank of it from there on.

    Args:
        trace: Trace as a source read it.
        paths: Path of the file of each rank of the traces before it; those of this one are added.

    Raises:
        TraceError: A rank is in two files.
    """
    ranks, is_recorded = (trace.ranks[name].to_numpy() for name in ("rank", "is_recorded"))
    first_free = max([*paths, *ranks[is_recorded].tolist()], default=-1) + 1
    shift = first_free - int(ranks[~is_recorded].min(initial=first_free))
    numbers = np.where(is_recorded, ranks, ranks + shift).astype(ranks.dtype)
    for number in numbers.tolist():
        if number in paths:
            raise TraceError(
                f"rank {number} is in {paths[number]} and in {trace.meta.path}; give the files of one job, each once,"
                " or analyze them one by one"
            )
        paths[number] = trace.meta.path
    if np.array_equal(numbers, ranks):
        return trace
    place = np.searchsorted(ranks, trace.ops["rank"].to_numpy())
    return replace(trace, ops=trace.ops.assign(rank=numbers[place]), ranks=trace.ranks.assign(rank=numbers))


def read_job(paths: Sequence[Path], options: ReadOptions | None = None) -> Trace:
    """Return the files of one job as one trace.

    Args:
        paths: Paths of traces; they are never written to.
        options: How to read them.

    Raises:
        SourceError: A file is missing, unreadable, damaged or of no known format.
        TraceError: The content of one contradicts itself, or the files cannot be put on one clock.
    """
    path_of: dict[int, str] = {}
    with Readings(paths, options) as readings:
        traces = [number_ranks(trace, path_of) for trace in readings]
    if len(traces) == 1:
        return traces[0]
    joined = join_job(traces)
    if isinstance(joined, NotApplicable):
        raise TraceError(f"the files cannot be taken together: {joined.reason}; give one file at a time")
    return joined.trace


def is_too_large(traces: Sequence[Trace]) -> bool:
    """Return whether traces are too large to be held in memory at once.

    Args:
        traces: Traces of one job.
    """
    return sum(len(trace.ops) for trace in traces) > MAX_JOINED_OPS


def join_job(traces: Sequence[Trace]) -> Joined | NotApplicable:
    """Return one trace of the files of one job, or why they cannot be put on one clock.

    Args:
        traces: Two or more traces as sources read them, each rank in one of them alone.
    """
    if (reason := _differ(traces)) is not None:
        return _cannot(reason)
    began = [trace.meta.session_start_utc_ns for trace in traces]
    known = [start for start in began if start is not None]
    if len(known) < len(began):
        return _cannot("not every file says when its recording began, so their times cannot be compared")
    steps = [_step_numbers(trace) for trace in traces]
    if (odd := _other_steps(traces, steps)) is not None:
        return _cannot(odd)
    rough_ns = np.array(known, np.int64) - min(known)
    joined = join_traces(traces, rough_ns)
    seen = _see(joined)
    offsets = _offsets(seen, traces, are_same_steps=all(steps))
    if isinstance(offsets, NotApplicable):
        return offsets
    most_ns = int(np.abs(offsets.shift_ns).max())
    is_one_clock = most_ns <= max(offsets.error_ns, _ONE_CLOCK_NS)
    total_ns = rough_ns if is_one_clock else rough_ns + offsets.shift_ns
    total_ns = total_ns - total_ns.min()
    if is_one_clock:
        return _checked(joined, seen, total_ns, max(offsets.error_ns, most_ns))
    joined = join_traces(traces, total_ns)
    return _checked(joined, _see(joined), total_ns, offsets.error_ns)


class _Seen(NamedTuple):
    """A classified trace and the launching call of each op."""

    trace: Trace
    launches: Launches


def _see(trace: Trace) -> _Seen:
    launches = find_launches(trace.ops, trace.api_calls)
    return _Seen(classify(trace, launches), launches)


def _checked(joined: Trace, seen: _Seen, shift_ns: Int64Array, error_ns: int) -> Joined | NotApplicable:
    """Return joined files, or why their times cannot be those of one job on one clock."""
    arrivals = find_arrivals(*seen)
    if isinstance(arrivals, NotApplicable):
        is_partial = (joined.meta.n_job_ranks or 0) > len(joined.ranks)
        return Joined(joined, shift_ns, error_ns, True) if is_partial else arrivals
    is_told = arrivals.basis == BY_LABEL or (joined.meta.n_job_ranks or 0) >= len(joined.ranks)
    return Joined(joined, shift_ns, error_ns, is_told)


def _step_numbers(trace: Trace) -> frozenset[int]:
    """Return the numbers of a trace's steps, as far as ranges tell them."""
    texts, slot = distinct_names(trace.ranges["name"])
    number = np.array([_number_in(text) for text in texts] or [-1], np.int64)[slot]
    is_ours = names_match(trace.ranges["name"], f"^{labels.STEP}$")
    is_ours &= (trace.ranges["domain"] == labels.DOMAIN).to_numpy(bool)
    payload = trace.ranges["payload"].to_numpy(np.int64, na_value=-1)
    number = np.where(is_ours, payload, number)
    return frozenset(np.unique(number[number >= 0]).tolist())


def _number_in(text: str | None) -> int:
    match = _NUMBERED_STEP.fullmatch(text or "")
    return int(match[1]) if match else -1


def _other_steps(traces: Sequence[Trace], steps: Sequence[frozenset[int]]) -> str | None:
    """Return which files hold other steps than the first, None where all that number them hold the same."""
    numbered = [(trace.meta.path, found) for trace, found in zip(traces, steps, strict=True) if found]
    for path, found in numbered[1:]:
        if found != numbered[0][1]:
            return (
                f"the files hold different steps: {numbered[0][0]} {_span(numbered[0][1])}, {path} {_span(found)};"
                " record the same steps on all ranks"
            )
    return None


def _span(steps: frozenset[int]) -> str:
    return f"{plural(len(steps), 'step')} from {min(steps)} to {max(steps)}"


def one_by_one(reason: str) -> NotApplicable:
    """Return that files are analysed each by itself.

    Args:
        reason: Why.
    """
    return NotApplicable(
        _ANALYSIS,
        f"{reason}; so each file was analysed by itself: who waited for a rank of another file is not told, and"
        " predictions take the ranks of other files as recorded",
    )


def _cannot(reason: str) -> NotApplicable:
    return NotApplicable(_ANALYSIS, reason)


def _differ(traces: Sequence[Trace]) -> str | None:
    """Return in what files differ that are of one job, None where in nothing."""
    if is_too_large(traces):
        return TOO_LARGE
    if any(trace.ops.empty for trace in traces):
        return "a file has no device work"
    for what in ("format", "device_kind", "clock"):
        found = list(dict.fromkeys(str(getattr(trace.meta, what)) for trace in traces))
        if len(found) > 1:
            return f"the files are of different {what.replace('_', ' ')}s: {', '.join(found)}"
    runs = [{key: value for key, value in t.meta.run.items() if key not in _OF_ONE_PROCESS} for t in traces]
    if any(run != runs[0] for run in runs[1:]):
        return "the files are of different runs"
    return None


def _offsets(seen: _Seen, traces: Sequence[Trace], *, are_same_steps: bool) -> Offsets | NotApplicable:
    """Return how the clocks of files differ that were put together roughly."""
    joined, launches = seen
    rows = np.flatnonzero((joined.ops["role"] == COMM).to_numpy())
    clock_of = {rank: number for number, trace in enumerate(traces) for rank in trace.ranks["rank"].tolist()}
    rank = joined.ops["rank"].to_numpy()[rows]
    clock = pd.Series(rank).map(clock_of).to_numpy(np.int64)
    without = [number for number in range(len(traces)) if number not in clock]
    if without:
        return _cannot(f"{traces[without[0]].meta.path} has no communication to compare clocks by")
    matched = match_transfers(joined, launches, rows)
    if not (matched.partner >= 0).any():
        return _cannot(
            "the ranks do not have the same number of each communication op, so which belong together cannot be told"
        )
    which = ends_together(matched, joined.ops["collective"].to_numpy()[rows])
    offsets = find_offsets(joined.ops["end_ns"].to_numpy()[rows], clock, matched, which)
    if offsets is None:
        return _cannot(
            "no collective is known to end on the ranks of all files at once (hops of a ring and other messages from"
            " rank to rank do not, and ops of which ranks do not have as many, or groups that some files do not name,"
            " are not matched), so how far their clocks differ cannot be told; a barrier or an all-reduce of all ranks"
            " within the recording tells"
        )
    return _unbelievable(offsets, are_same_steps=are_same_steps) or offsets


def _unbelievable(offsets: Offsets, *, are_same_steps: bool) -> NotApplicable | None:
    """Return why clocks cannot differ as the ends of collectives say; None where they can."""
    if offsets.error_ns > MAX_END_SPREAD_NS:
        return _cannot(
            f"collectives taken for the same end {format_ns(offsets.error_ns)} apart (median) on whatever clocks, where"
            " the parts of one end together: they belong to different process groups, or to different steps"
        )
    most_ns = int(np.abs(offsets.shift_ns).max())
    if most_ns > _MAX_WALL_CLOCK_ERROR_NS and not are_same_steps:
        return _cannot(
            f"collectives taken for the same are {format_ns(most_ns)} apart, more than the clocks of hosts should"
            " differ, and no numbers of steps tell that the files hold the same ones; number the step ranges (as"
            " ProfilerStep#3), or record with clocks that agree to 10 ms"
        )
    return None


def counted_notes(traces: Sequence[Trace], *, are_joined: bool) -> list[Note]:
    """Return by what ranks are numbered that no file tells, where that is the order of several files.

    Args:
        traces: Traces as `number_ranks` returns them, in the order of the files.
        are_joined: Whether what each file says of its own ranks is left out.
    """
    counted = [trace for trace in traces if not trace.ranks["is_recorded"].all()]
    paths = [trace.meta.path for trace in counted]
    are_numbered = len({re.sub(r"\d+", "#", path) for path in paths}) == 1
    is_in_order = not are_numbered or paths == sorted(paths, key=_by_number)
    is_said = not are_joined and all(_COUNTED in {n.code for n in trace.meta.notes} for trace in counted)
    if len(traces) < 2 or not counted or (is_said and is_in_order):
        return []
    text = "the files do not tell their ranks, which were counted in the order of the files"
    if not is_in_order:
        rank, path = counted[-1].ranks["rank"].max(), paths[-1]
        text += (
            f", and that is not the order of the numbers in their names (rank {rank} is in {path}; a shell sorts 10"
            " before 2): name them in the order of their ranks"
        )
    return [Note(_COUNTED, text)]


def not_counted(notes: Sequence[Note]) -> list[Note]:
    """Return a file's notes without how its ranks were counted, which `counted_notes` says of joined files.

    Args:
        notes: Notes of one file.
    """
    return [note for note in notes if note.code != _COUNTED]


def _by_number(path: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path)]


def joined_notes(joined: Joined, traces: Sequence[Trace]) -> list[Note]:
    """Return what a reader of figures that rest on joined files should know.

    Args:
        joined: The files as one trace.
        traces: The files.
    """
    most_ns = int(joined.shift_ns.max())
    how = "their times are of one clock"
    if most_ns:
        most = format_ns(most_ns)
        how = f"their times were moved to one clock, by up to {most} (coverage.clocks in the JSON has each)"
    notes = [
        Note(
            "joined-clocks",
            f"the files were joined as ranks of one job: {how}, on which the parts of one collective end"
            f" {format_ns(joined.error_ns)} apart (median)"
            + (
                ""
                if joined.is_whole_told
                else "; nothing says how many ranks the job has: all are taken to be here"
            ),
        )
    ]
    if joined.trace.gpu_samples.empty and not all(trace.gpu_samples.empty for trace in traces):
        notes.append(
            Note(
                "samples-left-out",
                "files name different devices alike, so samples of the GPUs' counters were left out; analyze files one"
                " by one for them",
            )
        )
    return notes


def with_files(
    findings: Sequence[Mapping[str, Any]], joined: Joined, traces: Sequence[Trace]
) -> tuple[Mapping[str, Any], ...]:
    """Return findings whose evidence says in which file it is found, and when on that file's own clock.

    Args:
        findings: Findings of joined files, as a report states them.
        joined: The files as one trace.
        traces: The files.
    """
    place = {
        rank: {"file": trace.meta.path, "file_start_ns": -shift}
        for trace, shift in zip(traces, joined.shift_ns.tolist(), strict=True)
        for rank in trace.ranks["rank"].tolist()
    }
    return tuple(
        {**row, "evidence": [_in_file(entry, place) for entry in row["evidence"]]} for row in findings
    )


def _in_file(entry: Mapping[str, Any], place: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    file = place[entry["rank"]]
    return {**entry, **file, "file_start_ns": entry["start_ns"] + file["file_start_ns"]}
