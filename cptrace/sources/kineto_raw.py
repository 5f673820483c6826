"""One kind of events of a PyTorch profiler trace as it was read, and the choice of those with possible times."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd

from cptrace.errors import TraceError
from cptrace.intervals import BoolArray, Int64Array
from cptrace.requests import ReadOptions
from cptrace.sources.column_buffers import IntColumn
from cptrace.sources.columns import category, nullable
from cptrace.sources.kineto_events import EventColumns
from cptrace.trace import Note

# 146 years: times count from 1970 at most.
_LATEST_NS: Final = 2**62


@dataclass(frozen=True, slots=True)
class RawEvents:
    """Events of one kind, perhaps none.

    Attributes:
        path: File that they are from.
        what: What they are, in the plural.
        columns: Their columns.
    """

    path: Path
    what: str
    columns: EventColumns

    @property
    def n_rows(self) -> int:
        """Number of events."""
        return len(self.columns.is_timed)

    def ints(self, name: str) -> Int64Array:
        """Return an integer column, 0 where a value is missing.

        Args:
            name: Name of the column.
        """
        return self.columns.ints[name].values

    def is_there(self, name: str) -> BoolArray:
        """Return which values of an integer column are there, bool of shape (N,).

        Args:
            name: Name of the column.
        """
        is_missing = self.columns.ints[name].is_missing
        return np.ones(self.n_rows, bool) if is_missing is None else ~is_missing

    def first_of(self, *names: str) -> Int64Array:
        """Return for each event the first of some integer columns that is there, else 0.

        Args:
            *names: Names of the columns.
        """
        values = np.zeros(self.n_rows, np.int64)
        for name in reversed(names):
            values = np.where(self.is_there(name), self.ints(name), values)
        return values

    def optional(self, name: str) -> pd.arrays.IntegerArray:
        """Return a nullable integer column.

        Args:
            name: Name of the column.
        """
        return nullable(*self.columns.ints[name])

    def coded(self, name: str) -> tuple[Int64Array, list[str]]:
        """Return a text column as codes, -1 where missing, and the texts that they stand for.

        Args:
            name: Name of the column.
        """
        column = self.columns.texts[name]
        codes: Int64Array = column.indices.fill_null(-1).to_numpy().astype(np.int64)
        return codes, column.dictionary.to_pylist()

    def texts(self, name: str) -> pd.Categorical:
        """Return a text column.

        Args:
            name: Name of the column.
        """
        return category(*self.coded(name))

    def keep(self, mask: BoolArray) -> RawEvents:
        """Return some of the events.

        Args:
            mask: Which to keep, bool of shape (N,).
        """
        columns = self.columns
        ints = {
            name: IntColumn(values[mask], None if is_missing is None else is_missing[mask])
            for name, (values, is_missing) in columns.ints.items()
        }
        texts = {name: column.filter(mask) for name, column in columns.texts.items()}
        return RawEvents(self.path, self.what, EventColumns(columns.is_timed[mask], ints, texts))


def keep_possible(raw: RawEvents, options: ReadOptions, notes: list[Note], *, is_device: bool) -> RawEvents:
    """Return the events with possible times.

    Args:
        raw: Events as they were read.
        options: How to read.
        notes: Where to say how many were left out.
        is_device: Whether figures rest on them: then the file is refused unless the options say to leave them out.

    Raises:
        TraceError: Device work has impossible times.
    """
    start, end = raw.ints("start_ns"), raw.ints("end_ns")
    is_bad = ~raw.columns.is_timed | (start < 0) | (end < start) | (end > _LATEST_NS)
    n_bad = int(np.count_nonzero(is_bad))
    if not n_bad:
        return raw
    if is_device and not options.drop_invalid:
        raise TraceError(
            f"{raw.path}: {n_bad} of {raw.n_rows} {raw.what} have missing, negative, reversed or impossibly late"
            " times; export the trace again, or leave such events out with --drop-invalid"
        )
    notes.append(
        Note("dropped-rows", f"{raw.what} with missing, negative or reversed times were left out", n_bad)
    )
    return raw.keep(~is_bad)
