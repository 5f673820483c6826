"""Joins of ops with launches and of host calls with ranges, against dictionaries and loops."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cptrace import launches as module
from cptrace.launches import (
    Key,
    closed_ranges,
    find_launches,
    innermost_ranges,
    lookup,
    names_match,
    shared_ids,
    without_shared_ids,
)

SPARSE = 2**40

keys = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.one_of(st.integers(0, 12), st.integers(0, SPARSE), st.integers(-4, 2**63 - 1)),
        st.booleans(),
    ),
    max_size=30,
)


def key_of(rows: list[tuple[int, int, bool]]) -> Key:
    return Key(
        np.array([row[0] for row in rows], np.int64),
        np.array([row[1] for row in rows], np.int64),
        np.array([row[2] for row in rows], bool),
    )


def plain_lookup(rows, wanted):
    first: dict[tuple[int, int], int] = {}
    for position, (owner, number, is_there) in enumerate(rows):
        if is_there:
            first.setdefault((owner, number), position)
    return [first.get((owner, number)) if is_there else None for owner, number, is_there in wanted]


def answers(found, is_known):
    return [int(place) if known else None for place, known in zip(found, is_known, strict=True)]


@given(keys, keys)
def test_lookup_is_a_dictionary_of_first_positions(rows, wanted):
    wanted = wanted + rows[::2]
    assert answers(*lookup(key_of(rows), key_of(wanted))) == plain_lookup(rows, wanted)


@given(st.data())
def test_lookup_of_dense_numbers(data):
    """Numbers as correlation ids are: nearly dense, the same ones in several processes, some repeated."""
    numbers = st.tuples(st.integers(0, 2), st.integers(1_000, 1_060), st.just(True))
    rows = data.draw(st.lists(numbers, min_size=1, max_size=80))
    wanted = data.draw(st.lists(numbers, max_size=80))
    assert answers(*lookup(key_of(rows), key_of(wanted))) == plain_lookup(rows, wanted)


@pytest.mark.parametrize("step", [1, 7, 1_000_003], ids=["dense", "loose", "sparse"])
def test_table_and_sorting_agree_on_many_rows(step):
    rng = np.random.default_rng(step)
    owner, number = rng.integers(0, 3, 5_000), rng.integers(0, 4_000, 5_000) * step
    rows = Key(owner, number, np.ones(5_000, bool))
    wanted = Key(rng.integers(0, 4, 3_000), rng.integers(0, 4_400, 3_000) * step, rng.random(3_000) < 0.9)
    plain = plain_lookup(list(zip(*map(np.ndarray.tolist, rows), strict=True)), zip(*wanted, strict=True))
    assert answers(*lookup(rows, wanted)) == plain
    assert answers(*module._lookup_by_sorting(rows, np.arange(5_000), wanted)) == plain


def frame(*rows: tuple[int, int | None]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "process": np.array([row[0] for row in rows], np.int64),
            "correlation_id": pd.array([row[1] for row in rows], dtype="Int64"),
        }
    )


def test_find_launches_keeps_processes_apart():
    """The same correlation id in two processes names two calls; unknown processes and missing ids find none."""
    calls = frame((1, 5), (2, 5), (1, 6), (1, 5), (2, None))
    ops = frame((2, 5), (1, 5), (1, 6), (2, 6), (3, 5), (1, None), (2, None))
    found = find_launches(ops, calls)
    assert answers(*found) == [1, 0, 2, None, None, None, None]


@pytest.mark.parametrize(("n_ops", "n_calls"), [(0, 3), (3, 0), (0, 0)])
def test_find_launches_of_empty_tables(n_ops, n_calls):
    found = find_launches(frame(*[(1, 5)] * n_ops), frame(*[(1, 5)] * n_calls))
    assert answers(*found) == [None] * n_ops


def range_frame(rows: list[tuple[int, int, int]]) -> pd.DataFrame:
    """Return ranges (thread, start, end) ordered as a Trace orders them."""
    rows = sorted(rows, key=lambda row: (row[1], row[2], row[0]))
    return pd.DataFrame(
        {
            "thread": np.array([row[0] for row in rows], np.int64),
            "start_ns": np.array([row[1] for row in rows], np.int64),
            "end_ns": pd.array([row[2] for row in rows], dtype="Int64"),
        }
    )


def plain_innermost(rows, thread, instant):
    """Return the bounds of the latest-started, then shortest, range around an instant."""
    around = [(start, end) for owner, start, end in rows if owner == thread and start <= instant < end]
    return max(around, key=lambda span: (span[0], -span[1]), default=None)


def check_innermost(rows, instants):
    ranges = range_frame(rows)
    thread, instant = (np.array([row[i] for row in instants], np.int64) for i in (0, 1))
    found, is_found = innermost_ranges(ranges, thread, instant)
    start, end, owner = (ranges[name].to_numpy(np.int64) for name in ("start_ns", "end_ns", "thread"))
    result = [
        (int(start[f]), int(end[f])) if known else None for f, known in zip(found, is_found, strict=True)
    ]
    assert result == [plain_innermost(rows, t, i) for t, i in instants]
    assert all(owner[f] == t for f, known, (t, _) in zip(found, is_found, instants, strict=True) if known)


span = st.tuples(st.integers(0, 25), st.integers(0, 25)).map(sorted)
rows_of_ranges = st.lists(st.tuples(st.integers(1, 3), span).map(lambda row: (row[0], *row[1])), max_size=16)
everywhere = [(thread, instant) for thread in range(5) for instant in range(-1, 27)]


@given(rows_of_ranges)
def test_innermost_of_any_ranges(rows):
    """Nested, touching, crossing, empty and equal ranges on three threads, asked at every instant."""
    check_innermost(rows, everywhere)


@st.composite
def call_trees(draw, low=0, high=60, depth=4):
    """Return properly nested ranges of one thread, as push and pop make them."""
    if depth == 0 or high - low < 2:
        return []
    cuts = sorted(draw(st.lists(st.integers(low, high), max_size=6)))
    nested = []
    for start, end in zip(cuts[::2], cuts[1::2], strict=False):
        nested += [(1, start, end), *draw(call_trees(start, end, depth - 1))]
    return nested


@given(call_trees())
def test_innermost_of_call_trees(rows):
    check_innermost(rows, [(1, instant) for instant in range(-1, 62)])


@pytest.mark.parametrize(
    ("rows", "instant", "expected"),
    [
        ([(1, 0, 100), (1, 10, 20)], 50, (0, 100)),
        ([(1, 0, 100), (1, 10, 20), (1, 10, 10)], 50, (0, 100)),
        ([(1, 0, 100), (1, 10, 20), (1, 30, 30), (1, 30, 40)], 15, (10, 20)),
        ([(1, 0, 10), (1, 5, 20), (1, 12, 15)], 17, (5, 20)),
        ([(1, 0, 10), (1, 5, 20)], 7, (5, 20)),
        ([(1, 0, 10), (1, 10, 20)], 10, (10, 20)),
        ([(1, 0, 10)], 10, None),
    ],
    ids=["after a child", "empty twin of a child", "empty twin of a sibling", "crossing", "in both", "touching", "end"],
)  # fmt: skip
def test_innermost_by_hand(rows, instant, expected):
    """
    after a child           A[.....................]
                              B[..]     ^ in A again, whatever empty ranges start together with B
    """
    ranges = range_frame(rows)
    found, is_found = innermost_ranges(ranges, np.array([1]), np.array([instant]))
    bounds = tuple(ranges.iloc[int(found[0])][["start_ns", "end_ns"]].tolist()) if is_found[0] else None
    assert bounds == expected


def test_innermost_of_deep_and_wide_trees():
    """A thousand ranges within each other, and ten thousand beside each other within one."""
    deep = [(1, i, 2_000 - i) for i in range(1_000)]
    wide = [(2, 0, 40_001), *((2, 4 * i, 4 * i + 2) for i in range(10_000))]
    check = [(1, 0), (1, 999), (1, 1_000), (1, 1_500), (2, 39_998), (2, 3), (2, 40_000), (2, 40_001)]
    check_innermost(deep + wide, check)


def test_names_match_looks_at_text_and_never_at_missing_names():
    names = pd.Series(pd.Categorical(["ncclSend", None, "step", "ncclSend"]))
    assert names_match(names, "^nccl").tolist() == [True, False, False, True]
    assert names_match(names.iloc[:0], "^nccl").tolist() == []
    assert names_match(
        pd.Series(pd.Categorical([None], categories=pd.Index([], dtype=str))), ""
    ).tolist() == [False]


def test_closed_ranges():
    rows = range_frame([(1, 0, 5), (1, 2, 3)])
    rows.loc[0, "end_ns"] = pd.NA
    assert closed_ranges(rows)["start_ns"].tolist() == [2]


LAUNCH, DRIVER, RECORD = "cudaLaunchKernel", "cuLaunchKernelEx", "cudaEventRecord"


def call_frame(*rows: tuple[int, int, int | None, str | None, int, int]) -> pd.DataFrame:
    """Return calls (process, thread, correlation id, name, start, end) ordered by start."""
    rows = tuple(sorted(rows, key=lambda row: row[4:]))
    names = pd.Categorical(
        [row[3] for row in rows], categories=pd.Index([LAUNCH, DRIVER, RECORD, "cudaMemcpyAsync"])
    )
    return frame(*((row[0], row[2]) for row in rows)).assign(
        thread=np.array([row[1] for row in rows], np.int64),
        start_ns=np.array([row[4] for row in rows], np.int64),
        end_ns=np.array([row[5] for row in rows], np.int64),
        name=names,
    )


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], []),
        ([(1, 1, 5, LAUNCH, 0, 9), (1, 1, 6, LAUNCH, 10, 19)], []),
        ([(1, 1, 5, LAUNCH, 0, 9), (1, 1, 5, LAUNCH, 10, 19)], [(1, 5)]),
        ([(1, 1, 5, LAUNCH, 0, 9), (1, 1, 5, LAUNCH, 9, 19)], [(1, 5)]),
        ([(1, 1, 5, LAUNCH, 0, 9), (1, 2, 5, LAUNCH, 3, 6)], [(1, 5)]),
        ([(1, 1, 5, LAUNCH, 0, 9), (2, 2, 5, LAUNCH, 10, 19)], []),
        ([(1, 1, 5, LAUNCH, 0, 9), (1, 1, 5, DRIVER, 3, 6)], []),
        ([(1, 1, 5, LAUNCH, 0, 9), (1, 1, 5, DRIVER, 0, 9)], []),
        ([(1, 1, 5, LAUNCH, 4, 4), (1, 1, 5, DRIVER, 4, 4)], []),
        ([(1, 1, 5, LAUNCH, 0, 9), (1, 1, 5, DRIVER, 1, 3), (1, 1, 5, DRIVER, 4, 6)], []),
        ([(1, 1, 5, LAUNCH, 0, 9), (1, 1, 5, DRIVER, 1, 3), (1, 1, 5, LAUNCH, 10, 11)], [(1, 5)]),
        ([(1, 1, 5, LAUNCH, 0, 9), (1, 1, 5, RECORD, 10, 19)], []),
        ([(1, 1, 5, LAUNCH, 0, 9), (1, 1, 5, "cudaMemcpyAsync", 10, 19), (1, 1, 5, LAUNCH, 20, 29)], [(1, 5)]),
        ([(1, 1, 5, None, 0, 9), (1, 1, 5, None, 10, 19)], []),
        ([(1, 1, None, LAUNCH, 0, 9), (1, 1, None, LAUNCH, 10, 19)], []),
        ([(1, 1, 0, LAUNCH, 0, 9), (1, 1, 2**62, LAUNCH, 10, 19), (1, 1, 2**62, LAUNCH, 20, 29)], [(1, 2**62)]),
        ([(p, 1, 5, LAUNCH, 10 * n, 10 * n + 1) for p in (3, 1) for n in range(4)], [(1, 5), (3, 5)]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("beside", [0, 40], ids=["alone", "beside others"])
def test_ids_of_several_launches(rows, expected, beside):
    """A driver call inside a runtime call is one launch; two launches after each other or on two threads are not."""
    others = [(7, 7, 1_000 + number, LAUNCH, number, number + 1) for number in range(beside)]
    calls = call_frame(*rows, *others)
    found = shared_ids(calls)
    assert found.values.tolist() == [list(pair) for pair in expected]
    ops = frame(*((row[0], row[2]) for row in (*rows, *others)), (9, 5), (1, None))
    told, n_ambiguous = without_shared_ids(ops, found)
    is_ambiguous = [(row[0], row[2]) in expected for row in (*rows, *others)] + [False, False]
    assert n_ambiguous == sum(is_ambiguous)
    lost = told["correlation_id"].isna() & ~ops["correlation_id"].isna()
    assert lost.tolist() == is_ambiguous
    assert not find_launches(told, calls).is_known[is_ambiguous].any()
