"""What every analysis looks at: one classified trace, the ranks asked for, their steps and windows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import pandas as pd

from cptrace import intervals
from cptrace.classify import COMM, COMPUTE, COPY, OTHER, ROLES
from cptrace.groups import group_rows
from cptrace.intervals import BoolArray, Int64Array, Intervals
from cptrace.launches import Launches, calls_of, names_match
from cptrace.outcome import NotApplicable
from cptrace.peers import Arrivals
from cptrace.trace import Trace

# Device work that is a kernel, or hides kernels.
_KERNEL_KINDS: Final = ("kernel", "graph")
_KERNEL_LAUNCH: Final = r"(?i)launch.*kernel|^cudaLaunch(?:_v\d+)?$"


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a rank's time that is accounted for.

    Attributes:
        basis: `steps` (union of its steps), `option` (asked for) or `all` (first op start to last op end).
        pieces: United set of its instants.
    """

    basis: str
    pieces: Intervals


class Lane(NamedTuple):
    """Ops of one role in one stream.

    Attributes:
        rank: Rank.
        context: CUDA context of the stream.
        stream: Stream.
        role: Role, one of `classify.ROLES`.
        rows: Rows in the table of ops, ascending.
        busy: United set of the instants in which one of them runs, in or out of the window.
    """

    rank: int
    context: int
    stream: int
    role: str
    rows: Int64Array
    busy: Intervals


@dataclass(frozen=True, slots=True)
class Activity:
    """What a rank's device does when: united sets, not yet cut to a window.

    Attributes:
        compute: Instants in which a compute op runs.
        comm: Instants in which a communication op runs.
        overlapped_comm: Instants in which both do.
        exposed_rest: Instants in which a copy or another op runs, and neither compute nor communication.
        unclassified: Instants in which an op runs that only a fallback rule classified.
        transfer: Instants in which a communication op runs whose participants have all arrived; None where ops of
            other ranks were not matched.
    """

    compute: Intervals
    comm: Intervals
    overlapped_comm: Intervals
    exposed_rest: Intervals
    unclassified: Intervals
    transfer: Intervals | None = None


@dataclass(frozen=True, slots=True)
class Scope:
    """One trace as the analyses see it.

    Attributes:
        trace: Classified trace.
        launches: The launching call of each op.
        ranks: Ranks asked for, ascending.
        steps: Steps of these ranks (rank, step, name, start_ns, end_ns, n_ops), or why there are none; with a window
            that was asked for, those that lie wholly inside it on every rank that has them.
        cut_steps: Steps of these ranks that such a window cuts, with the columns of `steps`: no figure of a step is
            theirs. Empty without such a window.
        windows: Window of each rank.
        lanes: Ops of each role in each stream.
        activities: Activity of each rank.
        inside_ns: How much of each op lies in its rank's window, int64 of shape (N,), 0 for ranks not asked for.
        is_inside: Whether any instant of each op does, bool of shape (N,); ops of no duration count as an instant.
        arrivals: When the last participant of each communication op arrived, or why that cannot be told.
    """

    trace: Trace
    launches: Launches
    ranks: tuple[int, ...]
    steps: pd.DataFrame | NotApplicable
    cut_steps: pd.DataFrame
    windows: Mapping[int, Window]
    lanes: tuple[Lane, ...]
    activities: Mapping[int, Activity]
    inside_ns: Int64Array
    is_inside: BoolArray
    arrivals: Arrivals | NotApplicable

    def without_compute(self, rank: int) -> Intervals:
        """Return the instants of a rank's window in which no compute runs: what communicates then is exposed."""
        return intervals.gaps(self.activities[rank].compute, self.windows[rank].pieces)


def device_work_missing(trace: Trace, analysis: str) -> NotApplicable | None:
    """Return why an analysis of device work cannot be made, or None where there is device work.

    Args:
        trace: Trace to analyse.
        analysis: Name of the analysis.
    """
    missing = tuple(
        table for table in trace.meta.missing_tables if re.search("(?i)kernel|mem(cpy|set)", table)
    )
    if not trace.ops.empty:
        n_launches = 0 if _has_kernels(trace.ops["kind"]) else _n_kernel_launches(trace)
        return _kernels_missing(trace, analysis, n_launches, missing) if n_launches else None
    return NotApplicable(
        analysis,
        f"it needs device work, but {trace.meta.path} has no kernel, copy or memset"
        f" ({', '.join(missing) or 'no such rows'}); record again with: {trace.meta.record_again}"
        " (under WSL and in some containers the GPU's counters are not accessible)",
        missing,
    )


def _has_kernels(kinds: pd.Series) -> bool:
    codes = (
        kinds.cat.codes.to_numpy()
    )  # every analysis asks, so by code: pandas would look at each row's text
    wanted = [
        code for code in kinds.cat.categories.get_indexer(pd.Index(_KERNEL_KINDS)).tolist() if code >= 0
    ]
    return any(bool((codes == code).any()) for code in wanted)


