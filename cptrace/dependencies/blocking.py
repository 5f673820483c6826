"""Host calls that blocked until device work was done, and the work that they waited for."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from cptrace.dependencies.items import RECORD, Items
from cptrace.dependencies.pairs import EventPairs, pair_syncs
from cptrace.intervals import BoolArray, Int64Array
from cptrace.launches import Launches, call_times, calls_of, names_match
from cptrace.trace import Trace

# An event that is only asked about does not block: NCCL's watchdog does so all the time.
_POLLS: Final = r"^cu(da)?(Event|Stream)Query"


class Blocking(NamedTuple):
    """B host calls that blocked, ordered by thread and start.

    Attributes:
        sync: Row in the table of syncs, int64 of shape (B,).
        thread: Global thread id, int64 of shape (B,).
        start_ns: Start of the call, int64 of shape (B,).
        end_ns: End of the call, int64 of shape (B,).
        producer: Row of the op that it waited for, int64 of shape (B,); meaningless where there is none.
        has_producer: Whether there is such an op, bool of shape (B,).
    """

    sync: Int64Array
    thread: Int64Array
    start_ns: Int64Array
    end_ns: Int64Array
    producer: Int64Array
    has_producer: BoolArray


def find_blocking(trace: Trace, launches: Launches, pairs: EventPairs, items: Items) -> Blocking:
    """Return the host calls that blocked.

    Args:
        trace: Trace as a source read it.
        launches: The launching call of each op.
        pairs: Waits and records.
        items: Everything in stream order.
    """
    calls = calls_of(trace.syncs, trace.api_calls)
    is_poll = np.zeros(len(trace.syncs), bool)
    if len(trace.api_calls):
        is_poll = names_match(trace.api_calls["name"], _POLLS)[calls.call] & calls.is_known
    is_wait = (trace.syncs["kind"] == "stream_wait").to_numpy()
    rows = np.flatnonzero(~is_wait & ~is_poll & calls.is_known)
    thread = call_times(trace.api_calls, calls)["thread"][rows]
    producer, has_producer = _producers(trace, launches, pairs, items, rows)
    start, end = (trace.syncs[name].to_numpy()[rows] for name in ("start_ns", "end_ns"))
    order = np.lexsort((start, thread))
    return Blocking(
        rows[order], thread[order], start[order], end[order], producer[order], has_producer[order]
    )


def _producers(
    trace: Trace, launches: Launches, pairs: EventPairs, items: Items, rows: Int64Array
) -> tuple[Int64Array, BoolArray]:
    """Return the op that each blocking sync waited for, and whether there is one."""
    producer, is_found = np.zeros(len(rows), np.int64), np.zeros(len(rows), bool)
    is_event = (trace.syncs["kind"] == "event").to_numpy()[rows]
    found = pair_syncs(trace, rows[is_event], pairs.record_ns, pairs.has_record_ns)
    if len(trace.event_records):
        op, has_op = items.last_op_before(items.position[RECORD][np.where(found.is_found, found.record, 0)])
        producer[is_event], is_found[is_event] = op, has_op & found.is_found
    if len(trace.ops):
        producer[~is_event], is_found[~is_event] = _last_to_end(trace, launches, rows[~is_event])
    return producer, is_found


def _last_to_end(trace: Trace, launches: Launches, rows: Int64Array) -> tuple[Int64Array, BoolArray]:
    """Return the op of each sync's stream (or context), launched before the sync, that ended last."""
    ops, syncs = trace.ops, trace.syncs.iloc[rows]
    found, is_found = np.zeros(len(rows), np.int64), np.zeros(len(rows), bool)
    launch_ns, end_ns = call_times(trace.api_calls, launches)["start_ns"], ops["end_ns"].to_numpy()
    process, context, stream = (ops[name].to_numpy() for name in ("process", "context", "stream"))
    scopes = syncs.groupby(["process", "context", "stream"], dropna=False, sort=False).ngroup().to_numpy()
    for scope in range(int(scopes.max(initial=-1)) + 1):
        members = np.flatnonzero(scopes == scope)
        one = syncs.iloc[int(members[0])]
        mine = (process == one["process"]) & (context == one["context"]) & launches.is_known
        if one["kind"] == "stream":
            mine &= stream == one["stream"]
        in_scope = np.flatnonzero(mine)
        if len(in_scope):
            in_scope = in_scope[np.argsort(launch_ns[in_scope], kind="stable")]
            n_launched = np.searchsorted(
                launch_ns[in_scope], syncs["start_ns"].to_numpy()[members], side="left"
            )
            found[members] = in_scope[_last_raised(end_ns[in_scope])[np.maximum(n_launched - 1, 0)]]
            is_found[members] = n_launched > 0
    return found, is_found


def _last_raised(values: Int64Array) -> Int64Array:
    """Return for each place the last place up to it where the running maximum was reached: its largest value so far."""
    is_reached = values == np.maximum.accumulate(values)
    return np.maximum.accumulate(np.where(is_reached, np.arange(len(values)), 0))
