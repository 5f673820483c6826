"""Memory that several threads fill with the columns of one table, each its own stretch of rows.

Integers go straight to where they stay: one array per column, made once for all rows. Nothing is held twice, and the
pages of new memory are touched by the threads that read, not by the one that waits for them.
"""

from __future__ import annotations

from threading import Lock
from typing import NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from cptrace.intervals import BoolArray, Int64Array


class IntColumn(NamedTuple):
    """A column of integers.

    Attributes:
        values: int64 of shape (N,); 0 where missing.
        is_missing: Which values are missing, bool of shape (N,), or None where none is.
    """

    values: Int64Array
    is_missing: BoolArray | None


Column: TypeAlias = "IntColumn | pa.ChunkedArray"
Columns: TypeAlias = "dict[str, Column]"


class ColumnBuffers:
    """Columns being filled.

    Args:
        n_slots: Number of rows that fit in, at least as many as come.
    """

    def __init__(self, n_slots: int) -> None:
        self._n_slots = n_slots
        self._values: dict[str, Int64Array] = {}
        self._is_missing: dict[str, BoolArray] = {}
        self._texts: dict[str, dict[int, pa.Array]] = {}
        self._filled: dict[int, int] = {}
        self._lock = Lock()

    def write(self, slot: int, batch: pa.RecordBatch) -> int:
        """Put a batch of rows at a slot and return the slot after it.

        Args:
            slot: Where its first row goes; stretches of different threads must not overlap.
            batch: Rows.

        Raises:
            TypeError: A column holds neither integers nor texts; the message is `column: type`.
        """
        for name, array in zip(batch.schema.names, batch.columns, strict=True):
            if pa.types.is_binary(array.type) or pa.types.is_string(array.type):
                with self._lock:
                    self._texts.setdefault(name, {})[slot] = array
            elif pa.types.is_int64(array.type):
                self._write_integers(name, slot, array)
            else:
                raise TypeError(f"{name}: {array.type}")
        self._filled[slot] = batch.num_rows
        return slot + int(batch.num_rows)

    def finish(self) -> Columns:
        """Return the columns, once all threads are done, in the order of slots.

        Raises:
            TypeError: A column mixes integers and texts; the message is `column: types`.
        """
        rows = self._filled_slots()
        columns: Columns = {}
        for name, values in self._values.items():
            if name in self._texts:
                raise TypeError(f"{name}: integers and texts")
            is_missing = self._is_missing.get(name)
            columns[name] = IntColumn(values[rows], None if is_missing is None else is_missing[rows])
        for name, arrays in self._texts.items():
            columns[name] = pa.chunked_array([arrays[slot] for slot in sorted(arrays)])
        return columns

    def _filled_slots(self) -> slice | Int64Array:
        """Return which slots hold rows; where rows were deleted from the table, there are gaps."""
        starts = sorted(self._filled)
        stops = [start + self._filled[start] for start in starts]
        if all(stop == start for stop, start in zip(stops, starts[1:], strict=False)):
            return slice(starts[0], stops[-1]) if starts else slice(0, 0)
        return np.concatenate([np.arange(start, stop) for start, stop in zip(starts, stops, strict=True)])

    def _write_integers(self, name: str, slot: int, array: pa.Array) -> None:
        with self._lock:
            if name not in self._values:
                self._values[name] = np.zeros(self._n_slots, np.int64)
            if array.null_count and name not in self._is_missing:
                self._is_missing[name] = np.zeros(self._n_slots, bool)
        here = slice(slot, slot + len(array))
        if array.null_count < len(array):
            # The buffer itself: with missing values, pyarrow would hand out floats.
            data = np.frombuffer(array.buffers()[1], np.int64)
            self._values[name][here] = data[array.offset : array.offset + len(array)]
        if array.null_count:
            is_missing = array.is_null().to_numpy(zero_copy_only=False)
            self._is_missing[name][here] = is_missing
            self._values[name][here][is_missing] = 0
