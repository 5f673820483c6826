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
queued there included, so edges are followed through chains of waits and records to the ops at their ends. Of several
ops of one stream that the same wait stands for, the last stands for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from cptrace.dependencies.blocking import Blocking, find_blocking
from cptrace.dependencies.chains import follow_chains
from cptrace.dependencies.items import RECORD, WAIT, Items, previous_ops, put_in_order
from cptrace.dependencies.pairs import EventPairs, find_pairs
from cptrace.dependencies.unrecorded import count_unrecorded_waits
from cptrace.intervals import BoolArray, Int64Array
from cptrace.launches import Launches, call_times
from cptrace.trace import Trace

__all__ = ["Blocking", "Dependencies", "EventEdges", "find_dependencies"]


class EventEdges(NamedTuple):
    """E edges from the last op before an event's record to the first op after a wait for it, each pair of ops once.

    Attributes:
        producer: Row of the op that must end first, int64 of shape (E,).
        consumer: Row of the op that waits, int64 of shape (E,).
        wait: Row in the table of syncs of the wait next to the consumer, one of several, int64 of shape (E,).
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
        events=_event_edges(items, pairs, trace.syncs["process"].to_numpy()[pairs.waits]),
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


def _event_edges(items: Items, pairs: EventPairs, process: Int64Array) -> EventEdges:
    """Return the edges from op to op that waits and records make, each pair of ops once.

    Args:
        items: Everything in stream order.
        pairs: Waits and records.
        process: Process of each of W waits, int64 of shape (W,).
    """
    consumer, has_consumer = items.first_op_after(items.position[WAIT])
    direct, wait = _ops_before_records(items, pairs)
    chained, first_wait = follow_chains(items, pairs, process)
    producer, wait = np.concatenate((direct, chained)), np.concatenate((wait, first_wait))
    # Many waits may stand for the same op in front of the same op; what follows costs memory and time by edges.
    is_kept = has_consumer[wait]
    pair = consumer[wait] * len(items.ops) + producer
    is_kept[is_kept] = ~pd.Series(pair[is_kept]).duplicated().to_numpy()
    producer, wait = producer[is_kept], wait[is_kept]
    return EventEdges(producer, consumer[wait], pairs.waits[wait], pairs.of_waits.is_named[wait])


def _ops_before_records(items: Items, pairs: EventPairs) -> tuple[Int64Array, Int64Array]:
    """Return the last op before the record that each wait stands for, and the place of the wait among waits."""
    wait = np.flatnonzero(pairs.of_waits.is_found)
    op, has_op = items.last_op_before(items.position[RECORD][pairs.of_waits.record[wait]])
    return op[has_op], wait[has_op]
