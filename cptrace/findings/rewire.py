"""Changes for replays: accidental order taken out, needed order kept.

Where an op no longer waits for the op before it in its stream, what it really needs must still hold it: the nearest
earlier op of the stream that it needs, its data flow, and a second buffer to receive into.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import pandas as pd

from cptrace import labels
from cptrace.findings.case import Case
from cptrace.intervals import BoolArray, Int64Array
from cptrace.recognition.places import by_hop

DOUBLE_BUFFER: Final = 2
"""With two buffers a transfer may run while the attention one hop before its reader reads."""

_MAX_STEPS_BACK: Final = 256
_COMPUTE: Final = -2  # below the numbers of channels, of which -1 is none
_UNPLACED: Final = -3  # below all, so that what is above compute sends


class Edges(NamedTuple):
    """Edges between rows of ops.

    Attributes:
        producer: Row of the op that must end first, int64 of shape (A,).
        consumer: Row of the op that waits, int64 of shape (A,).
    """

    producer: Int64Array
    consumer: Int64Array


def join(*edges: Edges) -> Edges:
    """Return all edges of several sets."""
    return Edges(*(np.concatenate(parts) for parts in zip(*edges, strict=True)))


def needed_edges(case: Case) -> Edges:
    """Return the edges of the data flow that the recorded times agree with."""
    assert case.flow is not None
    consumer, producer = case.flow.edges()
    rows = case.places.rows
    return _in_time(case, Edges(rows[producer], rows[consumer]))


def buffer_edges(case: Case) -> Edges:
    """Return the edges that two receive buffers make: a transfer after the attention two before its reader."""
    assert case.flow is not None
    places = case.places
    attention = by_hop(places, places.is_what(labels.ATTENTION))
    wanted = pd.DataFrame(
        {
            "block": places.block,
            "hop": case.flow.reader_hop() - DOUBLE_BUFFER,
            "transfer": np.arange(len(places)),
        }
    )
    joined = wanted.merge(attention, on=["block", "hop"])
    rows = places.rows
    return _in_time(case, Edges(rows[joined["position"].to_numpy()], rows[joined["transfer"].to_numpy()]))


def stream_edges(case: Case, freed: BoolArray) -> Edges:
    """Return the edges that keep the ops of streams in which some are freed behind those that they stay behind.

    That is what they need, and what is of the same sort: compute stays in order, and so do transfers of one channel.
    What follows a freed op was behind all that the freed op was behind, so it needs such edges too.

    Args:
        case: Case.
        freed: Ops that no longer wait for the op before them, bool of shape (N,).
    """
    consumer = np.flatnonzero(freed)
    needed = behind_needed(case, Edges(case.stream_before[consumer], consumer))
    return join(needed, _same_sort_edges(case, freed))


def _same_sort_edges(case: Case, freed: BoolArray) -> Edges:
    """Return edges across freed ops, from the last op of the same sort in the stream to each op.

    An op without a place, of which nobody knows what it needs, stays behind all sorts, and all stay behind it.
    """
    queue = case.dependencies.queue
    rows = np.flatnonzero(np.isin(queue, np.unique(queue[freed])))
    rows = rows[np.argsort(queue[rows], kind="stable")]
    sort, n_freed = lanes(case)[rows], np.cumsum(freed[rows])
    producers, consumers = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for number in np.unique(sort).tolist():
        of_sort = np.where(sort == number, np.arange(len(rows)), -1)
        last = np.append(-1, np.maximum.accumulate(of_sort)[:-1])[: len(rows)]
        follows = (last >= 0) & (queue[rows[last]] == queue[rows]) & (n_freed[last] < n_freed)
        follows &= (sort == number) | (sort == _UNPLACED) | (number == _UNPLACED)
        producers.append(rows[last[follows]])
        consumers.append(rows[follows])
    return Edges(np.concatenate(producers), np.concatenate(consumers))


def lanes(case: Case) -> Int64Array:
    """Return a number for what each op is in order with, int64 of shape (N,): compute, or one channel's transfers.

    Copies that pack or unpack what a channel carries, in a stream of transfers, belong to that channel. All without a
    place share one negative number, and so does all compute.

    Args:
        case: Case.
    """
    return case.remembered("lanes", _find_lanes)


def _find_lanes(case: Case) -> Int64Array:
    assert case.flow is not None
    lane = np.full(len(case.ops), _UNPLACED, np.int64)
    rows, queue = case.places.rows, case.dependencies.queue
    is_comm = case.is_comm[rows]
    served = case.flow.served_channel()
    computing = np.unique(queue[rows[case.places.is_what(labels.ATTENTION, labels.MERGE)]])
    sending = np.setdiff1d(queue[rows[is_comm]], computing)
    serves = (served >= 0) & np.isin(queue[rows], sending)
    lane[rows] = np.select((is_comm, serves), (case.flow.channel(), served), _COMPUTE)
    return lane


def is_sending(case: Case) -> BoolArray:
    """Return which ops with a place communicate, or are copies in the lane of such; bool of shape (N,).

    Args:
        case: Case.
    """
    return np.asarray(lanes(case) > _COMPUTE)


def transfers_served(case: Case, rows: Int64Array) -> Int64Array:
    """Return the transfer that each op goes with: the next one of its lane in its stream, itself where there is none.

    What a copy puts aside is sent by the transfer that follows it; a transfer goes with itself.

    Args:
        case: Case.
        rows: Rows of transfers, and of copies in their lanes, int64 of shape (M,).
    """
    n_ops, queue = len(case.ops), case.dependencies.queue
    lane = lanes(case) - _UNPLACED
    # One sorted key for stream, lane and row: rows are ordered by start, as a stream's ops are.
    key = (queue * (int(lane.max(initial=0)) + 1) + lane) * n_ops + np.arange(n_ops)
    transfers = np.flatnonzero(case.is_comm & (case.position >= 0))
    transfers = transfers[np.argsort(key[transfers])]
    place = np.searchsorted(key[transfers], key[rows])
    following = np.append(transfers, -1)[place]
    is_same = (following >= 0) & (key[following] // n_ops == key[rows] // n_ops)
    return np.where(is_same, following, rows)


def behind_needed(case: Case, edges: Edges) -> Edges:
    """Return edges in which each producer is replaced by the nearest op of its stream that the consumer stays behind.

    Edges of ops without a place, of which nobody knows what they need, stay as they are.

    Args:
        case: Case.
        edges: Edges; a producer of -1 stands for none.
    """
    producer, consumer = edges.producer.copy(), edges.consumer
    for _ in range(_MAX_STEPS_BACK):
        judged = np.flatnonzero(
            (producer >= 0) & (case.position[producer] >= 0) & (case.position[consumer] >= 0)
        )
        is_accidental = is_free_of(case, consumer[judged], producer[judged])
        behind = judged[is_accidental]
        if not len(behind):
            break
        producer[behind] = case.stream_before[producer[behind]]
    is_there = producer >= 0
    return Edges(producer[is_there], consumer[is_there])


def is_free_of(case: Case, consumer: Int64Array, producer: Int64Array) -> BoolArray:
    """Return whether ops need not stay behind others of their stream: neither by data flow nor as the same sort.

    Args:
        case: Case.
        consumer: Rows of ops with a place, int64 of shape (P,).
        producer: Rows of the ops before them, int64 of shape (P,).
    """
    one, other = lanes(case)[consumer], lanes(case)[producer]
    is_other_sort = (one == _COMPUTE) != (other == _COMPUTE)
    is_free = (is_other_sort | are_other_channels(one, other)) & ~case.is_needed(consumer, producer)
    return np.asarray(is_free, bool)


def are_other_channels(one: Int64Array, other: Int64Array) -> BoolArray:
    """Return whether pairs of lanes are those of two channels, bool of shape (P,).

    Args:
        one: Lanes, int64 of shape (P,).
        other: Lanes, int64 of shape (P,).
    """
    return np.asarray((one >= 0) & (other >= 0) & (one != other), bool)


def _in_time(case: Case, edges: Edges) -> Edges:
    """Return the edges whose producer ended before its consumer started: others were not kept by the run either."""
    is_kept = case.end_ns[edges.producer] <= case.start_ns[edges.consumer]
    return Edges(edges.producer[is_kept], edges.consumer[is_kept])
