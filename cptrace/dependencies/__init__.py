"""Happens-before of device work: what each op had to wait for, as far as the trace tells.

An op starts when the last of these is done: the op before it in its stream; the ops before every event that its
stream was told to wait for since then; the host call that launched it; and, one step further back, whatever the host
was blocked on before that call. `Dependencies` holds them as arrays of rows of the
table of ops.

    host    launch A   record e   wait e (stream 2)   launch B
    stream 1     [--- A ---]
    stream 2                [--- B ---]          B waits for A: an edge of kind event, origin recorded

Events: a wait stands for the latest earlier record of its event. The export names that record from 2025.1 on
(eventSyncId); before, it is found by host order. A record stands for all work queued in its stream so far, the waits
queued there included, so edges are followed through chains of waits and records to the ops at their ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from cptrace.dependencies.blocking import Blocking, find_blocking
from cptrace.dependencies.items import RECORD, WAIT, Items, previous_ops, put_in_order
from cptrace.dependencies.pairs import EventPairs, find_pairs
from cptrace.dependencies.unrecorded import count_unrecorded_waits
from cptrace.intervals import BoolArray, Int64Array
from cptrace.launches import Launches, call_times
from cptrace.trace import Trace

__all__ = ["Blocking", "Dependencies", "EventEdges", "find_dependencies"]

# A chain of streams that only pass events on, without an op of their own in between, is short in any program.
_MAX_CHAIN: Final = 64


class EventEdges(NamedTuple):
    """E edges from the last op before an event's record to the first op after a wait for it.

    Attributes:
        producer: Row of the op that must end first, int64 of shape (E,).
        consumer: Row of the op that waits, int64 of shape (E,).
        wait: Row in the table of syncs of the wait next to the consumer, int64 of shape (E,).
        is_recorded: The export names the record; else it was found by host order, bool of shape (E,).
    """

    producer: Int64Array
    consumer: Int64Array
    wait: Int64Array
    is_recorded: BoolArray


@dataclass(frozen=True, slots=True)
class Dependencies:
    """What each of N ops had to wait for.

    Attributes:
        queue: Number of each op's stream, counted over all processes and contexts, int64 of shape (N,).
        previous: Row of the op before it in its stream, int64 of shape (N,); meaningless for the first.
        has_previous: Whether there is one, bool of shape (N,).
        launch_thread: Thread that launched it, int64 of shape (N,); meaningless where the launch is not known.
        launch_start_ns: Start of the launching call, int64 of shape (N,); likewise.
        launch_end_ns: End of the launching call, int64 of shape (N,); likewise.
        is_launch_known: Whether the launching call was recorded, bool of shape (N,).
        events: Edges that events make.
        blocking: Host calls that blocked.
        n_waits: Waits for events that the host asked for.
        n_waits_paired: Those whose record was found.
        n_waits_unrecorded: Those of which the trace has the call alone, not the stream that waits.
        has_unknown_wait: Which ops come right behind a wait whose record was not found, bool of shape (N,).
        has_records: Whether the trace holds the record side of events at all.
    """

    queue: Int64Array
    previous: Int64Array
    has_previous: BoolArray
    launch_thread: Int64Array
    launch_start_ns: Int64Array
    launch_end_ns: Int64Array
    is_launch_known: BoolArray
    events: EventEdges
    blocking: Blocking
    n_waits: int
    n_waits_paired: int
    n_waits_unrecorded: int
    has_unknown_wait: BoolArray
    has_records: bool


def find_dependencies(trace: Trace, launches: Launches) -> Dependencies:
    """Return what each op had to wait for.

    Args:
        trace: Trace as a source read it.
        launches: The launching call of each op.
    """
    pairs = find_pairs(trace)
    items = put_in_order(trace, launches, pairs)
    previous, has_previous = previous_ops(items)
    launch = call_times(trace.api_calls, launches)
    n_unrecorded = count_unrecorded_waits(trace)
    return Dependencies(
        queue=items.op_queue,
        previous=previous,
        has_previous=has_previous,
        launch_thread=launch["thread"],
        launch_start_ns=launch["start_ns"],
        launch_end_ns=launch["end_ns"],
        is_launch_known=launches.is_known,
        events=_event_edges(items, pairs),
        blocking=find_blocking(trace, launches, pairs, items),
        n_waits=len(pairs.waits) + n_unrecorded,
        n_waits_paired=int(pairs.of_waits.is_found.sum()),
        n_waits_unrecorded=n_unrecorded,
        has_unknown_wait=_behind_unknown_waits(items, pairs, len(trace.ops)),
        has_records=not trace.event_records.empty,
    )


def _behind_unknown_waits(items: Items, pairs: EventPairs, n_ops: int) -> BoolArray:
    """Return which ops come right behind a wait whose record was not found, bool of shape (N,)."""
    consumer, has_consumer = items.first_op_after(items.position[WAIT])
    found = np.zeros(n_ops, bool)
    found[consumer[has_consumer & ~pairs.of_waits.is_found]] = True
    return found


def _event_edges(items: Items, pairs: EventPairs) -> EventEdges:
    """Return the edges from op to op that waits and records make, chains of them followed to their ends."""
    consumer, has_consumer = items.first_op_after(items.position[WAIT])
    origin = np.flatnonzero(pairs.of_waits.is_found & has_consumer)
    record = pairs.of_waits.record[origin]
    producers, origins = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for _ in range(_MAX_CHAIN):
        if not len(record):
            break
        at_record = items.position[RECORD][record]
        op, has_op = items.last_op_before(at_record)
        producers.append(op[has_op])
        origins.append(origin[has_op])
        origin, record = _waits_behind(items, pairs, at_record, origin)
    producer, wait = np.concatenate(producers), np.concatenate(origins)
    return EventEdges(producer, consumer[wait], pairs.waits[wait], pairs.of_waits.is_named[wait])


def _waits_behind(
    items: Items, pairs: EventPairs, position: Int64Array, origin: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Return the records of the waits that lie between a record and the last op before it in its stream.

    Each comes with the wait that its chain began with.
    """
    is_wait = items.kind == WAIT
    n_waits_before = np.cumsum(is_wait) - is_wait
    op, has_op = items.last_op_before(position)
    queue_start = np.searchsorted(items.queue, items.queue[position], side="left")
    low = np.where(has_op, items.position[0][op], queue_start) if len(items.ops) else queue_start
    first = n_waits_before[low]
    count = n_waits_before[position] - first
    chain = np.repeat(np.arange(len(position)), count)
    step = np.arange(len(chain)) - np.repeat(np.cumsum(count) - count - first, count)
    wait = items.row[is_wait][step]
    is_found = pairs.of_waits.is_found[wait]
    return origin[chain[is_found]], pairs.of_waits.record[wait[is_found]]
