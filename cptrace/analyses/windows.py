"""Which part of each rank's time is accounted for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import pandas as pd

from cptrace import intervals
from cptrace.analyses.scope import Scope, Window, cut_to_windows
from cptrace.errors import UsageError
from cptrace.intervals import Intervals
from cptrace.outcome import NotApplicable
from cptrace.requests import WindowRequest
from cptrace.units import format_ns

_EARLIEST: Final = np.iinfo(np.int64).min
_LATEST: Final = np.iinfo(np.int64).max

BY_STEPS: Final = "steps"
"""Basis of a window that is the union of its rank's steps."""


def find_windows(
    ops: pd.DataFrame,
    ranks: Sequence[int],
    steps: pd.DataFrame | NotApplicable,
    request: WindowRequest | None,
) -> dict[int, Window]:
    """Return the window of each rank: as asked for, else the union of its steps, else first to last op.

    Args:
        ops: Device work.
        ranks: Ranks asked for, all with device work.
        steps: Steps of these ranks, or why there are none.
        request: The window that was asked for, if any.

    Raises:
        UsageError: The window asked for lies outside the trace.
    """
    start, end, rank = (ops[name].to_numpy() for name in ("start_ns", "end_ns", "rank"))
    first, last = np.full(max(ranks, default=0) + 1, _LATEST), np.full(max(ranks, default=0) + 1, _EARLIEST)
    is_asked = np.isin(rank, ranks) if len(ops) else np.zeros(0, bool)
    np.minimum.at(first, rank[is_asked], start[is_asked])
    np.maximum.at(last, rank[is_asked], end[is_asked])
    extents = {number: (int(first[number]), int(last[number])) for number in ranks}
    if request is not None and not request.is_all:
        return _requested(request, extents)
    windows = {number: Window("all", _one_piece(*extent)) for number, extent in extents.items()}
    if request is None and not isinstance(steps, NotApplicable):
        windows |= _unions_of_steps(steps)
    return windows


def within_steps(scope: Scope) -> Scope:
    """Return what to look at without what lies between steps and before them; the same where there are no steps.

    A window that was asked for may hold a warm-up too, and ranks are compared by what they do in steps.

    Args:
        scope: What to look at.
    """
    if isinstance(scope.steps, NotApplicable) or scope.steps.empty:
        return scope
    windows = {**scope.windows, **_unions_of_steps(scope.steps)}
    inside_ns, is_inside = cut_to_windows(scope.trace.ops, windows)
    return replace(scope, windows=windows, inside_ns=inside_ns, is_inside=is_inside)


def _unions_of_steps(steps: pd.DataFrame) -> dict[int, Window]:
    """Return the window of each rank that has steps of some length."""
    start, end, rank = (steps[name].to_numpy() for name in ("start_ns", "end_ns", "rank"))
    unions = {
        r: intervals.union(Intervals(start[rank == r], end[rank == r])) for r in pd.unique(rank).tolist()
    }
    return {r: Window(BY_STEPS, united) for r, united in unions.items() if united.n_intervals}


def _one_piece(start_ns: int, end_ns: int) -> Intervals:
    # Not united: an op of no duration alone makes a window of no length, which all the same is a window.
    return Intervals(np.array([start_ns], np.int64), np.array([end_ns], np.int64))


def _requested(request: WindowRequest, extents: dict[int, tuple[int, int]]) -> dict[int, Window]:
    first = min((start for start, _ in extents.values()), default=0)
    last = max((end for _, end in extents.values()), default=0)
    start = first if request.start_ns is None else request.start_ns
    end = last if request.end_ns is None else request.end_ns
    if extents and (end <= first or start >= last):
        raise UsageError(
            f"the window {format_ns(start)} to {format_ns(end)} lies outside the trace, whose device work runs from"
            f" {first} ns ({format_ns(first)}) to {last} ns ({format_ns(last)})"
        )
    return {rank: Window("option", _one_piece(start, end)) for rank in extents}
