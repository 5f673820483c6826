"""How fast messages of each size went: bandwidth against message size."""

from __future__ import annotations

import numpy as np
import pandas as pd

from cptrace import labels
from cptrace.analyses.breakdowns import op_sizes
from cptrace.analyses.scope import Scope, device_work_missing
from cptrace.classify import COMM
from cptrace.groups import group_rows
from cptrace.intervals import BoolArray, Int64Array
from cptrace.outcome import NotApplicable


def by_size(scope: Scope) -> pd.DataFrame | NotApplicable:
    """Return one row per rank, kind of collective and message size: how many, how long, and at which rate.

    `transfer_ns` is the median time from the arrival of the last participant to the end, missing where an op's
    participants are not known; `bytes_per_s` is the size over it, else over the median duration, waiting included. None
    is given for one-GPU runs with virtual ranks, whose copies cross no link.

    Args:
        scope: What to look at.
    """
    if (missing := device_work_missing(scope.trace, "messages")) is not None:
        return missing
    ops = scope.trace.ops
    rows = np.flatnonzero((ops["role"] == COMM).to_numpy() & scope.is_inside)
    size, is_sized = op_sizes(scope, rows)
    is_sized &= size > 0
    rows, size = rows[is_sized], size[is_sized]
    start, end = (ops[name].to_numpy()[rows] for name in ("start_ns", "end_ns"))
    rank, kind = ops["rank"].to_numpy()[rows], ops["collective"].cat.codes.to_numpy()[rows]
    arrival, is_matched = _arrivals(scope, rows)
    _, place = np.unique(size, return_inverse=True)
    groups = group_rows(rank, kind + 1, place)
    first = np.array([members[0] for members in groups], np.int64)
    duration = _medians(end - start, groups)
    transfer = _medians(np.maximum(end - np.maximum(arrival, start), 0), groups)
    is_told = np.array([bool(is_matched[members].all()) for members in groups], bool)
    taken = np.where(is_told, transfer, duration)
    is_rate = (taken > 0) & (scope.trace.meta.run.get("transport") != labels.LOCAL_D2D)
    rate = np.divide(size[first] * 1e9, taken, out=np.zeros(len(first)), where=is_rate)
    return pd.DataFrame(
        {
            "rank": rank[first],
            "kind": ops["collective"].cat.categories.to_numpy()[kind[first]] if len(first) else [],
            "bytes": size[first],
            "count": [len(members) for members in groups],
            "median_ns": duration,
            "transfer_ns": pd.arrays.IntegerArray(transfer, ~is_told),
            "bytes_per_s": pd.arrays.FloatingArray(rate, ~is_rate),
        }
    )


def _arrivals(scope: Scope, rows: Int64Array) -> tuple[Int64Array, BoolArray]:
    """Return when the last participant of each op arrived, and whether that is known."""
    if isinstance(scope.arrivals, NotApplicable):
        return np.zeros(len(rows), np.int64), np.zeros(len(rows), bool)
    place = np.searchsorted(scope.arrivals.rows, rows)
    return scope.arrivals.last_ns[place], scope.arrivals.is_matched[place]


def _medians(values: Int64Array, groups: list[Int64Array]) -> Int64Array:
    return np.array([int(np.median(values[members])) for members in groups], np.int64)
