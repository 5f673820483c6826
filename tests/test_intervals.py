"""Interval algebra against bitmaps: every set of instants is also kept as one boolean per nanosecond."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cptrace import intervals
from cptrace.intervals import EMPTY, Intervals

SIZE = 40
"""Instants of a bitmap; property tests keep to these."""

LOW, HIGH = np.iinfo(np.int64).min, np.iinfo(np.int64).max

pairs = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted).map(tuple)
raw_sets = st.lists(pairs, max_size=12).map(lambda some: make(*some))


def make(*spans: tuple[int, int]) -> Intervals:
    return Intervals(
        np.array([start for start, _ in spans], np.int64), np.array([end for _, end in spans], np.int64)
    )


def spans(some: Intervals) -> list[tuple[int, int]]:
    return list(zip(some.start_ns.tolist(), some.end_ns.tolist(), strict=True))


def bitmap(some: Intervals) -> np.ndarray:
    covered = np.zeros(SIZE, bool)
    for start, end in spans(some):
        covered[start:end] = True
    return covered


def check(result: Intervals, expected: np.ndarray) -> None:
    assert bitmap(result).tolist() == expected.tolist()
    assert intervals.is_united(result)
    assert result.start_ns.dtype == result.end_ns.dtype == np.int64
    assert intervals.total_ns(result) == int(expected.sum())


@given(raw_sets)
def test_union(a):
    before = spans(a)
    check(intervals.union(a), bitmap(a))
    assert spans(a) == before


@given(raw_sets)
def test_union_of_a_united_set_is_itself(a):
    once = intervals.union(a)
    assert spans(intervals.union(once)) == spans(once)


@given(st.lists(raw_sets, max_size=4))
def test_union_of(sets):
    expected = np.zeros(SIZE, bool)
    for some in sets:
        expected |= bitmap(some)
    check(intervals.union_of(*sets), expected)


@given(raw_sets, raw_sets)
def test_intersect_subtract_gaps(a, b):
    u, v = intervals.union(a), intervals.union(b)
    check(intervals.intersect(u, v), bitmap(a) & bitmap(b))
    check(intervals.subtract(u, v), bitmap(a) & ~bitmap(b))
    check(intervals.gaps(u, v), bitmap(b) & ~bitmap(a))


@given(raw_sets, st.lists(pairs, max_size=8))
def test_covered_ns_of_windows_that_may_overlap_and_be_empty(a, windows):
    start, end = [w[0] for w in windows], [w[1] for w in windows]
    covered = intervals.covered_ns(intervals.union(a), start, end)
    assert covered.dtype == np.int64
    assert covered.tolist() == [int(bitmap(a)[s:e].sum()) for s, e in windows]


@given(st.lists(pairs, max_size=6))
def test_is_united_says_whether_union_would_change_anything(some):
    candidate = make(*some)
    assert intervals.is_united(candidate) == (spans(candidate) == spans(intervals.union(candidate)))


@pytest.mark.parametrize(
    ("raw", "united"),
    [
        ([], []),
        ([(5, 5)], []),
        ([(5, 5), (3, 3)], []),
        ([(0, 5), (5, 9)], [(0, 9)]),
        ([(5, 9), (0, 5)], [(0, 9)]),
        ([(0, 5), (6, 9)], [(0, 5), (6, 9)]),
        ([(0, 9), (2, 3), (4, 5)], [(0, 9)]),
        ([(0, 3), (3, 3), (4, 4), (4, 6)], [(0, 3), (4, 6)]),
        ([(2, 4), (0, 9), (8, 12)], [(0, 12)]),
        ([(1, 2)] * 3, [(1, 2)]),
    ],
)
def test_union_of_edge_cases(raw, united):
    assert spans(intervals.union(make(*raw))) == united


def test_times_of_real_clocks_stay_exact():
    """Wall-clock nanoseconds do not fit a float: neighbouring instants must stay apart."""
    epoch = 1_790_000_000_000_000_001
    united = intervals.union(make((epoch, epoch + 1), (epoch + 2, epoch + 3)))
    assert spans(united) == [(epoch, epoch + 1), (epoch + 2, epoch + 3)]
    assert intervals.covered_ns(united, [epoch], [epoch + 3]).tolist() == [2]


def test_ends_of_int64():
    edges = make((LOW, LOW + 5), (HIGH - 5, HIGH))
    assert spans(intervals.union(edges)) == spans(edges)
    assert spans(intervals.subtract(edges, make((LOW, LOW + 2)))) == [(LOW + 2, LOW + 5), (HIGH - 5, HIGH)]
    assert spans(intervals.subtract(edges, make((HIGH - 1, HIGH)))) == [(LOW, LOW + 5), (HIGH - 5, HIGH - 1)]
    assert spans(intervals.subtract(edges, edges)) == []
    assert spans(intervals.subtract(edges, EMPTY)) == spans(edges)
    assert spans(intervals.intersect(edges, make((LOW, HIGH)))) == spans(edges)
    assert spans(intervals.gaps(edges, make((LOW, HIGH)))) == [(LOW + 5, HIGH - 5)]
    assert intervals.covered_ns(edges, [LOW, LOW + 1], [HIGH, HIGH - 4]).tolist() == [10, 5]
    assert intervals.total_ns(edges) == 10


def test_empty_sets_on_either_side():
    some = make((1, 4))
    for function in (intervals.intersect, intervals.subtract, intervals.gaps):
        assert spans(function(EMPTY, EMPTY)) == []
    assert spans(intervals.intersect(some, EMPTY)) == spans(intervals.intersect(EMPTY, some)) == []
    assert spans(intervals.gaps(EMPTY, some)) == [(1, 4)]
    assert intervals.total_ns(EMPTY) == 0
    assert intervals.covered_ns(EMPTY, [0, 3], [9, 3]).tolist() == [0, 0]
    assert intervals.covered_ns(some, [], []).tolist() == []
    assert spans(intervals.union_of()) == spans(intervals.union_of(EMPTY, EMPTY)) == []


def test_intervals_refuses_what_is_no_set_of_times():
    assert spans(intervals.intervals([], [])) == []
    assert spans(intervals.intervals([3, 1], [3, 2])) == [(3, 3), (1, 2)]
    for start, end, message in (
        ([1, 2], [3], "one length"),
        ([[1]], [[2]], "one length"),
        ([1.0], [2.0], "integer"),
        ([5], [4], "1 intervals end before"),
    ):
        with pytest.raises(ValueError, match=message):
            intervals.intervals(start, end)


def test_the_shared_empty_set_is_never_changed():
    assert EMPTY.n_intervals == 0
    assert make((1, 2), (4, 8)).n_intervals == 2
