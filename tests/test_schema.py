"""Frames have their table's columns, and one order whatever the order of the rows that made them."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cptrace import schema
from cptrace.errors import TraceError
from cptrace.sources.columns import category


def column_of(column, values):
    if column.dtype == schema.CATEGORY:
        texts = list(dict.fromkeys(value for value in values if value is not None))
        return category(np.array([-1 if v is None else texts.index(v) for v in values], np.int64), texts)
    if column.dtype == schema.NULLABLE_INT64:
        return pd.array(values, dtype="Int64")
    return np.array(values, column.dtype)


def rows_of(table, draw_row):
    return st.lists(st.fixed_dictionaries({c.name: draw_row(c) for c in table.columns}), max_size=12)


def small_values(column):
    values = (
        st.sampled_from(["b", "a", "é", "", "B"]) if column.dtype == schema.CATEGORY else st.integers(0, 2)
    )
    if column.dtype == schema.BOOL:
        return st.just(False)
    return st.one_of(st.none(), values) if column.is_nullable else values


def make(table, rows):
    return schema.make_frame(
        table, {c.name: column_of(c, [row[c.name] for row in rows]) for c in table.columns}
    )


@pytest.mark.parametrize("table", schema.TABLES, ids=lambda table: table.name)
@settings(max_examples=20)
@given(data=st.data(), seed=st.integers(0, 10))
def test_order_of_rows_does_not_matter(table, data, seed):
    """Ties in every key but the last must not leave the order to chance."""
    rows = data.draw(rows_of(table, small_values))
    shuffled = rows[:]
    random.Random(seed).shuffle(shuffled)
    key = [c.name for c in table.columns if c.name in table.order]
    first, second = (make(table, some)[key].astype(object).values.tolist() for some in (rows, shuffled))
    assert str(first) == str(second)
    expected = sorted(
        ([row[name] for name in table.order] for row in rows),
        key=lambda values: [(v is not None, v) for v in values],
    )
    found = make(table, rows)[list(table.order)].astype(object)
    assert found.where(found.notna(), None).values.tolist() == expected


def test_make_frame_does_not_write_into_what_it_was_given():
    """Columns are often views of memory that belongs to the reader."""
    rows = [{"start_ns": 5, "end_ns": end} for end in (9, 7)]
    table = schema.Table(
        "t", "", (schema.API_CALLS.columns[0], schema.API_CALLS.columns[1]), ("start_ns", "end_ns")
    )
    columns = {c.name: column_of(c, [row[c.name] for row in rows]) for c in table.columns}
    columns["end_ns"].setflags(write=False)
    assert schema.make_frame(table, columns)["end_ns"].tolist() == [7, 9]
    assert columns["end_ns"].tolist() == [9, 7]


def test_one_long_text_does_not_cost_its_length_for_every_other():
    """2,000 short names and one of 100,000 characters: sorting ties must not give each of them that room."""
    texts = [f"range {number}" for number in range(2_000)] + ["x" * 100_000]
    n = len(texts)
    columns = {
        "start_ns": np.zeros(n, np.int64), "end_ns": np.zeros(n, np.int64), "process": np.zeros(n, np.int64),
        "thread": np.zeros(n, np.int64), "correlation_id": pd.array([None] * n, dtype="Int64"),
        "name": category(np.arange(n)[::-1].copy(), texts),
    }  # fmt: skip
    tracemalloc.start()
    try:
        frame = schema.make_frame(schema.API_CALLS, columns)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert frame["name"].tolist() == sorted(texts)
    assert peak < 50 * 2**20


@pytest.mark.parametrize("table", [*schema.TABLES, schema.ROLES], ids=lambda table: table.name)
def test_empty_frames_are_of_the_table(table):
    frame = schema.empty_frame(table)
    assert frame.empty
    assert list(frame.columns) == table.column_names
    schema.check_frame(table, frame)


def test_check_frame_names_what_is_wrong():
    frame = schema.empty_frame(schema.RANKS)
    with pytest.raises(TraceError, match="lacks its column 'pid'"):
        schema.check_frame(schema.RANKS, frame.drop(columns="pid"))
    with pytest.raises(TraceError, match=r"ranks\.pid must be int64, found float64"):
        schema.check_frame(schema.RANKS, frame.astype({"pid": float}))
    with pytest.raises(TraceError, match="lacks its column 'role'"):
        schema.check_frame(schema.OPS, schema.empty_frame(schema.OPS), schema.ROLES.columns)


@pytest.mark.parametrize("table", [*schema.TABLES, schema.ROLES], ids=lambda table: table.name)
def test_tables_are_described(table):
    names = table.column_names
    assert len(set(names)) == len(names)
    assert set(table.order) <= set(names)
    for column in table.columns:
        assert column.meaning
        assert (column.unit == "ns") == column.name.endswith("_ns")
        assert not (column.dtype == schema.NULLABLE_INT64 and not column.is_nullable)
