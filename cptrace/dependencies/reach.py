"""Whether one op is sure to end before another starts: the happens-before relation, not what happened to be the case.

An order exists where a path of recorded edges leads from one op to the other: stream order, an event that was recorded
and waited for, or a host that was blocked before it launched. Two ops without such a path ran in the order of the
trace by luck.

For each op and each stream the last op of that stream that is known to come before is kept (a vector clock). Along a
stream these only grow, so one pass over all edges and a running maximum move the knowledge on by one edge; a few
passes find every path that crosses between streams that often.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import pandas as pd

from cptrace.dependencies import Dependencies
from cptrace.intervals import BoolArray, Int64Array

# Between a transfer and what reads its data a program passes through few streams.
_MAX_CROSSINGS: Final = 8


class _Edges(NamedTuple):
    producer: Int64Array
    consumer: Int64Array


def is_ordered(
    dependencies: Dependencies,
    start_ns: Int64Array,
    end_ns: Int64Array,
    before: Int64Array,
    after: Int64Array,
) -> BoolArray:
    """Return for each pair of ops whether a path of edges makes the first one end before the second starts.

    Only paths within a process count, of up to eight crossings from one stream to another.

    Args:
        dependencies: What each of N ops had to wait for.
        start_ns: Start of each op, int64 of shape (N,).
        end_ns: End of each op, int64 of shape (N,).
        before: Rows of the first op of each pair, int64 of shape (P,).
        after: Rows of the second op of each pair, int64 of shape (P,).
    """
    order = np.lexsort((end_ns, start_ns, dependencies.queue))
    queue = dependencies.queue
    in_order = queue[order]
    position = np.empty(len(order), np.int64)
    first_of_queue = np.searchsorted(in_order, in_order, side="left")
    position[order] = np.arange(len(order)) - first_of_queue
    edges = _all_edges(dependencies, order)
    is_reached: BoolArray = (queue[before] == queue[after]) & (position[before] < position[after])
    for source in np.unique(queue[before]):
        pairs = np.flatnonzero((queue[before] == source) & ~is_reached)
        if len(pairs):
            known = _known_of_queue(int(source), queue, position, order, edges)
            is_reached[pairs] = known[after[pairs]] >= position[before[pairs]]
    return is_reached


def _known_of_queue(
    source: int, queue: Int64Array, position: Int64Array, order: Int64Array, edges: _Edges
) -> Int64Array:
    """Return for each op the last position in one queue that is known to come before it, -1 for none."""
    known = np.full(len(queue), -1, np.int64)
    own = queue == source
    known[own] = position[own] - 1
    offset = queue[order] * (len(queue) + 1)
    told = np.where(queue[edges.producer] == source, position[edges.producer], -1)
    for _ in range(_MAX_CROSSINGS):
        before = known.copy()
        np.maximum.at(known, edges.consumer, np.maximum(told, known[edges.producer]))
        known[order] = np.maximum.accumulate(known[order] + offset) - offset
        if np.array_equal(before, known):
            break
    return known


def _all_edges(dependencies: Dependencies, order: Int64Array) -> _Edges:
    """Return the edges that events make, and those through a host that was blocked."""
    through_host = _host_edges(dependencies)
    producer = np.concatenate((dependencies.events.producer, through_host.producer))
    consumer = np.concatenate((dependencies.events.consumer, through_host.consumer))
    return _Edges(producer, consumer)


def _host_edges(dependencies: Dependencies) -> _Edges:
    """Return edges from what each blocking call waited for to the next op that its thread launched in each stream."""
    blocking = dependencies.blocking
    producers, consumers = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    launched = np.flatnonzero(dependencies.is_launch_known)
    for thread in pd.unique(blocking.thread).tolist():
        calls = np.flatnonzero((blocking.thread == thread) & blocking.has_producer)
        mine = launched[dependencies.launch_thread[launched] == thread]
        for queue in np.unique(dependencies.queue[mine]):
            ops = mine[dependencies.queue[mine] == queue]
            ops = ops[np.argsort(dependencies.launch_start_ns[ops], kind="stable")]
            place = np.searchsorted(dependencies.launch_start_ns[ops], blocking.end_ns[calls], side="left")
            is_there = place < len(ops)
            producers.append(blocking.producer[calls[is_there]])
            consumers.append(ops[place[is_there]])
    return _Edges(np.concatenate(producers), np.concatenate(consumers))
