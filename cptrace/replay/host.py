"""How host threads move in a replay: rigid between the calls that blocked.

    host    [sync)..a..b....[sync)..c     launches a and b follow the first call at their distances, c the second
                 |<- as recorded ->|

A call that blocked ends when the host's own work allows it, and not before what it waited for is done.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import pandas as pd

from cptrace.dependencies import Dependencies
from cptrace.intervals import BoolArray, Int64Array
from cptrace.trace import Trace

# What a synchronise call takes that finds nothing to wait for, where the trace has none to tell.
_QUICK_CALL_NS: Final = 2_000
_NEVER: Final = np.iinfo(np.int64).min


class Host(NamedTuple):
    """The launches of N ops, B blocking calls as `Dependencies.blocking` lists them, and K waits of calls for ops.

    Attributes:
        anchor: Blocking call that the launch of each op follows, int64 of shape (N,); meaningless where there is none.
        has_anchor: Whether there is one, bool of shape (N,); without one, the launch stays as recorded.
        before: Blocking call before each on its thread, int64 of shape (B,); meaningless for the first.
        has_before: Whether there is one, bool of shape (B,).
        cost_ns: Duration of each call when it does not have to wait, int64 of shape (B,).
        call: Blocking call, int64 of shape (K,).
        producer: Row of an op that it waits for, int64 of shape (K,).
        lag_ns: From the op's end to the call's, int64 of shape (K,).
        is_device: Whether each call waits for all streams of its context, bool of shape (B,).
        context: Number of the context of each call, counted over all processes, int64 of shape (B,).
        context_of_op: The same of each op, int64 of shape (N,).
    """

    anchor: Int64Array
    has_anchor: BoolArray
    before: Int64Array
    has_before: BoolArray
    cost_ns: Int64Array
    call: Int64Array
    producer: Int64Array
    lag_ns: Int64Array
    is_device: BoolArray
    context: Int64Array
    context_of_op: Int64Array


def find_host(trace: Trace, dependencies: Dependencies, arrival_ns: Int64Array) -> Host:
    """Return how the host's threads hang on device work.

    Args:
        trace: Trace as a source read it.
        dependencies: What each op had to wait for.
        arrival_ns: From when on each op ran without waiting for other ranks, in ns, int64 of shape (N,).
    """
    blocking = dependencies.blocking
    anchor, has_anchor = _anchors(trace, dependencies)
    before = np.maximum(np.arange(len(blocking.thread)) - 1, 0)
    has_before = (before < np.arange(len(before))) & (blocking.thread[before] == blocking.thread)
    call, producer = _waits(trace, dependencies)
    is_possible = arrival_ns[producer] <= blocking.end_ns[call]
    call, producer = call[is_possible], producer[is_possible]
    cost, lag = _costs(blocking.start_ns, blocking.end_ns, call, trace.ops["end_ns"].to_numpy()[producer])
    syncs = trace.syncs.iloc[blocking.sync]
    is_device = (syncs["kind"] == "context").to_numpy()
    context_of_op, context = _number_contexts(trace.ops, dependencies.queue, syncs)
    waits = (call, producer, lag)
    return Host(anchor, has_anchor, before, has_before, cost, *waits, is_device, context, context_of_op)


def loose_waits(
    host: Host, dependencies: Dependencies, loose: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return what waits for ops that nothing in their stream waits for any more: calls, ops, and lags in ns.

    A call that waits for a whole device waits for the last op of each stream. Where that no longer waits for those
    before it, they are to be waited for as well, by the first such call behind their launch.

    Args:
        host: How the host's threads hang on device work.
        dependencies: What each op had to wait for.
        loose: Rows of the ops.
    """
    lag = np.full(len(host.cost_ns), np.iinfo(np.int64).max)
    np.minimum.at(lag, host.call, host.lag_ns)
    calls, producers = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    start_ns = dependencies.blocking.start_ns
    for context in np.unique(host.context_of_op[loose]):
        ops = loose[(host.context_of_op[loose] == context) & dependencies.is_launch_known[loose]]
        mine = np.flatnonzero(host.is_device & (host.context == context) & (lag < np.iinfo(np.int64).max))
        mine = mine[np.argsort(start_ns[mine], kind="stable")]
        place = np.searchsorted(start_ns[mine], dependencies.launch_start_ns[ops], side="right")
        is_there = place < len(mine)
        calls.append(mine[place[is_there]])
        producers.append(ops[is_there])
    call = np.concatenate(calls)
    return call, np.concatenate(producers), lag[call]


