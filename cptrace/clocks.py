"""How far the clocks of several recordings of one job differ, from collectives that they took part in together.

    clock 0    [ all-reduce     ]
    clock 1                  [ all-reduce ]      the parts of one collective end together: clock 1 is ahead

A profiler states when it began by the clock of its host, which is good to milliseconds, and a transfer takes less than
that. The ends of the same collective on both tell it to microseconds. Only offsets are found, one for each clock:
a drift of one clock against another would change durations, and shows as uncertainty.

Hops of a ring of more than three ranks do not serve: a hop ends when its own neighbours have come, and a rank that is
always late would look like a clock that is.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from cptrace import labels
from cptrace.intervals import BoolArray, Int64Array
from cptrace.matching import BY_LABEL, Matched

_END_TOGETHER: Final = (labels.ALL_GATHER, labels.REDUCE_SCATTER, labels.ALL_REDUCE, labels.ALL_TO_ALL)
_ALL_ARE_NEIGHBOURS: Final = 3


class Offsets(NamedTuple):
    """How to put F clocks on the first one.

    Attributes:
        shift_ns: What to add to the times of each clock, int64 of shape (F,); 0 for the first.
        error_ns: How far ends of one collective still differ then, in the median: the uncertainty of the shifts.
    """

    shift_ns: Int64Array
    error_ns: int


def ends_together(matched: Matched, collective: Any) -> BoolArray:
    """Return which of C communication ops end when the other parts of their transfer do, bool of shape (C,).

    Args:
        matched: Which ops meet.
        collective: Kind of collective of each op, array of texts of shape (C,).
    """
    are_few = np.bincount(matched.transfer) <= _ALL_ARE_NEIGHBOURS
    are_few[matched.transfer[matched.op[matched.partner < 0]]] = False  # there are more, elsewhere
    are_neighbours = are_few[matched.transfer]
    if matched.basis == BY_LABEL:
        return np.asarray(~matched.is_ring | are_neighbours, bool)
    return np.isin(collective, _END_TOGETHER) | are_neighbours


def find_offsets(end_ns: Int64Array, clock: Int64Array, matched: Matched, which: BoolArray) -> Offsets | None:
    """Return how to put all clocks on the first one; None where some clock has nothing in common with the others.

    Args:
        end_ns: End of each of C communication ops on its own clock, int64 of shape (C,).
        clock: Number of that clock, from 0 on, int64 of shape (C,).
        matched: Which ops meet.
        which: Ops that end when the other parts of their transfer do, bool of shape (C,).
    """
    is_used = (matched.partner >= 0) & which[matched.op]
    is_used[is_used] = which[matched.partner[is_used]]
    op, partner = matched.op[is_used], matched.partner[is_used]
    is_across = clock[op] < clock[partner]  # each pair is there in both directions
    op, partner = op[is_across], partner[is_across]
    later_ns, low, high = end_ns[partner] - end_ns[op], clock[op], clock[partner]
    n_clocks = int(clock.max()) + 1
    medians = _medians(later_ns, low * n_clocks + high)
    shift_ns = _solve(medians, n_clocks)
    if shift_ns is None:
        return None
    left_ns = np.abs(later_ns + shift_ns[high] - shift_ns[low])
    return Offsets(shift_ns, int(np.median(left_ns)))


class _Medians(NamedTuple):
    """By how much a second clock is later than a first: number of the pair, median in ns, and of how many ops."""

    pair: Int64Array
    later_ns: Int64Array
    n_ops: Int64Array


def _medians(later_ns: Int64Array, pair: Int64Array) -> _Medians:
    order = np.lexsort((later_ns, pair))
    pairs, first, count = np.unique(pair[order], return_index=True, return_counts=True)
    ordered = later_ns[order]
    low, high = ordered[first + (count - 1) // 2], ordered[first + count // 2]
    return _Medians(pairs, low + (high - low) // 2, count)


def _solve(medians: _Medians, n_clocks: int) -> Int64Array | None:
    """Return the shifts that agree best with all pairs of clocks, those with more ops in common the more.

    Least squares over the graph of clocks; None where it falls into parts.
    """
    low, high = medians.pair // n_clocks, medians.pair % n_clocks
    weight = np.sqrt(medians.n_ops)
    equations = np.zeros((len(low), n_clocks))
    equations[np.arange(len(low)), low] = weight
    equations[np.arange(len(low)), high] = -weight
    # The first clock is the one that the others are put on.
    found, _, n_known, _ = np.linalg.lstsq(equations[:, 1:], weight * medians.later_ns, rcond=None)
    return np.concatenate(([0], np.rint(found).astype(np.int64))) if n_known == n_clocks - 1 else None
