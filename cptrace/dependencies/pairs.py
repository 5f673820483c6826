"""Which record of its event each wait, and each blocking synchronisation, stands for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from cptrace.intervals import BoolArray, Int64Array
from cptrace.launches import Key, call_times, calls_of, lookup
from cptrace.trace import Trace


class Pairs(NamedTuple):
    """The record that each of S syncs stands for.

    Attributes:
        record: Row in the table of event records, int64 of shape (S,); meaningless where none was found.
        is_found: Whether one was found, bool of shape (S,).
        is_named: Whether the export names it; else it is the latest earlier one by host order, bool of shape (S,).
    """

    record: Int64Array
    is_found: BoolArray
    is_named: BoolArray


class EventPairs(NamedTuple):
    """Records of events, and the waits of streams for them.

    Attributes:
        record_ns: Host time of each record: that of its API call, int64; meaningless where that is not known.
        has_record_ns: Whether it is known.
        waits: Rows in the table of syncs that make a stream wait, ascending.
        of_waits: The record that each wait stands for.
    """

    record_ns: Int64Array
    has_record_ns: BoolArray
    waits: Int64Array
    of_waits: Pairs


def find_pairs(trace: Trace) -> EventPairs:
    """Return the records, the waits, and which belong together.

    Args:
        trace: Trace as a source read it.
    """
    calls = calls_of(trace.event_records, trace.api_calls)
    record_ns = call_times(trace.api_calls, calls)["start_ns"]
    waits = np.flatnonzero((trace.syncs["kind"] == "stream_wait").to_numpy())
    return EventPairs(record_ns, calls.is_known, waits, pair_syncs(trace, waits, record_ns, calls.is_known))


def pair_syncs(trace: Trace, rows: Int64Array, record_ns: Int64Array, has_record_ns: BoolArray) -> Pairs:
    """Return the record that each of some syncs stands for.

    Args:
        trace: Trace as a source read it.
        rows: Rows of the table of syncs, all of which concern an event.
        record_ns: Host time of each record.
        has_record_ns: Whether it is known.
    """
    records, syncs = trace.event_records, trace.syncs.iloc[rows]
    owner, processes = pd.factorize(records["process"].to_numpy())
    mine = pd.Index(processes).get_indexer(syncs["process"])
    by_name, is_named = lookup(_named(owner, records), _named(mine, syncs))
    by_order, is_ordered = _latest_record(records, syncs, record_ns, has_record_ns)
    if records["event_sync_id"].notna().any():
        # Where records have names, one that a sync names and that is not there was lost: any other would be wrong.
        is_ordered &= syncs["event_sync_id"].isna().to_numpy()
    return Pairs(np.where(is_named, by_name, by_order), is_named | is_ordered, is_named)


def _named(owner: npt.NDArray[np.integer], frame: pd.DataFrame) -> Key:
    number = frame["event_sync_id"]
    is_there = (owner >= 0) & ~number.isna().to_numpy()
    return Key(np.maximum(owner, 0), number.to_numpy(dtype=np.int64, na_value=0), is_there)


def _latest_record(
    records: pd.DataFrame, syncs: pd.DataFrame, record_ns: Int64Array, has_record_ns: BoolArray
) -> tuple[Int64Array, BoolArray]:
    """Return for each sync the latest earlier record of the same event by host order, and whether there is one."""
    names = ["process", "context", "event_id"]
    event = pd.concat([records[names], syncs[names]]).astype("Int64")
    code = event.groupby(names, sort=False, dropna=False).ngroup().to_numpy()
    of_record, of_sync = code[: len(records)], code[len(records) :]
    usable = np.flatnonzero(has_record_ns)
    order = usable[np.lexsort((record_ns[usable], of_record[usable]))]
    if not len(order) or not len(syncs):
        return np.zeros(len(syncs), np.int64), np.zeros(len(syncs), bool)
    # In one order by (event, time), what stands before a sync are the earlier records, the latest last.
    events = np.concatenate((of_record[order], of_sync))
    times = np.concatenate((record_ns[order], syncs["start_ns"].to_numpy()))
    is_sync = np.repeat([0, 1], (len(order), len(syncs)))
    merged = np.lexsort((is_sync, times, events))
    n_records_before = np.empty(len(merged), np.int64)
    n_records_before[merged] = np.cumsum(is_sync[merged] == 0)
    last = n_records_before[len(order) :] - 1
    latest = order[np.maximum(last, 0)]
    return latest, (last >= 0) & (of_record[latest] == of_sync)
