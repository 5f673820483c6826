"""One table of an Nsight Systems export as it was read: integers, and the texts that they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd
import pyarrow as pa

from cptrace.errors import SourceError
from cptrace.intervals import BoolArray, Int64Array
from cptrace.sources.column_buffers import Columns, IntColumn
from cptrace.sources.columns import all_missing, category, nullable
from cptrace.sources.nsys_sqlite import STRINGS
from cptrace.sources.sqlite_columns import SqliteFile

NO_ID: Final = 4_294_967_295
"""What the exporter writes for no stream, no event, no device."""


@dataclass(frozen=True, slots=True)
class RawTable:
    """Columns of one source table.

    Attributes:
        file: Export that it is from.
        name: Name in the export.
        columns: Columns that were read, at least one.
    """

    file: SqliteFile
    name: str
    columns: Columns

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        column = next(iter(self.columns.values()))
        return len(column.values) if isinstance(column, IntColumn) else len(column)

    def ints(self, name: str) -> tuple[Int64Array, BoolArray | None]:
        """Return an integer column and which values are missing; all are where the file's version lacks it.

        Args:
            name: Name of the column.

        Raises:
            SourceError: The column holds texts.
        """
        column = self.columns.get(name)
        if column is None:
            return np.zeros(self.n_rows, np.int64), np.ones(self.n_rows, bool)
        if not isinstance(column, IntColumn):
            raise SourceError(
                f"{self.file.path}: {self.name}, column {name}: texts, where Nsight Systems writes integers; the file"
                " was changed after the export: export the report again"
            )
        return column

    def take(self, keep: BoolArray) -> RawTable:
        """Return the table with some of its rows.

        Args:
            keep: Which rows to keep, of shape (N,).
        """
        columns: Columns = {}
        for name, column in self.columns.items():
            if isinstance(column, IntColumn):
                is_missing = None if column.is_missing is None else column.is_missing[keep]
                columns[name] = IntColumn(column.values[keep], is_missing)
            else:
                columns[name] = column.filter(pa.array(keep))
        return RawTable(self.file, self.name, columns)

    def optional(self, name: str) -> pd.arrays.IntegerArray:
        """Return a nullable integer column.

        Args:
            name: Name of the column.
        """
        return nullable(*self.ints(name)) if name in self.columns else all_missing(self.n_rows)

    def ids(self, name: str) -> tuple[Int64Array, BoolArray]:
        """Return ids and which of them are there: the exporter writes all ones for none.

        Args:
            name: Name of the column.
        """
        values, is_missing = self.ints(name)
        is_there = values != NO_ID
        return values, is_there if is_missing is None else is_there & ~is_missing

    def texts(self, name: str, fallback: str | None = None) -> pd.Categorical:
        """Return the texts of a column of string ids.

        Args:
            name: Name of the column.
            fallback: Text where the id or its text is missing; None for a missing value.
        """
        ids, is_missing = self.ints(name)
        slot, unique = pd.factorize(ids)
        found = self.file.strings(STRINGS, unique.tolist()) if STRINGS in self.file.columns else {}
        texts = [found.get(key) or fallback for key in unique.tolist()]
        if is_missing is not None:
            slot, texts = np.where(is_missing, len(texts), slot), [*texts, fallback]
        return category(slot, texts)
