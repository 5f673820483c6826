"""Groups of rows against a dictionary of lists."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cptrace.groups import group_rows, number_groups

# Global process ids take 56 bits: two such keys do not fit into one number of 64.
keys = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from((0, 7, 2**56)), st.sampled_from((1, 2**40))), max_size=30
)


@given(keys)
def test_groups_are_those_of_a_dictionary(rows: list[tuple[int, int, int]]) -> None:
    expected: dict[tuple[int, int, int], list[int]] = {}
    for number, row in enumerate(rows):
        expected.setdefault(row, []).append(number)
    columns = [np.array([row[place] for row in rows], np.int64) for place in range(3)]
    assert [group.tolist() for group in group_rows(*columns)] == [expected[key] for key in sorted(expected)]
    slot, first = number_groups(*columns)
    assert len(first) == len(expected)
    assert [rows[row] for row in first.tolist()] == [rows[slot.tolist().index(n)] for n in range(len(first))]
