"""Helpers to build the columns of Trace tables."""

from __future__ import annotations

from collections.abc import Sequence

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
