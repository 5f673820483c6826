"""What every analysis looks at: one classified trace, the ranks asked for, their steps and windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from cptrace import intervals
from cptrace.classify import COMM, COMPUTE, ROLES
from cptrace.intervals import Intervals
from cptrace.launches import Launches
from cptrace.outcome import NotApplicable
from cptrace.trace import Trace


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a rank's time that is accounted for.

    Attributes:
        basis: `steps` (union of its steps), `option` (asked for) or `all` (first op start to last op end).
        pieces: United set of its instants.
    """

    basis: str
    pieces: Intervals


@dataclass(frozen=True, slots=True)
class Activity:
    """What a rank's device does when: united sets, not yet cut to a window.

    Attributes:
        compute: Instants in which a compute op runs.
        comm: Instants in which a communication op runs.
        rest: Instants in which a copy or another op runs.
        unclassified: Instants in which an op runs that only a fallback rule classified.
    """

    compute: Intervals
    comm: Intervals
    rest: Intervals
    unclassified: Intervals


@dataclass(frozen=True, slots=True)
class Scope:
    """One trace as the analyses see it.

    Attributes:
        trace: Classified trace.
        launches: The launching call of each op.
        ranks: Ranks asked for, ascending.
        steps: Steps of these ranks (rank, step, name, start_ns, end_ns, n_ops), or why there are none.
        windows: Window of each rank.
        activities: Activity of each rank.
    """

    trace: Trace
    launches: Launches
    ranks: tuple[int, ...]
    steps: pd.DataFrame | NotApplicable
    windows: Mapping[int, Window]
    activities: Mapping[int, Activity]


def device_work_missing(trace: Trace, analysis: str) -> NotApplicable | None:
    """Return why an analysis of device work cannot be made, or None where there is device work.

    Args:
        trace: Trace to analyse.
        analysis: Name of the analysis.
    """
    if not trace.ops.empty:
        return None
    missing = tuple(table for table in trace.meta.missing_tables if "KERNEL" in table or "MEM" in table)
    return NotApplicable(
        analysis,
        f"it needs device work, but {trace.meta.path} has no kernel, copy or memset"
        f" ({', '.join(missing) or 'no such rows'}); record again with: nsys profile --trace=cuda,nvtx"
        " (under WSL and in some containers the GPU's counters are not accessible)",
        missing,
    )


def find_activities(ops: pd.DataFrame) -> dict[int, Activity]:
    """Return the activity of each rank.

    Args:
        ops: Classified device work, ordered by start.
    """
    start, end = ops["start_ns"].to_numpy(), ops["end_ns"].to_numpy()
    rank, role = ops["rank"].to_numpy(), ops["role"].cat.codes.to_numpy()
    is_unclassified = ops["is_unclassified"].to_numpy()

    def united(mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Intervals:
        return intervals.union(Intervals(start[mask], end[mask]))

    activities: dict[int, Activity] = {}
    for number in np.unique(rank).tolist():
        mine = rank == number
        is_comm, is_compute = (mine & (role == ROLES.index(name)) for name in (COMM, COMPUTE))
        activities[number] = Activity(
            compute=united(is_compute),
            comm=united(is_comm),
            rest=united(mine & ~is_comm & ~is_compute),
            unclassified=united(mine & is_unclassified),
        )
    return activities
