"""Which part of each rank's time is accounted for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from cptrace import intervals
from cptrace.analyses.scope import Window
from cptrace.errors import UsageError
from cptrace.intervals import Intervals
from cptrace.outcome import NotApplicable
from cptrace.units import format_ns, parse_ns


@dataclass(frozen=True, slots=True)
class WindowRequest:
    """A window that was asked for.

    Attributes:
        is_all: From the first to the last op of each rank, whatever the steps are.
        start_ns: Inclusive start in trace time, None for the first op.
        end_ns: Exclusive end in trace time, None for the last op.
    """

    is_all: bool = False
    start_ns: int | None = None
    end_ns: int | None = None


def parse_window(text: str) -> WindowRequest:
    """Return the window that an option's text asks for.

    Args:
        text: `all`, or `START:END` in trace time with units, either side optional, such as `1.2s:1300ms`.

    Raises:
        UsageError: The text is neither, or the window is empty.
    """
    if text == "all":
        return WindowRequest(is_all=True)
    start, colon, end = text.partition(":")
    if not colon or not (start.strip() or end.strip()):
        raise UsageError(
            f"cannot read window {text!r}; write `all`, or START:END with units, such as 1.2s:1300ms"
        )
    request = WindowRequest(
        start_ns=parse_ns(start) if start.strip() else None, end_ns=parse_ns(end) if end.strip() else None
    )
    if request.start_ns is not None and request.end_ns is not None and request.end_ns <= request.start_ns:
        raise UsageError(f"window {text!r} is empty: its end is not after its start")
    return request


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
    extents = {rank: _extent(group) for rank, group in ops.groupby("rank", sort=True)}
    if request is not None and not request.is_all:
        return _requested(request, extents)
    windows: dict[int, Window] = {}
    for rank, extent in extents.items():
        mine = EMPTY_STEPS if isinstance(steps, NotApplicable) else steps[steps["rank"] == rank]
        if request is None and len(mine):
            pieces = intervals.union(Intervals(mine["start_ns"].to_numpy(), mine["end_ns"].to_numpy()))
            windows[rank] = Window("steps", pieces)
        else:
            windows[rank] = Window("all", _one_piece(*extent))
    return windows


EMPTY_STEPS = pd.DataFrame({"rank": [], "start_ns": [], "end_ns": []}, dtype=np.int64)


def _extent(ops: pd.DataFrame) -> tuple[int, int]:
    return int(ops["start_ns"].min()), int(ops["end_ns"].max())


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
