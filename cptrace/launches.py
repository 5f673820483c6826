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

from cptrace.intervals import BoolArray, Int64Array

_MAX_TABLE_SLOTS_PER_ROW: Final = 8
# Calls that put work on a device, in the runtime and the driver of every maker.
_LAUNCHING: Final = "(?i)launch|memcpy|memset"


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
    return calls_of(ops, api_calls)


def calls_of(frame: pd.DataFrame, api_calls: pd.DataFrame) -> Launches:
    """Return the API call of each row of a table with the columns process and correlation_id.

    Args:
        frame: Rows of any such table.
        api_calls: Host calls, as `schema.API_CALLS`.
    """
    if frame.empty or api_calls.empty:
        return Launches(np.zeros(len(frame), np.int64), np.zeros(len(frame), bool))
    owner, processes = pd.factorize(api_calls["process"].to_numpy())
    mine = pd.Index(processes).get_indexer(frame["process"])
    call, is_known = lookup(_key(owner, api_calls), _key(mine, frame))
    return Launches(call, is_known)


def call_times(api_calls: pd.DataFrame, launches: Launches) -> dict[str, Int64Array]:
    """Return thread, start_ns and end_ns of the call of each row, int64 of shape (N,); meaningless where not known.

    Args:
        api_calls: Host calls, as `schema.API_CALLS`.
        launches: The call of each row.
    """
    names = ("thread", "start_ns", "end_ns")
    if api_calls.empty:
        return {name: np.zeros(len(launches.call), np.int64) for name in names}
    return {name: api_calls[name].to_numpy()[launches.call] for name in names}


def shared_ids(api_calls: pd.DataFrame) -> pd.DataFrame:
    """Return the correlation ids that several launches of a process have, so that none of them can be told from it.

    A call of the driver that lies within one of the runtime is a part of the same launch.

    Args:
        api_calls: Host calls, as `schema.API_CALLS`.

    Returns:
        One row for each such id: process and correlation_id, both int64.
    """
    columns = ["process", "correlation_id"]
    owner, _ = pd.factorize(api_calls["process"].to_numpy())
    if not _has_repeats(key := _key(owner, api_calls)):
        return pd.DataFrame({name: np.zeros(0, np.int64) for name in columns})
    calls = api_calls[key.is_there & names_match(api_calls["name"], _LAUNCHING)]
    calls = calls[calls.duplicated(columns, keep=False)].astype({"correlation_id": np.int64})
    calls = calls.sort_values([*columns, "thread", "start_ns", "end_ns"], ascending=[True] * 4 + [False])
    by_thread = calls.groupby([*columns, "thread"], sort=False)
    end_before = (
        by_thread["end_ns"]
        .cummax()
        .groupby([calls[name] for name in (*columns, "thread")], sort=False)
        .shift()
    )
    # Of a thread only what lies within a call can begin before it ends; calls of no duration begin together.
    is_part = (calls["start_ns"] < end_before) | (calls["start_ns"] == by_thread["start_ns"].shift())
    launches = calls.loc[~is_part, columns]
    return launches[launches.duplicated(columns)].drop_duplicates(ignore_index=True)


