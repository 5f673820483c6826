"""Why each communication and attention op started when it did, and not earlier.

Of all that an op had to wait for, what was done last is its start cause. The time from then to the actual start is the
residual: launch overhead on the device, small and much the same all over a trace. A residual far above that is a cause
of its own: the op could have run and did not.

    previous op in its stream  |-------|
    producer of an awaited event    |-----------|
    its launch on the host   |--|                         cause: event-wait
    the op                                       . |------|
                                                 residual
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from cptrace import intervals
from cptrace.analyses.scope import Scope
from cptrace.classify import COMM, ROLES, is_attention
from cptrace.dependencies import Dependencies
from cptrace.groups import number_groups
from cptrace.intervals import BoolArray, Int64Array, Intervals

STREAM_ORDER: Final = "stream-order"
EVENT_WAIT: Final = "event-wait"
LAUNCH: Final = "launch"
HOST_SYNC: Final = "host-sync"
QUEUE_ORDER: Final = "queue-order"
UNKNOWN: Final = "unknown"
CAUSES: Final = (STREAM_ORDER, EVENT_WAIT, LAUNCH, HOST_SYNC, QUEUE_ORDER, UNKNOWN)

# Host and device clocks of one machine agree to about a microsecond.
CLOCK_TOLERANCE_NS: Final = 2_000
MAX_UNKNOWN_WAITS: Final = 0.05
"""Up to this share of waits without a record, what looks like no cause is believed to have none."""
_MIN_LARGE_RESIDUAL_NS: Final = 20_000
_LARGE_RESIDUAL: Final = 10
_NEVER: Final = np.iinfo(np.int64).min


@dataclass(frozen=True, slots=True)
class StartCauses:
    """The start cause of each of N ops.

    Attributes:
        cause: Code into `CAUSES`, of shape (N,).
        ready_ns: When what it waited for was done, int64 of shape (N,); meaningless where unknown.
        device_ready_ns: When all device work that it waited for was done, int64 of shape (N,); far in the past where
            there was none.
        residual_ns: Actual start minus ready, int64 of shape (N,); negative within the clocks' tolerance.
        culprit: Row of the op that it waited for: the one before it in its stream, the event's producer, or the op that
            the host was blocked on, int64 of shape (N,); meaningless without one.
        has_culprit: Whether there is such an op, bool of shape (N,).
        large_residual_ns: From where on a residual is a cause of its own.
        n_violations: Ops that start before something that they had to wait for ended, beyond the clocks' tolerance.
    """

    cause: npt.NDArray[np.int8]
    ready_ns: Int64Array
    device_ready_ns: Int64Array
    residual_ns: Int64Array
    culprit: Int64Array
    has_culprit: BoolArray
    large_residual_ns: int
    n_violations: int


def find_start_causes(ops: pd.DataFrame, dependencies: Dependencies) -> StartCauses:
    """Return the start cause of each op.

    Args:
        ops: Device work.
        dependencies: What each op had to wait for.
    """
    start, end = ops["start_ns"].to_numpy(), ops["end_ns"].to_numpy()
    producer, has_producer = _last_producers(end, dependencies)
    done = np.stack(
        [
            np.where(dependencies.has_previous, end[dependencies.previous], _NEVER),
            np.where(has_producer, end[producer], _NEVER),
            np.where(dependencies.is_launch_known, dependencies.launch_end_ns, _NEVER),
        ]
    )
    cause = np.argmax(done, axis=0).astype(np.int8)
    ready = done.max(axis=0, initial=_NEVER)
    device_ready = np.maximum(done[0], done[1])
    is_blocked, blocker = _blocked(dependencies, device_ready)
    cause[(cause == CAUSES.index(LAUNCH)) & is_blocked] = CAUSES.index(HOST_SYNC)
    is_known = ready > _NEVER
    residual = np.where(is_known, start - np.where(is_known, ready, 0), 0)
    large = _large_residual(residual[is_known])
    cause[residual > large] = CAUSES.index(QUEUE_ORDER)
    # What it may have waited for all that time is not in the trace: that it could run cannot be said.
    cause[(residual > large) & _may_have_waited(dependencies)] = CAUSES.index(UNKNOWN)
    cause[~is_known] = CAUSES.index(UNKNOWN)
    rows = np.stack([dependencies.previous, producer, np.zeros(len(ops), np.int64), blocker])
    has = np.stack([dependencies.has_previous, has_producer, np.zeros(len(ops), bool), is_blocked])
    chosen = np.minimum(cause, len(rows) - 1)
    columns = np.arange(len(ops))
    has_culprit = has[chosen, columns] & (cause < len(rows))
    n_violations = int(np.count_nonzero(residual < -CLOCK_TOLERANCE_NS))
    culprit = rows[chosen, columns]
    return StartCauses(cause, ready, device_ready, residual, culprit, has_culprit, large, n_violations)


def _may_have_waited(dependencies: Dependencies) -> BoolArray:
    """Return which ops may have waited for something that the trace does not tell, bool of shape (N,)."""
    if dependencies.n_waits_unrecorded > MAX_UNKNOWN_WAITS * dependencies.n_waits:
        return np.ones(len(dependencies.queue), bool)
    return dependencies.has_unknown_wait


def by_cause(scope: Scope, causes: StartCauses) -> pd.DataFrame:
    """Return one row per rank, role and cause: how many communication and attention ops, and their exposed time.

    Args:
        scope: What to look at.
        causes: The start cause of each op.
    """
    ops = scope.trace.ops
    role = ops["role"].cat.codes.to_numpy()
    attention = is_attention(ops)
    rows = np.flatnonzero(scope.is_inside & ((role == ROLES.index(COMM)) | attention))
    keys = (
        ops["rank"].to_numpy()[rows],
        attention[rows].astype(np.int64),
        causes.cause[rows].astype(np.int64),
    )
    slot, first = number_groups(*keys)
    frame = pd.DataFrame(
        {
            "rank": keys[0][first],
            "role": np.where(keys[1][first], "attention", COMM),
            "cause": np.array(CAUSES, object)[keys[2][first]],
            "count": np.bincount(slot, minlength=len(first)),
            "exposed_ns": _exposed(scope, rows, slot, len(first)),
            "median_residual_ns": _medians(causes.residual_ns[rows], slot, len(first)),
        }
    )
    return frame.sort_values(
        ["rank", "role", "exposed_ns", "cause"], ascending=[True, False, False, True], ignore_index=True
    )


def _exposed(scope: Scope, rows: Int64Array, slot: Int64Array, n_slots: int) -> Int64Array:
    """Return for how long ops of each slot, within their rank's window, communicate while no compute runs.

    What runs at once counts once; compute itself is never exposed. All ops of a slot are of one rank and role.
    """
    ops = scope.trace.ops
    start, end, rank = (ops[name].to_numpy()[rows] for name in ("start_ns", "end_ns", "rank"))
    is_comm = (ops["role"] == COMM).to_numpy()[rows]
    free = {number: scope.without_compute(number) for number in scope.ranks}
    exposed = np.zeros(n_slots, np.int64)
    for number in np.unique(slot[is_comm]).tolist():
        mine = np.flatnonzero(slot == number)
        united = intervals.union(Intervals(start[mine], end[mine]))
        exposed[number] = intervals.total_ns(intervals.intersect(united, free[int(rank[mine[0]])]))
    return exposed


def _medians(values: Int64Array, slot: Int64Array, n_slots: int) -> Int64Array:
    """Return the median of the values of each slot, rounded down."""
    order = np.lexsort((values, slot))
    counts = np.bincount(slot, minlength=n_slots)
    first = np.cumsum(counts) - counts
    low, high = values[order][first + (counts - 1) // 2], values[order][first + counts // 2]
    return np.asarray((low + high) // 2, np.int64)


def _last_producers(end: Int64Array, dependencies: Dependencies) -> tuple[Int64Array, BoolArray]:
    """Return for each op the producer of an event it waited for that ended last, and whether there is one."""
    producer, has_producer = np.zeros(len(end), np.int64), np.zeros(len(end), bool)
    edges = dependencies.events
    order = np.argsort(end[edges.producer], kind="stable") if len(edges.producer) else edges.producer
    # In ascending order of ends, so that the last one is written last.
    producer[edges.consumer[order]] = edges.producer[order]
    has_producer[edges.consumer] = True
    return producer, has_producer


def _blocked(dependencies: Dependencies, other_ns: Int64Array) -> tuple[BoolArray, Int64Array]:
    """Return which ops were launched late because the host was blocked, and the op that it was last blocked on.

    That is so where blocking calls fill most of the time from when all else was done to the end of the launch.
    """
    is_blocked, blocker = np.zeros(len(other_ns), bool), np.zeros(len(other_ns), np.int64)
    blocking = dependencies.blocking
    for thread in pd.unique(blocking.thread).tolist():
        calls = np.flatnonzero(blocking.thread == thread)
        ops = np.flatnonzero(dependencies.is_launch_known & (dependencies.launch_thread == thread))
        late_from = np.minimum(other_ns[ops], dependencies.launch_end_ns[ops])
        # Without anything else to wait for, an op is as late as its launch: from the last blocking call before it on.
        last = np.searchsorted(blocking.end_ns[calls], dependencies.launch_start_ns[ops], side="right") - 1
        has_call = last >= 0
        call = calls[np.maximum(last, 0)]
        late_from = np.where(other_ns[ops] == _NEVER, blocking.start_ns[call], late_from)
        busy = intervals.union(Intervals(blocking.start_ns[calls], blocking.end_ns[calls]))
        launched = dependencies.launch_end_ns[ops]
        blocked_ns = intervals.covered_ns(busy, np.minimum(late_from, launched), launched)
        is_blocked[ops] = has_call & (2 * blocked_ns > launched - late_from) & blocking.has_producer[call]
        blocker[ops] = blocking.producer[call]
    return is_blocked, blocker


def _large_residual(residual: Int64Array) -> int:
    """Return from where on a residual is far above the trace's usual one."""
    if not len(residual):
        return _MIN_LARGE_RESIDUAL_NS
    usual = int(np.median(np.maximum(residual, 0)))
    return max(_MIN_LARGE_RESIDUAL_NS, _LARGE_RESIDUAL * usual)
