"""Replay: when would everything start and end if some waits were gone, others were there, or ops took another time?

    recording = make_recording(trace, dependencies, arrivals)
    replay(recording)                                  every recorded start and end, to the nanosecond
    replay(recording, Changes(drop_previous=mask))     those ops no longer wait for the op before them

An op starts when all that it waits for is done: the op before it in its stream, the producers of its events, its
launch on the host, and ops that held a resource it needs; plus its residual, the delay that nothing explains and that
it keeps. A communication op starts on its own and ends its transfer time after the last of its participants has
arrived, so all ranks of a file are coupled. Host threads are rigid between the calls that blocked them: a launch
keeps its distance from the last such call, which ends when what it waited for does.

Left as it was: the duration of ops (contention does not change), the order of ops in a stream and of calls on the
host, and hosts of different ranks know nothing of each other but by their ops.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from cptrace.errors import TraceError
from cptrace.intervals import Int64Array
from cptrace.replay.changes import Changes, combine
from cptrace.replay.network import Network, build_network
from cptrace.replay.recording import Recording, make_recording
from cptrace.replay.resources import RESOURCES, ResourceEdges
from cptrace.replay.solve import NEVER, earliest_times, find_cycle

__all__ = [
    "RESOURCES",
    "Changes",
    "Recording",
    "Replayed",
    "ResourceEdges",
    "StepTimes",
    "combine",
    "make_recording",
    "replay",
    "step_times",
]


class Replayed(NamedTuple):
    """When each of N ops starts and ends in a replay.

    Attributes:
        start_ns: Start in ns, int64 of shape (N,).
        end_ns: End in ns, int64 of shape (N,).
    """

    start_ns: Int64Array
    end_ns: Int64Array


class StepTimes(NamedTuple):
    """How long steps take in a replay.

    Attributes:
        rank: Rank of each rank's step, int64 of shape (S,).
        step: Number of that step, int64 of shape (S,).
        time_ns: From the start of its first op to the end of its last, int64 of shape (S,).
        job_step: Number of each step, ascending, int64 of shape (T,).
        job_time_ns: Longest time of a rank in it, int64 of shape (T,).
    """

    rank: Int64Array
    step: Int64Array
    time_ns: Int64Array
    job_step: Int64Array
    job_time_ns: Int64Array


_AS_RECORDED = Changes()


def replay(recording: Recording, changes: Changes = _AS_RECORDED) -> Replayed:
    """Return when each op starts and ends with some changes; without any, exactly as recorded.

    Args:
        recording: The recorded run.
        changes: What is different.

    Raises:
        TraceError: Ops wait for each other: by the edges that were added, or because the trace contradicts itself.
    """
    if not len(recording.ops):
        return Replayed(recording.start_ns, recording.end_ns)
    network = build_network(recording, changes)
    time, stuck = earliest_times(network.not_before_ns, network.edges)
    if len(stuck):
        raise TraceError(_describe_cycle(recording, network, stuck))
    start = np.empty(len(recording.ops), np.int64)
    start[recording.order.rows] = _starts(recording, network, time)
    nodes = network.nodes
    begin = np.where(recording.meetings.is_met, time[nodes.end], start)
    return Replayed(start, begin + nodes.duration_ns)


def _starts(recording: Recording, network: Network, time_ns: Int64Array) -> Int64Array:
    """Return the start of the op at each place in stream order: within a run, of all that holds ops up to it back,
    what reaches furthest."""
    runs, launched, entries, rows = network.runs, network.launched, network.entries, recording.order.rows
    offset = launched.offset_ns.copy()
    moving = np.flatnonzero(launched.has_anchor)
    offset[moving] += time_ns[network.nodes.first_call + launched.anchor[moving]]
    held = np.where(launched.is_held, offset, NEVER)[rows]
    entered = np.full(len(runs.first), NEVER)
    np.maximum.at(entered, entries.target, time_ns[entries.source] + entries.lag_ns)
    held[runs.first] = np.maximum(held[runs.first], entered)
    reach = pd.Series(held - runs.depth_ns).groupby(runs.of_place).cummax().to_numpy()
    return np.asarray(reach + runs.depth_ns, np.int64)


def _describe_cycle(recording: Recording, network: Network, stuck: Int64Array) -> str:
    """Return which two ops wait for each other."""
    runs = [node for node in find_cycle(stuck, network.edges) if node < network.nodes.first_meeting]
    rows = recording.order.rows[network.runs.last[[runs[0], runs[-1]]]]
    names = recording.ops["name"].astype(str).to_numpy()
    one, other = (f"op {row} ({names[row]}, rank {recording.ops['rank'].to_numpy()[row]})" for row in rows)
    return (
        f"asked for a replay in which {one} and {other} wait for each other, directly or through others; leave out one"
        " of the added waits between them"
    )


def step_times(recording: Recording, replayed: Replayed, op: Int64Array, step: Int64Array) -> StepTimes:
    """Return how long each step takes on each rank, and on the slowest rank.

    Args:
        recording: The recorded run.
        replayed: When its ops start and end.
        op: Rows of ops that belong to a step, int64 of shape (M,).
        step: Number of that step, at least 0, int64 of shape (M,).
    """
    rank = recording.ops["rank"].to_numpy()[op].astype(np.int64)
    n_steps = int(step.max(initial=-1)) + 1
    pairs, slot = np.unique(rank * n_steps + step, return_inverse=True)
    first, last = np.full(len(pairs), np.iinfo(np.int64).max), np.full(len(pairs), np.iinfo(np.int64).min)
    np.minimum.at(first, slot, replayed.start_ns[op])
    np.maximum.at(last, slot, replayed.end_ns[op])
    of_rank, of_step = pairs // max(n_steps, 1), pairs % max(n_steps, 1)
    job_step, job_slot = np.unique(of_step, return_inverse=True)
    longest = np.zeros(len(job_step), np.int64)
    np.maximum.at(longest, job_slot, last - first)
    return StepTimes(of_rank, of_step, last - first, job_step, longest)
