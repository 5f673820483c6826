"""Steps: when each training step ran on each rank's device."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from cptrace import labels
from cptrace.analyses.scope import Window
from cptrace.errors import UsageError
from cptrace.intervals import Int64Array
from cptrace.launches import Launches, closed_ranges, distinct_names, names_match
from cptrace.outcome import NotApplicable
from cptrace.trace import Note, Trace
from cptrace.units import format_instant, joined, plural

# Our own label, and what people write: "step 12", "step_12", "Iteration: 3", "ProfilerStep#7". A word alone or with a
# number, but not "step_optimizer" or "stepping": those are parts of a step.
DEFAULT_PATTERN: Final = re.compile(
    rf"{labels.STEP}|(?i:step|iteration|iter|ProfilerStep)(?:[\s_:#=./-]*\d+(?!\w).*|)(?:, .*)?"
)
# What any such name begins with: a quick first look at what may be a million distinct names.
_CANDIDATE: Final = "^(?i:step|iter|profilerstep)"
_MAX_EXAMPLES: Final = 3
_MAX_NAMED: Final = 3
_NVTX_RANGE, _USER_ANNOTATION = "NVTX range", "user annotation"
_MARKING: Final = {
    _NVTX_RANGE: "torch.cuda.nvtx.range_push('step 0'), or prof.step() under the PyTorch profiler",
    _USER_ANNOTATION: "prof.step(), or torch.profiler.record_function('step 0')",
}
_RANGE_TABLES: Final = ("NVTX_EVENTS", "user_annotation")


def find_steps(
    trace: Trace, launches: Launches, ranges: pd.DataFrame | NotApplicable
) -> pd.DataFrame | NotApplicable:
    """Return when each step ran on each rank: from the first to the last op launched inside the step's range.

    A step's range speaks for all threads of its process, because backward passes launch from threads of their own.

    Args:
        trace: Trace as a source read it.
        launches: The launching call of each op.
        ranges: Step ranges, as `find_step_ranges` returns them.

    Returns:
        One row per rank and step: rank, step (0.. in host order), name, start_ns, end_ns, n_ops.
    """
    if isinstance(ranges, NotApplicable):
        return ranges
    if not launches.is_known.any():
        return NotApplicable(
            "steps",
            "step ranges were found, but no launch of device work was recorded that would tie the work to them;"
            f" record again with: {trace.meta.record_again}",
            tuple(table for table in trace.meta.missing_tables if "RUNTIME" in table.upper()),
        )
    return _project(trace.ops, trace.api_calls, launches, ranges)


def find_step_ranges(trace: Trace, pattern: re.Pattern[str] | None = None) -> pd.DataFrame | NotApplicable:
    """Return the closed ranges that are steps, with their number within their process (column `step`).

    Of matching ranges that lie within each other only the outermost counts.

    Args:
        trace: Trace as a source read it.
        pattern: What a step range is called, searched in range names; None for the usual names.

    Raises:
        UsageError: A pattern was asked for and no range matches it.
    """
    if trace.ranges.empty:
        if pattern is not None:
            raise UsageError(
                f"--step-range {pattern.pattern!r}: {trace.meta.path} has no {_noun(trace)}s; record with:"
                f" {trace.meta.record_again}"
            )
        return NotApplicable(
            "steps",
            f"the trace has no {_noun(trace)}s; mark steps with {_MARKING[_noun(trace)]}, and record with:"
            f" {trace.meta.record_again}",
            tuple(table for table in trace.meta.missing_tables if table in _RANGE_TABLES),
        )
    ranges = closed_ranges(trace.ranges[_is_step(trace.ranges["name"], pattern)])
    ranges = ranges[ranges["kind"] != "mark"]
    if ranges.empty:
        examples = _examples(trace.ranges)
        if pattern is not None:
            raise UsageError(
                f"--step-range {pattern.pattern!r} matches no range of {trace.meta.path}; {examples}"
            )
        return NotApplicable(
            "steps", f"no {_noun(trace)} is called like a step; name it with --step-range REGEX; {examples}"
        )
    return _outermost(ranges)


def _noun(trace: Trace) -> str:
    """Return what the tool that recorded a trace calls its ranges."""
    return _USER_ANNOTATION if trace.meta.format == "kineto_json" else _NVTX_RANGE


def _is_step(names: pd.Series, pattern: re.Pattern[str] | None) -> npt.NDArray[np.bool_]:
    """Return which ranges are called like a step; each distinct name is looked at once."""
    matches = DEFAULT_PATTERN.fullmatch if pattern is None else pattern.search
    rows = np.arange(len(names)) if pattern is not None else np.flatnonzero(names_match(names, _CANDIDATE))
    texts, slot = distinct_names(names.iloc[rows])
    of_text = np.array([text is not None and matches(text) is not None for text in texts], bool)
    is_step = np.zeros(len(names), bool)
    is_step[rows] = of_text[slot]
    return is_step


def _examples(ranges: pd.DataFrame) -> str:
    """Return the most frequent names of ranges, numbers folded, so that the user can pick a pattern."""
    folded = ranges["name"].astype(str).str.replace(r"\d+", "N", regex=True).str.slice(0, 60)
    common = sorted(folded.value_counts().items(), key=lambda item: (-item[1], item[0]))[:_MAX_EXAMPLES]
    return "the most frequent ranges are: " + "; ".join(f"{name!r} ({count}x)" for name, count in common)


def _outermost(ranges: pd.DataFrame) -> pd.DataFrame:
    """Return the ranges that lie in no other one of their process, numbered within it."""
    ordered = ranges.assign(end_ns=ranges["end_ns"].astype(np.int64)).sort_values(
        ["process", "start_ns", "end_ns"], ascending=[True, True, False], kind="stable"
    )
    reach = (
        ordered.groupby("process", sort=False)["end_ns"]
        .cummax()
        .groupby(ordered["process"], sort=False)
        .shift()
    )
    outermost = ordered[reach.isna() | (ordered["end_ns"] > reach)]
    return outermost.assign(step=outermost.groupby("process", sort=False).cumcount()).reset_index(drop=True)


def _project(
    ops: pd.DataFrame, api_calls: pd.DataFrame, launches: Launches, ranges: pd.DataFrame
) -> pd.DataFrame:
    """Return the extent on the device of what was launched inside each range."""
    op, row = _ops_in_steps(ops["process"].to_numpy(), api_calls["start_ns"].to_numpy(), launches, ranges)
    rank, start, end = (ops[name].to_numpy()[op] for name in ("rank", "start_ns", "end_ns"))
    # One slot for each rank and range: there are few, so no sorting of ops is needed to reduce them.
    slot = rank.astype(np.int64) * len(ranges) + row
    n_slots = (int(rank.max(initial=0)) + 1) * len(ranges)
    first_ns, last_ns = np.full(n_slots, np.iinfo(np.int64).max), np.full(n_slots, np.iinfo(np.int64).min)
    np.minimum.at(first_ns, slot, start)
    np.maximum.at(last_ns, slot, end)
    n_ops = np.bincount(slot, minlength=n_slots)
    used = np.flatnonzero(n_ops)
    steps = pd.DataFrame(
        {
            "rank": used // len(ranges),
            "step": ranges["step"].to_numpy()[used % len(ranges)],
            "name": ranges["name"].astype(str).to_numpy()[used % len(ranges)],
            "start_ns": first_ns[used],
            "end_ns": last_ns[used],
            "n_ops": n_ops[used],
        }
    )
    return steps.sort_values(["rank", "step"], kind="stable", ignore_index=True)


def _ops_in_steps(
    process: Int64Array, call_start_ns: Int64Array, launches: Launches, ranges: pd.DataFrame
) -> tuple[Int64Array, Int64Array]:
    """Return the ops that were launched in a step range, and the row of that range."""
    start, end, owners = (ranges[name].to_numpy() for name in ("start_ns", "end_ns", "process"))
    found_ops, found_rows = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for owner in pd.unique(owners):
        rows = np.flatnonzero(owners == owner)
        mine = np.flatnonzero(launches.is_known & (process == owner))
        instant = call_start_ns[launches.call[mine]]
        place = np.searchsorted(start[rows], instant, side="right") - 1
        is_inside = (place >= 0) & (instant < end[rows[np.maximum(place, 0)]])
        found_ops.append(mine[is_inside])
        found_rows.append(rows[place[is_inside]])
    return np.concatenate(found_ops), np.concatenate(found_rows)


def split_at_windows(steps: pd.DataFrame, windows: Mapping[int, Window]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the steps that lie wholly inside windows of one piece, and those that the windows cut.

    A step is one of all ranks: ranks could not be compared in one that is whole on some of them and a part on others.

    Args:
        steps: Steps, as `find_steps` returns them.
        windows: Window of each rank.

    Returns:
        Steps that lie inside on every rank that has them, and those that on some rank do and on some do not, or reach
        over an edge; both with the columns of `steps`. Those that lie outside on every rank are in neither.
    """
    rank, start, end, number = (steps[name].to_numpy() for name in ("rank", "start_ns", "end_ns", "step"))
    low, high = np.zeros(len(steps), np.int64), np.zeros(len(steps), np.int64)
    for of_rank, window in windows.items():
        low[rank == of_rank], high[rank == of_rank] = window.pieces.start_ns[0], window.pieces.end_ns[-1]
    reaches_in = (end > low) & (start < high)
    is_broken = np.isin(number, number[~reaches_in | (start < low) | (end > high)])
    is_cut = is_broken & np.isin(number, number[reaches_in])
    return steps[~is_broken].reset_index(drop=True), steps[is_cut].reset_index(drop=True)