def _number_contexts(
    ops: pd.DataFrame, queue: Int64Array, syncs: pd.DataFrame
) -> tuple[Int64Array, Int64Array]:
    """Return a number for the context of each op and of each call; all ops of a stream have that of one of them."""
    one = np.zeros(int(queue.max(initial=-1)) + 1, np.int64)
    one[queue] = np.arange(len(queue))
    names = ["process", "context"]
    keys = pd.concat([frame[names].astype("Int64") for frame in (ops.iloc[one], syncs)])
    codes = keys.groupby(names, sort=False, dropna=False).ngroup().to_numpy().astype(np.int64)
    return codes[: len(one)][queue], codes[len(one) :]


def _anchors(trace: Trace, dependencies: Dependencies) -> tuple[Int64Array, BoolArray]:
    """Return the last call that blocked the thread before it launched each op, and whether there is one."""
    blocking, start_ns = dependencies.blocking, trace.ops["start_ns"].to_numpy()
    leader = _leaders(trace, dependencies)
    anchor, has_anchor = np.zeros(len(start_ns), np.int64), np.zeros(len(start_ns), bool)
    for thread in pd.unique(blocking.thread).tolist():
        calls = np.flatnonzero(blocking.thread == thread)
        ops = np.flatnonzero(dependencies.is_launch_known & (leader == thread))
        reach = np.maximum.accumulate(blocking.end_ns[calls])
        last = np.searchsorted(reach, dependencies.launch_start_ns[ops], side="right") - 1
        anchor[ops] = calls[np.maximum(last, 0)]
        # An op that ran before the call ended was not launched after it, whatever the clocks say.
        has_anchor[ops] = (last >= 0) & (blocking.end_ns[anchor[ops]] <= start_ns[ops])
    return anchor, has_anchor


def _leaders(trace: Trace, dependencies: Dependencies) -> Int64Array:
    """Return the thread that each launch moves with: its own, or the one thread of its process that ever blocks.

    A backward pass launches from a thread of its own, which starts when the main thread gets there.
    """
    blocking = dependencies.blocking
    process = trace.syncs["process"].to_numpy()[blocking.sync]
    pairs = pd.DataFrame({"process": process, "thread": blocking.thread}).drop_duplicates()
    only = pairs[~pairs["process"].duplicated(keep=False)]
    place = pd.Index(only["process"]).get_indexer(trace.ops["process"])
    own = dependencies.launch_thread
    if not len(only):
        return own
    follows = (place >= 0) & ~np.isin(own, blocking.thread)
    return np.where(follows, only["thread"].to_numpy()[np.maximum(place, 0)], own)


def _waits(trace: Trace, dependencies: Dependencies) -> tuple[Int64Array, Int64Array]:
    """Return the blocking calls and the ops that each waited for: of a whole device, the last of each stream."""
    blocking = dependencies.blocking
    syncs = trace.syncs.iloc[blocking.sync]
    process, context = (syncs[name].to_numpy() for name in ("process", "context"))
    is_device = (syncs["kind"] == "context").to_numpy()
    single = np.flatnonzero(~is_device & blocking.has_producer)
    calls, producers = [single], [blocking.producer[single]]
    of_op = [trace.ops[name].to_numpy() for name in ("process", "context")]
    for rows in _launched_by_queue(dependencies):
        mine = np.flatnonzero(is_device & (process == of_op[0][rows[0]]) & (context == of_op[1][rows[0]]))
        launch_ns = np.maximum.accumulate(dependencies.launch_start_ns[rows])
        n_launched = np.searchsorted(launch_ns, blocking.start_ns[mine], side="left")
        calls.append(mine[n_launched > 0])
        producers.append(rows[n_launched[n_launched > 0] - 1])
    return np.concatenate(calls), np.concatenate(producers)


def _launched_by_queue(dependencies: Dependencies) -> list[Int64Array]:
    """Return the rows of ops of each stream whose launch is known, in stream order."""
    known = np.flatnonzero(dependencies.is_launch_known)
    known = known[np.argsort(dependencies.queue[known], kind="stable")]
    edges = np.flatnonzero(np.diff(dependencies.queue[known])) + 1
    return [rows for rows in np.split(known, edges) if len(rows)]


