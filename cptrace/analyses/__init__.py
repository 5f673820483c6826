"""Analyses: one question each, answered with a table or with why it cannot be answered.

`ANALYSES` is the list that reports, help and tests go by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

import pandas as pd

from cptrace.analyses import account, breakdowns, messages, peer_waits, traffic
from cptrace.analyses.scope import Activity, Lane, Scope, Window, cut_to_windows, find_activities, find_lanes
from cptrace.analyses.steps import find_step_ranges, find_steps, no_whole_step, note_of_cut, split_at_windows
from cptrace.analyses.windows import find_windows
from cptrace.classify import classify
from cptrace.errors import UsageError
from cptrace.launches import Launches, find_launches
from cptrace.outcome import NotApplicable
from cptrace.peers import Arrivals, find_arrivals
from cptrace.requests import ScopeRequest, WindowRequest
from cptrace.trace import Trace


@dataclass(frozen=True, slots=True)
class Analysis:
    """One question to a trace.

    Attributes:
        name: Stable name, as `not_applicable` states it.
        section: Section of the report that its table fills.
        question: What it answers.
        run: Answers it.
    """

    name: str
    section: str
    question: str
    run: Callable[[Scope], pd.DataFrame | NotApplicable]


ANALYSES: Final[tuple[Analysis, ...]] = (
    Analysis(
        "account",
        "ranks",
        "How much of each rank's time is compute, communication, copies and idle?",
        account.by_rank,
    ),
    Analysis("steps", "steps", "The same for each training step.", account.by_step),
    Analysis(
        "collectives",
        "collectives",
        "Which collectives take how long, and how much overlaps?",
        breakdowns.collectives,
    ),
    Analysis("streams", "streams", "Which stream is busy with what?", breakdowns.streams),
    Analysis("kernels", "kernels", "Which kernels and copies take how long?", breakdowns.kernels),
    Analysis("messages", "messages", "How fast did messages of each size go?", messages.by_size),
    Analysis("peer_waits", "peer_waits", "Which rank waited for which?", peer_waits.by_peer),
    Analysis("traffic", "traffic", "Did each rank send what its scheme's formula says?", traffic.by_layer),
)


def make_scope(trace: Trace, request: ScopeRequest) -> Scope:
    """Return what the analyses look at.

    Args:
        trace: Trace as a source read it.
        request: Which part of it to look at.

    Raises:
        UsageError: A rank, step range or window was asked for that the trace does not have.
    """
    with ThreadPoolExecutor(1) as pool:  # what does not depend on each other is found side by side
        step_ranges = pool.submit(find_step_ranges, trace, request.step_pattern)
        launches = find_launches(trace.ops, trace.api_calls)
        trace = classify(trace, launches)
        ranks = _choose_ranks(trace, request.ranks)
        activity = pool.submit(_find_activity, trace, launches, ranks)
        steps = find_steps(trace, launches, step_ranges.result())
        if not isinstance(steps, NotApplicable):
            steps = steps[steps["rank"].isin(ranks)].reset_index(drop=True)
        windows = find_windows(trace.ops, ranks, steps, request.window)
        steps, cut_steps = _whole_steps(steps, windows, request.window)
        inside_ns, is_inside = cut_to_windows(trace.ops, windows)
        lanes, activities, arrivals = activity.result()
    if len(cut_steps) and not isinstance(steps, NotApplicable):
        trace = replace(trace, meta=replace(trace.meta, notes=(*trace.meta.notes, note_of_cut(cut_steps))))
    return Scope(
        trace, launches, ranks, steps, cut_steps, windows, lanes, activities, inside_ns, is_inside, arrivals
    )


def _whole_steps(
    steps: pd.DataFrame | NotApplicable, windows: Mapping[int, Window], request: WindowRequest | None
) -> tuple[pd.DataFrame | NotApplicable, pd.DataFrame]:
    """Return the steps that count, or why there are none, and those that a window that was asked for cuts."""
    if isinstance(steps, NotApplicable):
        return steps, pd.DataFrame()
    if request is None or request.is_all or steps.empty:
        return steps, steps.head(0)
    whole, cut = split_at_windows(steps, windows)
    # All ranks have the same window where one was asked for.
    return no_whole_step(cut, next(iter(windows.values()))) if whole.empty else whole, cut


def _find_activity(
    trace: Trace, launches: Launches, ranks: tuple[int, ...]
) -> tuple[tuple[Lane, ...], dict[int, Activity], Arrivals | NotApplicable]:
    lanes = tuple(lane for lane in find_lanes(trace.ops) if lane.rank in ranks)
    arrivals = find_arrivals(trace, launches)
    return lanes, find_activities(trace.ops, lanes, arrivals), arrivals


def _choose_ranks(trace: Trace, wanted: tuple[int, ...]) -> tuple[int, ...]:
    there = tuple(sorted(trace.ranks["rank"].tolist()))
    unknown = sorted(set(wanted) - set(there))
    if unknown:
        raise UsageError(
            f"rank {unknown[0]} is not in {trace.meta.path}; it has ranks {', '.join(map(str, there)) or '(none)'}"
        )
    return tuple(sorted(set(wanted))) if wanted else there
