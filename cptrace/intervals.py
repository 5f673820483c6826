"""Exact algebra on sets of half-open intervals [start, end) of int64 nanoseconds.

Two kinds of value pass through here, both as `Intervals`:

- *raw*: any intervals, in any order, overlapping or not, possibly empty ones;
- *united*: sorted, none empty, none touching another: the one canonical form of a set of instants.

`union` makes united sets from raw ones; every function after it asks for united sets and returns united sets.
Nothing is measured before it is united, so nothing is counted twice:

    raw       [----)   [--)  [)         union       [-----)  [--)
                [--)                    total_ns    5 + 2

All functions are array kernels: no pandas, no loops over intervals, integers throughout.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_MIN: Final = np.iinfo(np.int64).min
_MAX: Final = np.iinfo(np.int64).max


class Intervals(NamedTuple):
    """N half-open intervals as two int64 arrays of shape (N,), in nanoseconds."""

    start_ns: Int64Array
    end_ns: Int64Array

    @property
    def n_intervals(self) -> int:
        """Number of intervals."""
        return len(self.start_ns)


EMPTY: Final = Intervals(np.empty(0, np.int64), np.empty(0, np.int64))


def intervals(start_ns: npt.ArrayLike, end_ns: npt.ArrayLike) -> Intervals:
    """Return raw intervals from two arrays of equal length.

    Args:
        start_ns: Inclusive starts, integers of shape (N,).
        end_ns: Exclusive ends, integers of shape (N,), none before its start.

    Raises:
        ValueError: The arrays are not one-dimensional integers of one length, or an interval ends before it starts.
    """
    start, end = np.asarray(start_ns), np.asarray(end_ns)
    if start.ndim != 1 or start.shape != end.shape:
        raise ValueError(
            f"starts and ends must be two arrays of one length, got shapes {start.shape} and {end.shape}"
        )
    if start.size and not (np.issubdtype(start.dtype, np.integer) and np.issubdtype(end.dtype, np.integer)):
        raise ValueError(f"times must be integer nanoseconds, got {start.dtype} and {end.dtype}")
    if np.any(end < start):
        raise ValueError(f"{int(np.sum(end < start))} intervals end before they start")
    return Intervals(start.astype(np.int64, copy=False), end.astype(np.int64, copy=False))


def union(raw: Intervals) -> Intervals:
    """Return the united set of all instants that any of the raw intervals covers.

    Args:
        raw: Raw intervals.
    """
    keep = raw.end_ns > raw.start_ns
    start, end = (raw.start_ns, raw.end_ns) if keep.all() else (raw.start_ns[keep], raw.end_ns[keep])
    if not len(start):
        return EMPTY
    if np.any(start[1:] < start[:-1]):
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    is_first = np.empty(len(start), bool)
    is_first[0] = True
    np.greater(start[1:], reach[:-1], out=is_first[1:])
    first = np.flatnonzero(is_first)
    last = np.append(first[1:], len(start)) - 1
    return Intervals(start[first], reach[last])


def union_of(*sets: Intervals) -> Intervals:
    """Return the united set of all instants that any of the sets covers.

    Args:
        *sets: Raw or united sets.
    """
    sets = tuple(s for s in sets if len(s.start_ns))
    if len(sets) < 2:
        return union(sets[0]) if sets else EMPTY
    return union(
        Intervals(np.concatenate([s.start_ns for s in sets]), np.concatenate([s.end_ns for s in sets]))
    )


def merge(*united: Intervals) -> Intervals:
    """Return the united set of all instants that any of the united sets covers; one set alone costs nothing.

    Args:
        *united: United sets.
    """
    return united[0] if len(united) == 1 else union_of(*united)


def is_united(candidate: Intervals) -> bool:
    """Return whether the intervals are sorted, none empty and none touching another.

    Args:
        candidate: Any intervals.
    """
    start, end = candidate
    return bool(np.all(end > start) and np.all(start[1:] > end[:-1]))


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Return the instants that both sets cover.

    Args:
        a: United set.
        b: United set.
    """
    if len(a.start_ns) > len(b.start_ns):
        a, b = b, a  # the fewer to search for, the better
    if not len(a.start_ns):
        return EMPTY
    low = np.searchsorted(b.end_ns, a.start_ns, side="right")
    high = np.searchsorted(b.start_ns, a.end_ns, side="left")
    n_partners = np.maximum(high - low, 0)
    in_a = np.repeat(np.arange(len(a.start_ns)), n_partners)
    first_of_run = np.repeat(np.cumsum(n_partners) - n_partners, n_partners)
    in_b = np.arange(len(in_a)) - first_of_run + np.repeat(low, n_partners)
    return Intervals(
        np.maximum(a.start_ns[in_a], b.start_ns[in_b]), np.minimum(a.end_ns[in_a], b.end_ns[in_b])
    )


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """Return the instants that `a` covers and `b` does not.

    Args:
        a: United set.
        b: United set.
    """
    if not (len(a.start_ns) and len(b.start_ns)):
        return a
    outside_b = Intervals(np.concatenate(([_MIN], b.end_ns)), np.concatenate((b.start_ns, [_MAX])))
    # The complement keeps its two outer intervals even where b reaches the ends of int64: they are then empty.
    return intersect(a, outside_b)


def gaps(a: Intervals, within: Intervals) -> Intervals:
    """Return the instants of `within` that `a` leaves uncovered.

    Args:
        a: United set.
        within: United set.
    """
    return subtract(within, a)


def total_ns(united: Intervals) -> int:
    """Return the number of nanoseconds that a united set covers.

    Args:
        united: United set.
    """
    return int(np.sum(united.end_ns - united.start_ns))


def covered_ns(united: Intervals, start_ns: npt.ArrayLike, end_ns: npt.ArrayLike) -> Int64Array:
    """Return how much of each window a united set covers, int64 of shape (W,).

    Windows may overlap each other: each is measured by itself, in O(log N).

    Args:
        united: United set.
        start_ns: Inclusive starts of W windows.
        end_ns: Exclusive ends of W windows, none before its start.
    """
    if not len(united.start_ns):
        return np.zeros(np.shape(start_ns), np.int64)
    cumulative = np.concatenate(([0], np.cumsum(united.end_ns - united.start_ns)))
    before_end, before_start = (
        _covered_before(united, cumulative, np.asarray(instant, np.int64)) for instant in (end_ns, start_ns)
    )
    return before_end - before_start


def _covered_before(united: Intervals, cumulative: Int64Array, instant_ns: Int64Array) -> Int64Array:
    """Return how many nanoseconds of the set lie before each instant, given how many lie before each interval."""
    n_started = np.searchsorted(united.start_ns, instant_ns, side="left")
    # Of the last interval that started before the instant, the part behind the instant does not count.
    beyond = np.maximum(united.end_ns[np.maximum(n_started - 1, 0)] - instant_ns, 0)
    return cumulative[n_started] - np.where(n_started > 0, beyond, 0)
