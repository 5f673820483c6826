"""Runs: stretches of a stream that nothing enters or leaves but at their ends, each one node of the network.

    stream      [a][b] [c]   [d][e]        c waits for an event: a and b are a run, c to e are another,
    launches   a b c   d  e                if nobody waits for c or d

Within a run an op starts when the one before it ends, or after its launch. So the start of its last op is the latest of
a constant behind what enters the run, and a constant behind each host call that its launches follow.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cptrace.intervals import BoolArray, Int64Array
from cptrace.replay.changes import Changes, keeps
from cptrace.replay.host import launch_offsets
from cptrace.replay.recording import Recording


class Lags(NamedTuple):
    """Edges from the end of an op to the start of another.

    Attributes:
        producer: Row of the op that ends, int64 of shape (K,).
        consumer: Row of the op that waits, int64 of shape (K,).
        lag_ns: Least time between the two, int64 of shape (K,).
    """

    producer: Int64Array
    consumer: Int64Array
    lag_ns: Int64Array


class Launched(NamedTuple):
    """When the launch of each of N ops lets it start.

    Attributes:
        is_held: Whether a launch, or the lack of anything else, holds it back, bool of shape (N,).
        has_anchor: Whether that moves with a blocking call, bool of shape (N,).
        anchor: That call, int64 of shape (N,).
        offset_ns: Earliest start behind the call's end; without a call, behind 0; int64 of shape (N,).
    """

    is_held: BoolArray
    has_anchor: BoolArray
    anchor: Int64Array
    offset_ns: Int64Array


class Runs(NamedTuple):
    """N ops at their places in stream order, cut into R runs.

    Attributes:
        of_place: Run of each place, int64 of shape (N,).
        first: First place of each run, int64 of shape (R,).
        last: Last place of each run, int64 of shape (R,).
        depth_ns: Start of the op at each place behind the start of the first of all, if each op just followed the one
            before it; only differences within a run mean anything; int64 of shape (N,).
        follows: Whether the op at each place waits for the one before it, bool of shape (N,).
        previous_lag_ns: Lag of its start behind that one's end, int64 of shape (N,).
    """

    of_place: Int64Array
    first: Int64Array
    last: Int64Array
    depth_ns: Int64Array
    follows: BoolArray
    previous_lag_ns: Int64Array


def find_lags(recording: Recording, changes: Changes, residual_ns: Int64Array) -> Lags:
    """Return the edges between ops that are left and those that are new, without those of stream order.

    A recorded edge keeps its residual. One that was violated keeps what it was violated by; a new one never is.

    Args:
        recording: The recorded run.
        changes: What is different.
        residual_ns: Delay of each op that nothing explains, at least 0, in ns, int64 of shape (N,).
    """
    events, resources = recording.dependencies.events, recording.resources
    event = np.flatnonzero(recording.is_event_kept & keeps(changes.drop_event, len(events.producer)))
    resource = np.flatnonzero(keeps(changes.drop_resource, len(resources.producer)))
    producer = np.concatenate((events.producer[event], resources.producer[resource]))
    consumer = np.concatenate((events.consumer[event], resources.consumer[resource]))
    slack = recording.start_ns[consumer] - recording.end_ns[producer]
    lag = np.concatenate((np.minimum(residual_ns[consumer], slack), residual_ns[changes.added_consumer]))
    return Lags(
        np.concatenate((producer, changes.added_producer)),
        np.concatenate((consumer, changes.added_consumer)),
        lag,
    )


def find_launched(
    recording: Recording, changes: Changes, residual_ns: Int64Array, has_other: BoolArray
) -> Launched:
    """Return when the launch of each op lets it start; an op with nothing else to wait for starts as recorded.

    Args:
        recording: The recorded run.
        changes: What is different.
        residual_ns: Delay of each op that nothing explains, at least 0, in ns, int64 of shape (N,).
        has_other: Which ops wait for another op, bool of shape (N,).
    """
    start = recording.start_ns
    is_launched = recording.has_launch & keeps(changes.drop_launch, len(start))
    offset, _ = launch_offsets(recording.host, recording.dependencies, changes.host_gap_ns)
    offset = np.where(recording.dependencies.is_launch_known, offset, start)
    lag = np.minimum(residual_ns, start - recording.launch_ns)
    return Launched(
        is_launched | ~has_other,
        is_launched & recording.host.has_anchor,
        recording.host.anchor,
        np.where(is_launched, offset + lag, start),
    )


def find_runs(
    recording: Recording,
    follows: BoolArray,
    residual_ns: Int64Array,
    duration_ns: Int64Array,
    cuts: BoolArray,
) -> Runs:
    """Return the runs.

    Args:
        recording: The recorded run.
        follows: Which ops wait for the one before them in their stream, by row, bool of shape (N,).
        residual_ns: Delay of each op that nothing explains, at least 0, in ns, int64 of shape (N,).
        duration_ns: Duration of each op in ns, int64 of shape (N,).
        cuts: Which ops begin a run for other reasons, by row, bool of shape (N,).
    """
    rows = recording.order.rows
    start, end = recording.start_ns[rows], recording.end_ns[rows]
    follows = follows[rows]
    opens = ~follows | cuts[rows]
    lag, step = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    lag[1:] = np.minimum(residual_ns[rows[1:]], start[1:] - end[:-1])
    step[1:] = np.where(opens[1:], 0, lag[1:] + duration_ns[rows[:-1]])
    first = np.flatnonzero(opens)
    last = np.append(first[1:], len(rows))[: len(first)] - 1
    return Runs(np.cumsum(opens) - 1, first, last, np.cumsum(step), follows, lag)
