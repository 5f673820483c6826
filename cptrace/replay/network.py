"""The network that a replay solves: one node per run, per meeting of communication ops and per blocking call.

    node          its time                       waits for
    run           start of its last op           ends of ops before its first one; calls that its launches follow
    meeting       last arrival                   the runs whose last ops take part
    call          end of the host call           the call before it on its thread; ends of the ops it waited for

The end of an op lies its duration behind its run or, where it meets others, behind the meeting.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cptrace.intervals import BoolArray, Int64Array
from cptrace.replay.changes import Changes, keeps
from cptrace.replay.host import launch_offsets, loose_waits
from cptrace.replay.recording import Recording
from cptrace.replay.runs import Lags, Launched, Runs, find_lags, find_launched, find_runs
from cptrace.replay.solve import NEVER, Edges, join


class Nodes(NamedTuple):
    """Where the ops, meetings and calls of a recording are in the network.

    Attributes:
        run: Run of each op, int64 of shape (N,).
        end: Node that the end of each op lies behind, int64 of shape (N,).
        duration_ns: By how much, int64 of shape (N,).
        first_meeting: Node of meeting 0; runs come before.
        first_call: Node of blocking call 0; meetings come before.
    """

    run: Int64Array
    end: Int64Array
    duration_ns: Int64Array
    first_meeting: int
    first_call: int


class Network(NamedTuple):
    """What a replay solves, and what it needs to go from nodes back to ops.

    Attributes:
        runs: Ops of each run.
        launched: When launches let ops start.
        nodes: Where everything is in the network.
        not_before_ns: Earliest time of each node in ns, int64 of shape (V,).
        edges: Who waits for whom.
        entries: Edges to the first op of a run: the target is the run, the lag that to the start of its first op.
    """

    runs: Runs
    launched: Launched
    nodes: Nodes
    not_before_ns: Int64Array
    edges: Edges
    entries: Edges


def build_network(recording: Recording, changes: Changes) -> Network:
    """Return the network of a recorded run with some changes.

    Args:
        recording: The recorded run.
        changes: What is different.
    """
    n_ops = len(recording.ops)
    residual = np.where(keeps(changes.drop_residual, n_ops), np.maximum(recording.residual_ns, 0), 0)
    duration = recording.duration_ns if changes.duration_ns is None else changes.duration_ns
    lags = find_lags(recording, changes, residual)
    follows = recording.dependencies.has_previous & keeps(changes.drop_previous, n_ops)
    waits_for_op = follows.copy()
    waits_for_op[lags.consumer] = True
    launched = find_launched(recording, changes, residual, waits_for_op)
    runs = find_runs(recording, follows, residual, duration, _cuts(recording, lags))
    nodes = _number_nodes(recording, runs, duration)
    entries = _entries(recording, runs, nodes, lags)
    depth = runs.depth_ns[runs.last] - runs.depth_ns[runs.first]
    run_ns, held = _held(recording, runs, launched, nodes)
    call_ns, calls = _calls(recording, changes, nodes)
    meeting_ns = np.full(recording.meetings.n_meetings, NEVER)
    edges = join(
        entries._replace(lag_ns=entries.lag_ns + depth[entries.target]),
        held,
        _members(recording, nodes),
        calls,
    )
    return Network(runs, launched, nodes, np.concatenate((run_ns, meeting_ns, call_ns)), edges, entries)


def _cuts(recording: Recording, lags: Lags) -> BoolArray:
    """Return the ops that must begin a run: those that wait for an op of another stream, and those after an op that
    another one, a meeting or a call waits for."""
    n_ops = len(recording.ops)
    ends = recording.meetings.is_met.copy()
    ends[recording.meetings.member] = True
    ends[lags.producer] = True
    ends[recording.host.producer] = True
    cuts = np.zeros(n_ops, bool)
    rows = recording.order.rows
    cuts[rows[1:]] = ends[rows[:-1]]
    cuts[lags.consumer] = True
    return cuts


def _number_nodes(recording: Recording, runs: Runs, duration_ns: Int64Array) -> Nodes:
    run = runs.of_place[recording.order.place]
    first_meeting = len(runs.first)
    meetings = recording.meetings
    end = np.where(meetings.is_met, first_meeting + meetings.meeting, run)
    return Nodes(run, end, duration_ns, first_meeting, first_meeting + meetings.n_meetings)


def _entries(recording: Recording, runs: Runs, nodes: Nodes, lags: Lags) -> Edges:
    """Return what the first op of each run waits for: the op before it in its stream, and ops of other streams."""
    entered = np.flatnonzero(runs.follows[runs.first])
    place = runs.first[entered]
    previous = recording.order.rows[place - 1]
    behind_previous = nodes.duration_ns[previous] + runs.previous_lag_ns[place]
    behind_others = nodes.duration_ns[lags.producer] + lags.lag_ns
    return join(
        Edges(nodes.end[previous], entered, behind_previous),
        Edges(nodes.end[lags.producer], nodes.run[lags.consumer], behind_others),
    )


def _held(recording: Recording, runs: Runs, launched: Launched, nodes: Nodes) -> tuple[Int64Array, Edges]:
    """Return from when on launches that stay where they are let each run be, and its edges from calls."""
    not_before = np.full(len(runs.first), NEVER)
    rows = recording.order.rows
    place = np.flatnonzero(launched.is_held[rows])
    if not len(place):
        return not_before, Edges(place, place, place)
    run, row = runs.of_place[place], rows[place]
    call = np.where(launched.has_anchor[row], launched.anchor[row], -1)
    first = np.flatnonzero(np.append(True, (np.diff(run) != 0) | (np.diff(call) != 0)))
    # Of all launches of a run that follow one call, only that counts which holds its last op back most.
    held = np.maximum.reduceat(launched.offset_ns[row] - runs.depth_ns[place], first)
    run, call = run[first], call[first]
    held += runs.depth_ns[runs.last[run]]
    is_fixed = call < 0
    np.maximum.at(not_before, run[is_fixed], held[is_fixed])
    moves = ~is_fixed
    return not_before, Edges(nodes.first_call + call[moves], run[moves], held[moves])


def _members(recording: Recording, nodes: Nodes) -> Edges:
    """Return the edges from the starts of ops to the meetings that they take part in."""
    meetings = recording.meetings
    no_lag = np.zeros(len(meetings.member), np.int64)
    return Edges(nodes.run[meetings.member], nodes.first_meeting + meetings.member_of, no_lag)


def _calls(recording: Recording, changes: Changes, nodes: Nodes) -> tuple[Int64Array, Edges]:
    """Return the earliest end of blocking calls that come first on their thread, and the edges of all."""
    host = recording.host
    _, distance = launch_offsets(host, recording.dependencies, changes.host_gap_ns)
    later = np.flatnonzero(host.has_before)
    call, producer, lag = _waits_of_calls(recording, changes)
    waits = keeps(changes.drop_blocking, len(distance))[call]
    call, producer, lag = call[waits], producer[waits], lag[waits]
    edges = join(
        Edges(nodes.first_call + host.before[later], nodes.first_call + later, distance[later]),
        Edges(nodes.end[producer], nodes.first_call + call, nodes.duration_ns[producer] + lag),
    )
    return np.where(host.has_before, NEVER, distance), edges


def _waits_of_calls(recording: Recording, changes: Changes) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return blocking calls, the ops that each waits for, and the lags of their ends."""
    host = recording.host
    recorded = (host.call, host.producer, host.lag_ns)
    if changes.drop_previous is None:
        return recorded
    rows, is_first = recording.order.rows, recording.order.is_first
    is_behind_loose = changes.drop_previous[rows] & ~is_first
    loose = rows[np.flatnonzero(is_behind_loose) - 1]
    added = loose_waits(host, recording.dependencies, loose)
    call, producer, lag = (np.concatenate(pair) for pair in zip(recorded, added, strict=True))
    return call, producer, lag