def _n_kernel_launches(trace: Trace) -> int:
    """Return how many calls launch a kernel that is not in the trace, rather than an op that is."""
    is_launch = names_match(trace.api_calls["name"], _KERNEL_LAUNCH)
    found = calls_of(trace.ops, trace.api_calls)
    is_launch[found.call[found.is_known]] = False
    return int(np.count_nonzero(is_launch))


def _kernels_missing(trace: Trace, analysis: str, n_launches: int, missing: tuple[str, ...]) -> NotApplicable:
    return NotApplicable(
        analysis,
        f"it needs kernels, but of {n_launches:,} kernel launches {trace.meta.path} has not one kernel, only"
        " copies and memsets: what computes and what communicates cannot be told; record again with:"
        f" {trace.meta.record_again} (where another profiler holds the GPU's counters, kernels get lost)",
        missing,
    )


def find_lanes(ops: pd.DataFrame) -> tuple[Lane, ...]:
    """Return the ops of each role in each stream, ordered by rank, context, stream and role.

    Args:
        ops: Classified device work, ordered by start.
    """
    start, end = ops["start_ns"].to_numpy(), ops["end_ns"].to_numpy()
    keys = [
        *(ops[name].to_numpy() for name in ("rank", "context", "stream")),
        ops["role"].cat.codes.to_numpy(),
    ]
    lanes = []
    for rows in group_rows(*keys):
        rank, context, stream, role = (int(key[rows[0]]) for key in keys)
        busy = intervals.union(Intervals(start[rows], end[rows]))
        lanes.append(Lane(rank, context, stream, ROLES[role], rows, busy))
    return tuple(lanes)


def find_activities(
    ops: pd.DataFrame, lanes: Sequence[Lane], arrivals: Arrivals | NotApplicable
) -> dict[int, Activity]:
    """Return the activity of each rank.

    Args:
        ops: Classified device work.
        lanes: Its lanes.
        arrivals: When the last participant of each communication op arrived.
    """
    unknown = np.flatnonzero(ops["is_unclassified"].to_numpy())
    start, end, of_rank = (ops[name].to_numpy()[unknown] for name in ("start_ns", "end_ns", "rank"))
    activities: dict[int, Activity] = {}
    for rank in sorted({lane.rank for lane in lanes}):
        mine = [lane for lane in lanes if lane.rank == rank]
        compute, comm, rest = (
            intervals.merge(*(lane.busy for lane in mine if lane.role in roles))
            for roles in ((COMPUTE,), (COMM,), (COPY, OTHER))
        )
        activities[rank] = Activity(
            compute=compute,
            comm=comm,
            overlapped_comm=intervals.intersect(comm, compute),
            exposed_rest=intervals.subtract(intervals.subtract(rest, compute), comm),
            transfer=_transfer(ops, arrivals, rank),
            unclassified=intervals.union(Intervals(start[of_rank == rank], end[of_rank == rank])),
        )
    return activities


def _transfer(ops: pd.DataFrame, arrivals: Arrivals | NotApplicable, rank: int) -> Intervals | None:
    """Return when a rank's communication ops run with all participants there, None where that cannot be told."""
    if isinstance(arrivals, NotApplicable):
        return None
    mine = (ops["rank"].to_numpy()[arrivals.rows] == rank).nonzero()[0]
    if not arrivals.is_matched[mine].all():
        return None
    end_ns = ops["end_ns"].to_numpy()[arrivals.rows[mine]]
    return intervals.union(Intervals(np.minimum(arrivals.last_ns[mine], end_ns), end_ns))


def cut_to_windows(ops: pd.DataFrame, windows: Mapping[int, Window]) -> tuple[Int64Array, BoolArray]:
    """Return how much of each op lies in its rank's window, and whether any instant of it does.

    Args:
        ops: Device work of N rows.
        windows: Windows of the ranks asked for.
    """
    start, end, rank = (ops[name].to_numpy() for name in ("start_ns", "end_ns", "rank"))
    inside_ns, is_inside = np.zeros(len(ops), np.int64), np.zeros(len(ops), bool)
    for number, window in windows.items():
        mine = np.flatnonzero(rank == number)
        inside_ns[mine], is_in = _cut(start[mine], end[mine], window.pieces)
        # An instant at the very end of the trace lies in no half-open window, but nothing lies outside of everything.
        is_inside[mine] = is_in | (window.basis == "all")
    return inside_ns, is_inside


def _cut(start: Int64Array, end: Int64Array, pieces: Intervals) -> tuple[Int64Array, BoolArray]:
    """Return how much of each op lies in a window, and whether any instant of it does: one without duration is one."""
    inside_ns = end - start
    place = np.searchsorted(pieces.start_ns, start, side="right") - 1
    piece_end = pieces.end_ns[np.maximum(place, 0)]
    is_inside = (place >= 0) & (end <= piece_end) & (start < piece_end)
    # Few ops reach over an edge: only they need to be cut.
    rest = np.flatnonzero(~is_inside)
    is_instant = start[rest] == end[rest]
    covered = intervals.covered_ns(pieces, start[rest], end[rest] + is_instant)
    is_inside[rest] = covered > 0
    inside_ns[rest] = np.where(is_instant, 0, covered)
    return inside_ns, is_inside
