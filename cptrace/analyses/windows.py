"""Which part of each rank's time is accounted for."""

from __future__ import annotations

import numpy as np
import pandas as pd

from cptrace import intervals
from cptrace.analyses.scope import Window
from cptrace.errors import UsageError
from cptrace.intervals import Intervals
from cptrace.outcome import NotApplicable
from cptrace.requests import WindowRequest
from cptrace.units import format_ns


def find_windows(
    ops: pd.DataFrame, steps: pd.DataFrame | NotApplicable, request: WindowRequest | None
) -> dict[int, Window]:
    """Return the window of each rank: as asked for, else the union of its steps, else first to last op.

    Args:
        ops: Device work of the ranks asked for.
        steps: Steps of these ranks, or why there are none.
        request: The window that was asked for, if any.

    Raises:
        UsageError: The window asked for lies outside the trace.
    """
    start, end, rank = (ops[name].to_numpy() for name in ("start_ns", "end_ns", "rank"))
    extents = {
        r: (int(start[rank == r].min()), int(end[rank == r].max())) for r in sorted(pd.unique(rank).tolist())
    }
    if request is not None and not request.is_all:
        return _requested(request, extents)
    windows: dict[int, Window] = {}
    for number, extent in extents.items():
        mine = EMPTY_STEPS if isinstance(steps, NotApplicable) else steps[steps["rank"] == number]
        if request is None and len(mine):
            pieces = intervals.union(Intervals(mine["start_ns"].to_numpy(), mine["end_ns"].to_numpy()))
            windows[number] = Window("steps", pieces)
        else:
            windows[number] = Window("all", _one_piece(*extent))
    return windows


EMPTY_STEPS = pd.DataFrame({"rank": [], "start_ns": [], "end_ns": []}, dtype=np.int64)


def _one_piece(start_ns: int, end_ns: int) -> Intervals:
    return intervals.union(Intervals(np.array([start_ns], np.int64), np.array([end_ns], np.int64)))


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
