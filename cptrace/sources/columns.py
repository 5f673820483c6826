"""Helpers to build the columns of Trace tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from cptrace.intervals import BoolArray, Int64Array


def nullable(values: Int64Array, is_missing: BoolArray | None) -> pd.arrays.IntegerArray:
    """Return a nullable integer column.

    Args:
        values: Values of shape (N,); any value where missing.
        is_missing: Mask of shape (N,), or None where nothing is missing.
    """
    mask = np.zeros(len(values), bool) if is_missing is None else is_missing
    return pd.arrays.IntegerArray(values, mask)


def all_missing(n_rows: int) -> pd.arrays.IntegerArray:
    """Return a nullable integer column without any value.

    Args:
        n_rows: Length of the column.
    """
    return pd.arrays.IntegerArray(np.zeros(n_rows, np.int64), np.ones(n_rows, bool))


def no_category(n_rows: int) -> pd.Categorical:
    """Return a categorical column without any value.

    Args:
        n_rows: Length of the column.
    """
    return category(np.full(n_rows, -1, np.int8), [])


def category(codes: npt.NDArray[np.integer], texts: Sequence[str | None] | pa.Array) -> pd.Categorical:
    """Return a categorical column from codes into texts.

    Args:
        codes: Integers of shape (N,), -1 where missing.
        texts: Text of each code, None for a missing value; the same text may stand at several codes.
    """
    encoded = pa.array(texts, pa.string()).dictionary_encode()
    # Code -1 finds the last element.
    new_codes = np.append(encoded.indices.fill_null(-1).to_numpy(), -1).astype(np.int32)
    dtype = pd.CategoricalDtype(pd.Index(encoded.dictionary.to_pandas(), dtype="str"))
    return pd.Categorical.from_codes(new_codes[codes], dtype=dtype, validate=False)


def merged_places(keys: Sequence[Int64Array]) -> list[Int64Array]:
    """Return where the rows of each part of a table come once all parts are sorted by one key; ties keep their order.

    Args:
        keys: The key of each part, int64 of shape (N_i,).

    Returns:
        Row numbers in the whole table, one int64 array of shape (N_i,) for each part.
    """
    order = np.argsort(np.concatenate(keys), kind="stable")
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    edges = np.cumsum([0, *(len(key) for key in keys)])
    return [places[low:high] for low, high in pairwise(edges)]


def merge_columns(parts: Sequence[Any], places: Sequence[Int64Array]) -> Any:
    """Return parts of one column as one, each row at its place: joined and sorted in one pass over the memory.

    Args:
        parts: Arrays, nullable integers or categoricals, all of one kind; part i of shape (N_i,).
        places: Row numbers in the whole column of each part's rows, together each row once.
    """
    if isinstance(parts[0], pd.Categorical):
        texts = parts[0].categories.append([part.categories for part in parts[1:]]).unique()
        slots = [np.append(texts.get_indexer(part.categories), -1).astype(np.int32) for part in parts]
        codes = [slot[part.codes] for slot, part in zip(slots, parts, strict=True)]
        dtype = pd.CategoricalDtype(texts)
        return pd.Categorical.from_codes(merge_columns(codes, places), dtype=dtype, validate=False)
    if isinstance(parts[0], pd.arrays.IntegerArray):
        values = [part.to_numpy(np.int64, na_value=0) for part in parts]
        return nullable(merge_columns(values, places), merge_columns([part.isna() for part in parts], places))
    merged = np.empty(sum(len(part) for part in parts), parts[0].dtype)
    for part, place in zip(parts, places, strict=True):
        merged[place] = part
    return merged
