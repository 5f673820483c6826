"""Which host call launched which device work, and which NVTX range a host call lies in.

Both are joins of a million rows with a million: array kernels, no loops over rows.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from cptrace.intervals import Int64Array

BoolArray = npt.NDArray[np.bool_]

_MAX_TABLE_SLOTS_PER_ROW: Final = 8


class Launches(NamedTuple):
    """The launching call of each of N ops.

    Attributes:
        call: Position in the table of API calls, int64 of shape (N,); meaningless where there is none.
        is_known: Whether the call was recorded, bool of shape (N,).
    """

    call: Int64Array
    is_known: BoolArray


def find_launches(ops: pd.DataFrame, api_calls: pd.DataFrame) -> Launches:
    """Return the API call that launched each op: the first one with its process and correlation id.

    Args:
        ops: Device work, as `schema.OPS`.
        api_calls: Host calls, as `schema.API_CALLS`.
    """
    if ops.empty or api_calls.empty:
        return Launches(np.zeros(len(ops), np.int64), np.zeros(len(ops), bool))
    processes = pd.unique(api_calls["process"])
    op_key, op_has = _keys(ops, processes)
    call_key, call_has = _keys(api_calls, processes)
    position = np.flatnonzero(call_has)
    found, is_known = lookup(call_key[position], op_key)
    return Launches(position[found], is_known & op_has)


def _keys(frame: pd.DataFrame, processes: npt.NDArray[np.int64]) -> tuple[Int64Array, BoolArray]:
    """Return (process, correlation id) as one integer per row, and which rows have both."""
    owner = pd.Index(processes).get_indexer(frame["process"])
    correlation = frame["correlation_id"]
    has_both = (owner >= 0) & ~correlation.isna().to_numpy()
    # CUPTI's ids are 32 bits wide.
    return correlation.to_numpy(dtype=np.int64, na_value=0) + (owner.astype(np.int64) << 32), has_both


def lookup(keys: Int64Array, wanted: Int64Array) -> tuple[Int64Array, BoolArray]:
    """Return for each wanted key the first position at which `keys` holds it, and whether it does.

    Correlation ids are nearly dense within a process: a table by key then beats sorting and searching several times.

    Args:
        keys: Keys of shape (K,), in any order, perhaps repeated.
        wanted: Keys of shape (N,).
    """
    if not len(keys) or not len(wanted):
        return np.zeros(len(wanted), np.int64), np.zeros(len(wanted), bool)
    base, block = np.unique(keys >> 32, return_inverse=True)
    low = np.array([keys[block == b].min() for b in range(len(base))])
    span = np.array([keys[block == b].max() for b in range(len(base))]) - low + 1
    if int(span.sum()) > _MAX_TABLE_SLOTS_PER_ROW * len(keys) + 1024:
        return _lookup_by_sorting(keys, wanted)
    offset = np.cumsum(span) - span
    table = np.full(int(span.sum()), -1, np.int64)
    backwards = slice(None, None, -1)  # so that the first of repeated keys is written last
    table[(keys - low[block] + offset[block])[backwards]] = np.arange(len(keys))[backwards]
    wanted_block = np.minimum(np.searchsorted(base, wanted >> 32), len(base) - 1)
    within = wanted - low[wanted_block]
    is_inside = (within >= 0) & (within < span[wanted_block])
    found = table[np.where(is_inside, within + offset[wanted_block], 0)]
    is_known = is_inside & (found >= 0)
    return np.where(is_known, found, 0), is_known


def _lookup_by_sorting(keys: Int64Array, wanted: Int64Array) -> tuple[Int64Array, BoolArray]:
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    place = np.minimum(np.searchsorted(ordered, wanted, side="left"), len(ordered) - 1)
    is_known = ordered[place] == wanted
    return np.where(is_known, order[place], 0), is_known


def names_match(names: pd.Series, pattern: str) -> BoolArray:
    """Return which names a pattern is found in, bool of shape (N,); a missing name never matches.

    Args:
        names: Categorical texts.
        pattern: Regular expression in the RE2 dialect, applied once per distinct text.
    """
    is_match = pc.match_substring_regex(pa.array(names.cat.categories, pa.string()), pattern).to_numpy(False)
    return np.append(is_match, False).astype(bool)[names.cat.codes.to_numpy()]


def closed_ranges(ranges: pd.DataFrame) -> pd.DataFrame:
    """Return the ranges that have an end.

    Args:
        ranges: Ranges, as `schema.RANGES`.
    """
    return ranges[~ranges["end_ns"].isna()]


def innermost_ranges(
    ranges: pd.DataFrame, thread: Int64Array, instant_ns: Int64Array, *, by: str = "thread"
) -> tuple[Int64Array, BoolArray]:
    """Return the innermost of the given ranges around each instant of a thread, and whether there is one.

    Args:
        ranges: Closed ranges, as `schema.RANGES`; of those that overlap without nesting, the later one wins.
        thread: Thread (or process, see `by`) of each instant, int64 of shape (N,).
        instant_ns: Host time of each instant in ns, int64 of shape (N,).
        by: Column of `ranges` that must equal `thread`: "thread", or "process" for ranges that speak for all its threads.
    """
    found = np.zeros(len(instant_ns), np.int64)
    is_found = np.zeros(len(instant_ns), bool)
    owners = ranges[by].to_numpy()
    start = ranges["start_ns"].to_numpy()
    end = ranges["end_ns"].to_numpy(dtype=np.int64, na_value=0)
    for owner in pd.unique(owners):
        rows = np.flatnonzero(owners == owner)
        queries = np.flatnonzero(thread == owner)
        if len(queries):
            place, is_inside = _innermost(start[rows], end[rows], instant_ns[queries])
            found[queries] = rows[place]
            is_found[queries] = is_inside
    return found, is_found


def _innermost(start: Int64Array, end: Int64Array, instant: Int64Array) -> tuple[Int64Array, BoolArray]:
    """Return the innermost interval around each instant, level by level of nesting from the outside in."""
    order = np.lexsort((-end, start))
    start, end = start[order], end[order]
    # An interval is as deep as the number of earlier ones that are still open when it starts.
    depth = np.arange(len(start)) - np.searchsorted(np.sort(end), start, side="right")
    found = np.zeros(len(instant), np.int64)
    is_inside = np.zeros(len(instant), bool)
    for level in np.unique(depth):
        members = np.flatnonzero(depth == level)
        place = np.searchsorted(start[members], instant, side="right") - 1
        is_hit = (place >= 0) & (instant < end[members[np.maximum(place, 0)]])
        found[is_hit] = members[place[is_hit]]
        is_inside |= is_hit
    return order[found], is_inside
