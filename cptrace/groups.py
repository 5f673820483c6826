"""Groups of rows that have the same keys: array kernels for what is reduced or listed per rank, stream or name."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from cptrace.intervals import Int64Array


def group_rows(*keys: npt.NDArray[np.integer]) -> list[Int64Array]:
    """Return the rows of each distinct combination of keys: ascending within a group, the groups ordered by key.

    Args:
        *keys: One or more integer keys of shape (N,), none negative, with few distinct values.
    """
    slot, first = number_groups(*keys)
    # Few groups: as 16-bit numbers numpy sorts them by counting, which keeps the order within each.
    order = np.argsort(slot.astype(np.uint16) if len(first) < 2**16 else slot, kind="stable")
    groups = np.split(order, np.cumsum(np.bincount(slot, minlength=len(first)))[:-1]) if len(first) else []
    by_key = np.lexsort([key[first] for key in reversed(keys)])
    return [groups[position] for position in by_key]


def number_groups(*keys: npt.NDArray[np.integer]) -> tuple[Int64Array, Int64Array]:
    """Return a number for each row's combination of keys, int64 of shape (N,), and one row of each number.

    Args:
        *keys: One or more integer keys of shape (N,); few distinct combinations.
    """
    code = np.zeros(len(keys[0]), np.int64)
    for key in keys:
        n_values = int(key.max(initial=0)) + 1
        if int(code.max(initial=0)) >= np.iinfo(np.int64).max // n_values:
            code, _ = pd.factorize(code)
        code = code * n_values + key
    slot, _ = pd.factorize(code)
    first = np.zeros(int(slot.max(initial=-1)) + 1, np.int64)
    first[slot] = np.arange(len(slot))
    return slot, first
