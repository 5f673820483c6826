"""Chains of waits and records with no op in between: what a wait stands for besides the op before its record.

A record stands for all that is queued in its stream, so also for every wait behind the last op there, for all that
those waits stand for, and so on. Streams that wait for each other by turns make twice as many such chains with every
turn, though they lead to few ops:

    stream 7    [k0]  record a          wait b  record c          wait d
    stream 8    [k1]            wait a  record b          wait c  record d     [k2]

So chains are not walked one by one. Within a stream an op stands for all before it: for each wait and each stream the
last op that any chain leads to is kept, a number that only grows along the waits behind one op. A running maximum over
all waits at once makes every chain one record longer.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import pandas as pd

from cptrace.dependencies.items import OP, RECORD, WAIT, Items
from cptrace.dependencies.pairs import EventPairs
from cptrace.groups import group_rows
from cptrace.intervals import BoolArray, Int64Array

# Longer ones come back to a stream behind a later op there, which has already waited for what they lead to; only
# chains through more streams than this without an op on the way would be missed.
_MAX_CHAIN: Final = 64


class _Links(NamedTuple):
    """L waits whose record was found, in stream order.

    Attributes:
        wait: Place in the list of waits, int64 of shape (L,).
        segment: Number of the stretch of its stream between two ops that it is in, ascending, int64 of shape (L,).
        own: Place in stream order of the last op before its record, -1 where there is none, int64 of shape (L,).
        behind: Number of the last link between that op and the record, -1 where there is none, int64 of shape (L,).
    """

    wait: Int64Array
    segment: Int64Array
    own: Int64Array
    behind: Int64Array

    def only(self, is_kept: BoolArray) -> _Links:
        """Return some links, among them all that those have behind their records."""
        number = np.cumsum(is_kept) - 1
        behind = np.where(self.behind >= 0, number[self.behind], -1)
        return _Links(*(column[is_kept] for column in (self.wait, self.segment, self.own, behind)))


def follow_chains(items: Items, pairs: EventPairs, process: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the ops that waits stand for through other waits, at most one per wait and stream, and these waits.

    An op is left out where the wait stands for the same or a later op of that stream without a chain.

    Args:
        items: Everything in stream order.
        pairs: Waits and records.
        process: Process of each of W waits, int64 of shape (W,).

    Returns:
        Rows of ops, int64 of shape (E,), and for each the place of the wait in the list of waits, int64 of shape (E,).
    """
    links = _find_links(items, pairs)
    places, waits = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    # Chains stay within a process, so the streams of one need not be looked for in the links of all.
    for rows in group_rows(pd.factorize(process[links.wait])[0]):
        is_mine = np.zeros(len(links.wait), bool)
        is_mine[rows] = True
        mine = links.only(is_mine)
        queue = np.where(mine.own >= 0, items.queue[mine.own], -1)
        for source in np.unique(queue[mine.own >= 0]).tolist():
            last, wait = _ends_of_chains(mine, np.where(queue == source, mine.own, -1))
            places.append(last)
            waits.append(wait)
    return items.row[np.concatenate(places)], np.concatenate(waits)


def _find_links(items: Items, pairs: EventPairs) -> _Links:
    """Return the waits that chains begin with or lead through: none in streams where an op is before each record."""
    is_link = items.kind == WAIT
    is_link[is_link] = pairs.of_waits.is_found[items.row[is_link]]
    place = np.flatnonzero(is_link)
    wait = items.row[place]
    at_record = items.position[RECORD][pairs.of_waits.record[wait]]
    # Streams are numbered in ascending order, too: the sum differs wherever an op or the end of a stream is between.
    segment = items.n_ops_before + items.queue
    behind = np.cumsum(is_link)[at_record] - 1
    has_behind = behind >= 0
    has_behind[has_behind] = (segment[place[behind]] == segment[at_record])[has_behind]
    op, has_op = items.last_op_before(at_record)
    own = np.where(has_op, items.position[OP][op], -1) if len(items.ops) else np.full(len(place), -1)
    links = _Links(wait, segment[place], own, np.where(has_behind, behind, -1))
    return links.only(has_behind | np.isin(links.segment, links.segment[behind[has_behind]]))


def _ends_of_chains(links: _Links, told: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the ops of one stream that chains lead to, and the waits that they begin with.

    Args:
        links: Links of one process.
        told: Place in stream order of the op before each link's record where it is in that stream, else -1, int64 of
            shape (L,).

    Returns:
        Places in stream order, int64 of shape (E,), and places in the list of waits, int64 of shape (E,).
    """
    last = _last_of_chains(links, told)
    number = np.flatnonzero(last > told)
    # Waits one after another that lead from the same op to the same op would add up over all streams.
    is_again = (np.diff(last[number], prepend=-1) == 0) & (np.diff(links.segment[number], prepend=-1) == 0)
    number = number[~is_again]
    return last[number], links.wait[number]


def _last_of_chains(links: _Links, told: Int64Array) -> Int64Array:
    """Return for each link the place of the last op of one stream that chains of two or more records lead to, or -1."""
    offset = links.segment * (int(told.max(initial=0)) + 2)
    last, through = told, np.full(len(told), -1)
    for _ in range(_MAX_CHAIN - 1):
        so_far = np.maximum.accumulate(last + offset) - offset
        through = np.where(links.behind >= 0, so_far[links.behind], -1)
        longer = np.maximum(told, through)
        if np.array_equal(longer, last):
            break
        last = longer
    return through