def _costs(
    start_ns: Int64Array, end_ns: Int64Array, call: Int64Array, producer_end_ns: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Return what each blocking call takes without waiting, and the lag of its end behind each of its producers'."""
    done = np.full(len(start_ns), _NEVER)
    np.maximum.at(done, call, producer_end_ns)
    duration = end_ns - start_ns
    is_waiting = done > start_ns
    quick = duration[~is_waiting]
    typical = int(np.median(quick)) if len(quick) else _QUICK_CALL_NS
    is_blocked = is_waiting & (duration > typical)
    late = np.maximum(end_ns - np.where(done > _NEVER, done, end_ns), 0)
    usual = int(np.median(late[is_blocked])) if is_blocked.any() else 0
    late = np.where(is_blocked, late, np.minimum(late, usual))
    return np.where(is_blocked, typical, duration), np.minimum(late[call], end_ns[call] - producer_end_ns)


def launch_offsets(
    host: Host, dependencies: Dependencies, gap_ns: int | None
) -> tuple[Int64Array, Int64Array]:
    """Return the end of each launch behind its anchor's, and each blocking call's earliest end behind its one before.

    What has no call before it is counted from time 0.

    Args:
        host: How the host's threads hang on device work.
        dependencies: What each op had to wait for.
        gap_ns: Most host time between two successive launches of a thread, in ns; None for as recorded.
    """
    blocking = dependencies.blocking
    origin = np.where(host.has_anchor, _at(blocking.end_ns, host.anchor), 0)
    call_origin = np.where(host.has_before, blocking.end_ns[host.before], 0)
    offset, distance = dependencies.launch_end_ns - origin, blocking.start_ns - call_origin
    if gap_ns is not None:
        offset, distance = _squeeze(host, dependencies, gap_ns)
    return offset, distance + host.cost_ns


def _squeeze(host: Host, dependencies: Dependencies, gap_ns: int) -> tuple[Int64Array, Int64Array]:
    """Return the offsets and distances with no more than `gap_ns` between successive launches or calls of a thread."""
    blocking, launch_ns = dependencies.blocking, dependencies.launch_end_ns
    of_op, of_call = _stretches(host, dependencies)
    rows = np.flatnonzero(dependencies.is_launch_known)
    rows = rows[np.lexsort((launch_ns[rows], of_op[rows]))]
    offset = launch_ns.copy()
    offset[rows] = _squeezed(host, dependencies, rows, of_op[rows], gap_ns)
    # A call comes a pause after the last launch before it, or after the call before it where there is none.
    origin = np.where(host.has_before, blocking.end_ns[host.before], blocking.start_ns)
    alone = np.minimum(blocking.start_ns - origin, gap_ns) + np.where(host.has_before, 0, origin)
    if not len(rows):
        return offset, alone
    last = np.maximum(np.searchsorted(of_op[rows], of_call, side="right") - 1, 0)
    has_launch = of_op[rows[last]] == of_call
    pause = np.minimum(blocking.start_ns - launch_ns[rows[last]], gap_ns)
    return offset, np.where(has_launch, offset[rows[last]] + pause, alone)


def _stretches(host: Host, dependencies: Dependencies) -> tuple[Int64Array, Int64Array]:
    """Return the stretch of a thread that each launch lies in, and the one that each blocking call ends.

    A stretch is what follows one call; the first of a thread follows none.
    """
    blocking = dependencies.blocking
    threads = np.concatenate((dependencies.launch_thread, blocking.thread))
    _, thread = np.unique(threads, return_inverse=True)
    follows = np.concatenate(
        (np.where(host.has_anchor, host.anchor + 1, 0), np.where(host.has_before, host.before + 1, 0))
    )
    stretch = thread.astype(np.int64) * (len(blocking.thread) + 1) + follows
    return stretch[: len(host.anchor)], stretch[len(host.anchor) :]


def _squeezed(
    host: Host, dependencies: Dependencies, rows: Int64Array, stretch: Int64Array, gap_ns: int
) -> Int64Array:
    """Return the offsets of launches that are ordered by stretch and time; a thread's first stays where it is."""
    launch_ns, has_anchor = dependencies.launch_end_ns[rows], host.has_anchor[rows]
    origin = np.where(has_anchor, _at(dependencies.blocking.end_ns, host.anchor[rows]), launch_ns)
    is_first = np.append(True, np.diff(stretch) != 0)[: len(rows)]
    pause = np.minimum(launch_ns - np.where(is_first, origin, np.roll(launch_ns, 1)), gap_ns)
    total = np.cumsum(pause)
    first = np.flatnonzero(is_first)
    base = np.where(has_anchor, 0, launch_ns)[first] - (total - pause)[first]
    return np.asarray(total + np.repeat(base, np.diff(np.append(first, len(rows)))), np.int64)


def _at(values: Int64Array, places: Int64Array) -> Int64Array:
    """Return values at places, or zeros where there are no values: then the places are meaningless."""
    return values[places] if len(values) else np.zeros(len(places), np.int64)
