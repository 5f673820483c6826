"""What in the device work of a trace cannot be, whatever the format: found, and said to the reader of its figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from cptrace.groups import number_groups
from cptrace.intervals import BoolArray, Int64Array
from cptrace.launches import without_shared_ids
from cptrace.trace import Note
from cptrace.units import format_ns

# Clocks of a device and traces in whole microseconds make neighbours overlap by up to this.
_TOLERANCE_NS: Final = 2_000
# A whole trace of an H100 has one such pair among 5,299 ops.
_MAX_STRAY_SHARE: Final = 0.001


def lost_time(n_lost: int, n_timed: int, duration_ns: int) -> str:
    """Return how much device time is lost with work that is left out, for people.

    Args:
        n_lost: How many ops are left out, at least one.
        n_timed: How many of them have a duration.
        duration_ns: Sum of these durations in ns.
    """
    if not n_timed:
        return "how long they took is not known"
    return f"{'' if n_timed == n_lost else 'at least '}{format_ns(duration_ns)} of device time"


def forget_ambiguous_launches(ops: pd.DataFrame, shared: pd.DataFrame, notes: list[Note]) -> pd.DataFrame:
    """Return device work without the correlation ids that do not tell its launch.

    Args:
        ops: Device work, as `schema.OPS`.
        shared: Correlation ids of several launches, as `launches.shared_ids` returns them.
        notes: Where to say how much work that concerns.
    """
    ops, n_ambiguous = without_shared_ids(ops, shared)
    if n_ambiguous:
        text = (
            "device work has a correlation id that several launches of its process have: its launch is not known, so it"
            " is in no step and has no launch latency"
        )
        notes.append(Note("ambiguous-launches", text, n_ambiguous))
    return ops


def note_overlaps(ops: pd.DataFrame, notes: list[Note]) -> None:
    """Say where ops of one stream overlap, which one CUDA stream does not let them do: rows may be there twice.

    Args:
        ops: Device work, as `schema.OPS`, ordered by start.
        notes: Where to say it.
    """
    later, is_copy = _overlapping(ops)
    if len(later) <= _MAX_STRAY_SHARE * len(ops):
        return
    n_copies = int(np.count_nonzero(is_copy))
    text = (
        "ops start before the one before them in their stream has ended"
        + (f", and {n_copies:,} of them repeat it" if n_copies else "")
        + ": one CUDA stream does so with programmatic dependent launches only, so rows may be there twice, and counts,"
        " sums over ops and start causes may be wrong"
    )
    notes.append(Note("overlapping-ops", text, len(later)))


def _overlapping(ops: pd.DataFrame) -> tuple[Int64Array, BoolArray]:
    """Return the rows of ops that overlap the one before them in their stream, and which of them repeat that one."""
    if len(ops) < 2:
        return np.zeros(0, np.int64), np.zeros(0, bool)
    order, is_first = _by_queue(*(ops[name].to_numpy() for name in ("rank", "context", "stream")))
    start, end = (ops[name].to_numpy()[order] for name in ("start_ns", "end_ns"))
    overlap_ns = end[:-1] - start[1:]
    is_same = (start[1:] == start[:-1]) & (end[1:] == end[:-1])
    places = np.flatnonzero(((overlap_ns > _TOLERANCE_NS) | (is_same & (overlap_ns > 0))) & ~is_first[1:])
    before, later, is_same = order[places], order[places + 1], is_same[places]
    is_copy = is_same & (ops["name"].cat.codes.to_numpy()[before] == ops["name"].cat.codes.to_numpy()[later])
    number = ops["correlation_id"].array
    # The branches of a graph run side by side, whatever stream it was launched into.
    is_of_one_launch = (number[before] == number[later]).to_numpy(bool, na_value=False) & ~is_same
    return later[~is_of_one_launch], is_copy[~is_of_one_launch]


def _by_queue(*keys: npt.NDArray[np.integer]) -> tuple[Int64Array, BoolArray]:
    """Return the rows ordered by queue and then as they come, and which of these is the first one of its queue."""
    queue = _numbers_of_16_bits(keys)
    if queue is None:
        queue, _ = number_groups(*keys)
    order = np.argsort(queue, kind="stable")  # numpy sorts numbers of 16 bits by counting
    sizes = np.bincount(queue)
    sizes = sizes[sizes > 0]
    is_first = np.zeros(len(order), bool)
    is_first[np.cumsum(sizes) - sizes] = True
    return order, is_first


def _numbers_of_16_bits(keys: Sequence[npt.NDArray[np.integer]]) -> npt.NDArray[np.integer] | None:
    """Return a number for each row's combination of keys, None where there are too many of them."""
    n_values = [int(key.max()) + 1 for key in keys]
    if math.prod(n_values) > 2**16:
        return None
    number = np.zeros(len(keys[0]), np.uint16)
    for key, n in zip(keys, n_values, strict=True):
        number *= np.uint16(n)
        number += key.astype(np.uint16)
    return number
