"""What every source shares: how it is described, how it is asked, and small helpers to build columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from cptrace.intervals import Int64Array
from cptrace.trace import Trace

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read a file.

    Attributes:
        drop_invalid: Leave out device work with impossible times, and count it, in place of refusing the file.
        progress: Called with the number of rows read so far and in all.
    """

    drop_invalid: bool = False
    progress: Callable[[int, int], None] | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """A trace format.

    Attributes:
        name: Stable name, as the report states it.
        summary: One line for help.
        suffixes: File name endings that people know it by.
        recognises: Whether a file, given its path and first 16 bytes, is of this format.
        read: Reads the file.
    """

    name: str
    summary: str
    suffixes: tuple[str, ...]
    recognises: Callable[[Path, bytes], bool]
    read: Callable[[Path, ReadOptions], Trace]


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


def category(codes: npt.NDArray[np.integer], texts: Sequence[str] | pa.Array) -> pd.Categorical:
    """Return a categorical column from codes into texts.

    Args:
        codes: Integers of shape (N,), -1 where missing.
        texts: Text of each code; the same text may stand at several codes.
    """
    encoded = pa.array(texts, pa.string()).dictionary_encode()
    new_codes = np.append(encoded.indices.to_numpy(), -1).astype(np.int32)  # code -1 finds the last element
    categories = pd.Index(encoded.dictionary.to_pandas(), dtype="str")
    return pd.Categorical.from_codes(new_codes[codes], categories=categories)
