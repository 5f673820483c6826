"""Stream order: all that the host put into each stream, ops, records of events and waits for them, in one row."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import pandas as pd

from cptrace.dependencies.pairs import EventPairs
from cptrace.groups import number_groups
from cptrace.intervals import BoolArray, Int64Array
from cptrace.launches import Launches, call_times
from cptrace.trace import Trace

OP: Final = 0
RECORD: Final = 1
WAIT: Final = 2

_NEVER: Final = np.iinfo(np.int64).min


class Items(NamedTuple):
    """All items, by stream, and within a stream as the host put them in.

    Attributes:
        queue: Number of each item's stream, counted over all processes and contexts.
        kind: `OP`, `RECORD` or `WAIT`.
        row: Row in the table of ops or of event records; for waits, place in the list of waits.
        n_ops_before: Number of ops before it in this order, over all streams.
        ops: Rows of ops in this order.
        position: For each kind, the place in this order of each of its rows.
    """

    queue: Int64Array
    kind: Int64Array
    row: Int64Array
    n_ops_before: Int64Array
    ops: Int64Array
    position: tuple[Int64Array, Int64Array, Int64Array]

    @property
    def op_queue(self) -> Int64Array:
        """Number of the stream of each row of the table of ops."""
        return self.queue[self.position[OP]]

    def last_op_before(self, position: Int64Array) -> tuple[Int64Array, BoolArray]:
        """Return the op before each place of the order in the same stream, and whether there is one.

        Args:
            position: Places in this order.
        """
        if not len(self.ops):
            return np.zeros(len(position), np.int64), np.zeros(len(position), bool)
        last = self.n_ops_before[position] - 1
        op = self.ops[np.maximum(last, 0)]
        return op, (last >= 0) & (self.op_queue[op] == self.queue[position])

    def first_op_after(self, position: Int64Array) -> tuple[Int64Array, BoolArray]:
        """Return the op after each place of the order, of no op itself, in the same stream, and whether there is one.

        Args:
            position: Places in this order.
        """
        if not len(self.ops):
            return np.zeros(len(position), np.int64), np.zeros(len(position), bool)
        after = self.n_ops_before[position]
        op = self.ops[np.minimum(after, len(self.ops) - 1)]
        return op, (after < len(self.ops)) & (self.op_queue[op] == self.queue[position])


def put_in_order(trace: Trace, launches: Launches, pairs: EventPairs) -> Items:
    """Return everything that was put into streams, in stream order.

    Args:
        trace: Trace as a source read it.
        launches: The launching call of each op.
        pairs: Waits and records.
    """
    queues = _number_queues(trace, pairs.waits)
    wait_ns = trace.syncs["start_ns"].to_numpy()[pairs.waits]
    host_ns = (_launch_order(trace, launches, queues[OP]), pairs.record_ns, wait_ns)
    sizes = [len(times) for times in host_ns]
    queue, kind = np.concatenate(queues), np.repeat(np.arange(len(sizes)), sizes)
    row = np.concatenate([_device_order(trace), *(np.arange(size) for size in sizes[1:])])
    # Ops of one stream run in the order of launch: their device order settles what host times leave open.
    order = np.lexsort((row, kind, np.concatenate(host_ns), queue))
    own_row = np.concatenate([np.arange(size) for size in sizes])[order]
    is_op = kind[order] == OP
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    ops, records, waits = np.split(place, np.cumsum(sizes)[:-1])
    return Items(
        queue[order], kind[order], own_row, np.cumsum(is_op) - is_op, own_row[is_op], (ops, records, waits)
    )


def previous_ops(items: Items) -> tuple[Int64Array, BoolArray]:
    """Return the row of the op before each op in its stream, and whether there is one.

    Args:
        items: Everything in stream order.
    """
    previous, has_previous = np.zeros(len(items.ops), np.int64), np.zeros(len(items.ops), bool)
    queue = items.op_queue[items.ops]
    previous[items.ops[1:]] = items.ops[:-1]
    has_previous[items.ops[1:]] = queue[1:] == queue[:-1]
    return previous, has_previous


def _number_queues(trace: Trace, waits: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return the number of the stream of each op, each record and each wait."""
    frames = (trace.ops, trace.event_records, trace.syncs.iloc[waits])
    keys = [
        pd.factorize(np.concatenate([frame[name].to_numpy(dtype=np.int64) for frame in frames]))[0]
        for name in ("process", "context", "stream")
    ]
    code, _ = number_groups(*keys)
    ops, records, rest = np.split(code, np.cumsum([len(frame) for frame in frames])[:-1])
    return ops, records, rest


def _device_order(trace: Trace) -> Int64Array:
    """Return the place of each op among all by start and end on the device."""
    order = np.lexsort((trace.ops["end_ns"].to_numpy(), trace.ops["start_ns"].to_numpy()))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return place


def _launch_order(trace: Trace, launches: Launches, queue: Int64Array) -> Int64Array:
    """Return the host time to order each op by: its launch, but never before that of the op ahead in its stream."""
    order = np.lexsort((trace.ops["end_ns"].to_numpy(), trace.ops["start_ns"].to_numpy(), queue))
    known = np.where(launches.is_known, call_times(trace.api_calls, launches)["start_ns"], _NEVER)[order]
    host_ns = np.empty(len(order), np.int64)
    host_ns[order] = pd.Series(known).groupby(queue[order], sort=False).cummax().to_numpy()
    return host_ns