def without_shared_ids(ops: pd.DataFrame, shared: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """Return device work whose launch cannot be told without its correlation ids, and how much that is.

    Args:
        ops: Device work, as `schema.OPS`.
        shared: Correlation ids of several launches, as `shared_ids` returns them.
    """
    if ops.empty or shared.empty:
        return ops, 0
    owner, processes = pd.factorize(shared["process"].to_numpy())
    mine = pd.Index(processes).get_indexer(ops["process"])
    _, is_shared = lookup(_key(owner, shared), _key(mine, ops))
    if not is_shared.any():
        return ops, 0
    number = ops["correlation_id"].array
    ids = pd.arrays.IntegerArray(number.to_numpy(np.int64, na_value=0), number.isna() | is_shared)
    return ops.assign(correlation_id=ids), int(np.count_nonzero(is_shared))


class Key(NamedTuple):
    """A pair of small numbers per row.

    Attributes:
        owner: Which of a few owners, from 0, of shape (N,).
        number: Number within the owner, of shape (N,).
        is_there: Whether the row has both, bool of shape (N,).
    """

    owner: Int64Array
    number: Int64Array
    is_there: BoolArray


def _key(owner: npt.NDArray[np.integer], frame: pd.DataFrame) -> Key:
    """Return (process, correlation id) per row, where the process is known."""
    is_there = owner >= 0
    correlation = frame["correlation_id"]
    if correlation.hasnans:
        is_there &= ~correlation.isna().to_numpy()
    return Key(np.maximum(owner, 0), correlation.to_numpy(dtype=np.int64, na_value=0), is_there)


def _has_repeats(keys: Key) -> bool:
    """Return whether any two rows have the same key; a table of marks beats sorting where numbers are nearly dense."""
    owner, number = keys.owner[keys.is_there], keys.number[keys.is_there]
    if len(number) < 2:
        return False
    low, n_slots = int(number.min()), int(number.max()) - int(number.min()) + 1
    n_owners = int(owner.max()) + 1
    if n_slots * n_owners > _MAX_TABLE_SLOTS_PER_ROW * len(number) + 1024:
        return bool(pd.DataFrame({"owner": owner, "number": number}).duplicated().any())
    is_used = np.zeros(n_slots * n_owners, bool)
    is_used[owner * n_slots + (number - low)] = True
    return int(np.count_nonzero(is_used)) < len(number)


def lookup(keys: Key, wanted: Key) -> tuple[Int64Array, BoolArray]:
    """Return for each wanted key the first position at which `keys` holds it, and whether it does.

    Correlation ids are nearly dense within a process: a table by key then beats sorting and searching several times.

    Args:
        keys: Keys of K rows, in any order, perhaps repeated.
        wanted: Keys of N rows.
    """
    rows = np.flatnonzero(keys.is_there)
    if not len(rows) or not len(wanted.number):
        return np.zeros(len(wanted.number), np.int64), np.zeros(len(wanted.number), bool)
    owner, number = keys.owner[rows], keys.number[rows]
    n_owners = max(int(owner.max()), int(wanted.owner.max())) + 1
    low = np.full(n_owners, np.iinfo(np.int64).max)
    high = np.full(n_owners, np.iinfo(np.int64).min)
    np.minimum.at(low, owner, number)
    np.maximum.at(high, owner, number)
    # As Python's integers: numbers of a damaged file may lie further apart than 64 bits can tell.
    n_slots = [max(last - first + 1, 0) for first, last in zip(low.tolist(), high.tolist(), strict=True)]
    if sum(n_slots) > _MAX_TABLE_SLOTS_PER_ROW * len(rows) + 1024:
        return _lookup_by_sorting(Key(owner, number, keys.is_there[rows]), rows, wanted)
    span = np.array(n_slots, np.int64)
    offset = np.cumsum(span) - span - low
    table = np.full(int(span.sum()), -1, np.int64)
    table[(number + offset[owner])[::-1]] = rows[
        ::-1
    ]  # backwards: of repeated keys the first is written last
    is_inside = wanted.is_there & (wanted.number >= low[wanted.owner]) & (wanted.number <= high[wanted.owner])
    found = table[np.where(is_inside, wanted.number + offset[wanted.owner], 0)]
    is_known = is_inside & (found >= 0)
    return np.where(is_known, found, 0), is_known


def _lookup_by_sorting(keys: Key, rows: Int64Array, wanted: Key) -> tuple[Int64Array, BoolArray]:
    """Return the same as `lookup` for numbers too sparse for a table."""
    _, rank = np.unique(np.concatenate((keys.number, wanted.number)), return_inverse=True)
    n_numbers = len(rank) + 1
    key = keys.owner * n_numbers + rank[: len(rows)]
    goal = wanted.owner * n_numbers + rank[len(rows) :]
    order = np.argsort(key, kind="stable")
    place = np.minimum(np.searchsorted(key[order], goal, side="left"), len(order) - 1)
    is_known = (key[order][place] == goal) & wanted.is_there
    return np.where(is_known, rows[order[place]], 0), is_known


def names_match(names: pd.Series, pattern: str) -> BoolArray:
    """Return which names a pattern is found in, bool of shape (N,); a missing name never matches.

    Args:
        names: Categorical texts.
        pattern: Regular expression in the RE2 dialect, applied once per distinct text.
    """
    is_match = pc.match_substring_regex(pa.array(names.cat.categories, pa.string()), pattern).to_numpy(False)
    return np.append(is_match, False).astype(bool)[names.cat.codes.to_numpy()]


def distinct_names(names: pd.Series) -> tuple[list[str | None], Int64Array]:
    """Return the distinct texts of a column, None for a missing one, and the place among them of each row's.

    Args:
        names: Categorical texts; the categories may be many more than are used.
    """
    slot, codes = pd.factorize(names.cat.codes.to_numpy())
    texts = [None if code < 0 else str(names.cat.categories[code]) for code in codes.tolist()]
    return texts, slot


def closed_ranges(ranges: pd.DataFrame) -> pd.DataFrame:
    """Return the ranges that have an end.

    Args:
        ranges: Ranges, as `schema.RANGES`.
    """
    return ranges[~ranges["end_ns"].isna()]


def innermost_ranges(
    ranges: pd.DataFrame, thread: Int64Array, instant_ns: Int64Array
) -> tuple[Int64Array, BoolArray]:
    """Return the innermost of the given ranges around each instant of a thread, and whether there is one.

    Args:
        ranges: Closed ranges, as `schema.RANGES`; of those that overlap without nesting, the later started wins.
        thread: Thread of each instant, int64 of shape (N,).
        instant_ns: Host time of each instant in ns, int64 of shape (N,).
    """
    found = np.zeros(len(instant_ns), np.int64)
    is_found = np.zeros(len(instant_ns), bool)
    owners = ranges["thread"].to_numpy()
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
    """Return the last started interval around each instant, by going from the last started one outwards."""
    order = np.lexsort((-end, start))
    start, end = start[order], end[order]
    around = _before_that_ends_later(end)
    place = np.searchsorted(start, instant, side="right") - 1
    open_queries = np.flatnonzero(place >= 0)
    # One round per level of nesting: of what has ended, nothing that ended earlier still needs a look.
    while len(open_queries := open_queries[end[place[open_queries]] <= instant[open_queries]]):
        place[open_queries] = around[place[open_queries]]
        open_queries = open_queries[place[open_queries] >= 0]
    is_inside = place >= 0
    return order[np.where(is_inside, place, 0)], is_inside


def _before_that_ends_later(end: Int64Array) -> Int64Array:
    """Return for each interval the last one before it that ends later, -1 where there is none."""
    before = np.arange(len(end)) - 1
    rows = np.arange(len(end))
    # What an interval leaps over ends no later than the one it lands on did: all leap at once, further each time.
    while len(rows := rows[before[rows] >= 0]) and len(rows := rows[end[before[rows]] <= end[rows]]):
        before[rows] = before[before[rows]]
    return before
