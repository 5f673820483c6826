"""One kind of events of a PyTorch profiler trace as it was read, and the choice of those with possible times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from cptrace.errors import TraceError
from cptrace.intervals import BoolArray, Int64Array
from cptrace.requests import ReadOptions
from cptrace.sources.column_buffers import IntColumn
from cptrace.sources.columns import category, nullable
from cptrace.sources.doubts import lost_time
from cptrace.sources.kineto_events import EventColumns
from cptrace.sources.kineto_misfits import Misfits
from cptrace.sources.kineto_times import LATEST_NS
from cptrace.trace import Note


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


def keep_possible(raw: RawEvents, notes: list[Note]) -> RawEvents:
    """Return the events with possible times.

    Args:
        raw: Events as they were read, no device work.
        notes: Where to say how many were left out.
    """
    is_bad = _has_bad_times(raw)
    if not (n_bad := int(np.count_nonzero(is_bad))):
        return raw
    text = f"{raw.what} with missing, negative or reversed times were left out"
    notes.append(Note("dropped-rows", text, n_bad))
    return raw.keep(~is_bad)


def keep_works(raw: RawEvents, misfits: Misfits, options: ReadOptions, notes: list[Note]) -> RawEvents:
    """Return the device work that has a place in time and on a device.

    Args:
        raw: Device work as it was read.
        misfits: What could not be read and may be device work.
        options: How to read.
        notes: Where to say how many were left out, and how much device time that is.

    Raises:
        TraceError: Some has no such place, and it is not to be left out: every figure would lack it.
    """
    is_bad = _has_bad_times(raw)
    is_nowhere = ~is_bad & (raw.first_of("device", "in_device", "pid") < 0)
    faults = [
        fault
        for fault in (
            _Fault("have a name, category, phase or arguments of a wrong type", misfits),
            _Fault("have missing, negative, reversed or impossibly late times", _losses(raw, is_bad)),
            _Fault("are on a device with a negative number", _losses(raw, is_nowhere)),
        )
        if fault.losses.n_works
    ]
    if faults and not options.drop_invalid:
        raise _refusal(raw, raw.n_rows + misfits.n_works, faults)
    notes.extend(fault.as_note(raw.what) for fault in faults)
    return raw.keep(~(is_bad | is_nowhere)) if faults else raw


class _Fault(NamedTuple):
    """What some device events have in common that cannot be used."""

    phrase: str
    losses: Misfits

    def as_note(self, what: str) -> Note:
        losses = self.losses
        lost = lost_time(losses.n_works, losses.n_timed, losses.duration_ns)
        return Note("dropped-rows", f"{what} that {self.phrase} ({lost}) were left out", losses.n_works)


def _refusal(raw: RawEvents, n_all: int, faults: Sequence[_Fault]) -> TraceError:
    n_bad = sum(fault.losses.n_works for fault in faults)
    phrases = [f"{fault.losses.n_works} {fault.phrase}" for fault in faults]
    said = faults[0].phrase if len(faults) == 1 else f"cannot be used ({'; '.join(phrases)})"
    return TraceError(
        f"{raw.path}: {n_bad} of {n_all} {raw.what} {said}; export the trace again, or leave such events out with"
        " --drop-invalid"
    )


def _has_bad_times(raw: RawEvents) -> BoolArray:
    start, end = raw.ints("start_ns"), raw.ints("end_ns")
    return ~raw.columns.is_timed | (start < 0) | (end < start) | (end > LATEST_NS)


def _losses(raw: RawEvents, is_lost: BoolArray) -> Misfits:
    """Return how many events are lost, and how much device time where their duration is possible."""
    rows = np.flatnonzero(is_lost)
    if not len(rows):
        return Misfits()
    start, end = raw.ints("start_ns")[rows], raw.ints("end_ns")[rows]
    # As Python's integers: durations of a damaged file may add up beyond 64 bits.
    durations = (end - start)[(end >= start) & (start >= -LATEST_NS) & (end <= LATEST_NS)].tolist()
    return Misfits(n_works=len(rows), n_timed=len(durations), duration_ns=sum(durations))