def no_whole_step(cut: pd.DataFrame, window: Window) -> NotApplicable:
    """Return why a window has no steps.

    Args:
        cut: Steps that it cuts.
        window: Window that was asked for.
    """
    where = (
        f"{format_instant(int(window.pieces.start_ns[0]))} to {format_instant(int(window.pieces.end_ns[-1]))}"
    )
    reason = f"the window {where} holds no whole step"
    if cut.empty:
        return NotApplicable(
            "steps", f"{reason}, nor a part of one; without --window all steps are accounted for"
        )
    number = plural(cut["step"].nunique(), "step")
    return NotApplicable(
        "steps",
        f"{reason}: it cuts {number} ({_names(cut)}), and parts of steps are not compared as steps; {_widened(cut)};"
        " without --window all steps are accounted for",
    )


def note_of_cut(cut: pd.DataFrame) -> Note:
    """Return what a reader of figures of steps should know of those that the window cuts.

    Args:
        cut: Steps that the window cuts, at least one.
    """
    text = f"the window cuts {_names(cut)}: left out of all figures of steps; {_widened(cut)}"
    return Note("cut-steps", text, cut["step"].nunique())


def _widened(cut: pd.DataFrame) -> str:
    return f"what it cuts is whole in --window {cut['start_ns'].min()}ns:{cut['end_ns'].max()}ns"


def _names(steps: pd.DataFrame) -> str:
    """Return what steps are called, for people; their number is added where the name has none."""
    first = steps.drop_duplicates("step").sort_values("step")
    named = first.head(_MAX_NAMED) if len(first) > _MAX_NAMED + 1 else first
    names = [
        name if any(map(str.isdecimal, name)) else f"{name} {number}"
        for name, number in zip(named["name"].tolist(), named["step"].tolist(), strict=True)
    ]
    return joined([*names, f"{len(first) - len(named)} more"] if len(named) < len(first) else names)
