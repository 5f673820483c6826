"""What a replay starts from: every edge of the recorded run, and the delays that no edge explains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import pandas as pd

from cptrace.dependencies import Dependencies
from cptrace.intervals import BoolArray, Int64Array
from cptrace.outcome import NotApplicable
from cptrace.peers import Arrivals
from cptrace.replay.host import Host, find_host
from cptrace.replay.meetings import Meetings, find_meetings
from cptrace.replay.resources import ResourceEdges, find_resource_edges
from cptrace.trace import Trace

_NEVER: Final = np.iinfo(np.int64).min
_ALWAYS: Final = np.iinfo(np.int64).max


class StreamOrder(NamedTuple):
    """All N ops, stream by stream, as the streams ran them.

    Attributes:
        rows: Row in the table of ops at each place, int64 of shape (N,).
        place: The place of each row, int64 of shape (N,).
        is_first: Whether the op at each place is the first of its stream, bool of shape (N,).
    """

    rows: Int64Array
    place: Int64Array
    is_first: BoolArray


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A recorded run, ready to be replayed.

    Attributes:
        ops: Classified device work of N rows, ordered by start.
        dependencies: What each op had to wait for.
        order: Ops stream by stream.
        meetings: Where communication ops of different ranks meet.
        host: How the host's threads hang on device work.
        resources: Inferred order of ops that share a resource.
        is_event_kept: Which edges of `dependencies.events` can be true: a consumer did not start before its producer,
            bool of shape (E,).
        launch_ns: End of the launch of each op in ns; where nothing is known of why an op started, its start, int64 of
            shape (N,); meaningless without `has_launch`.
        has_launch: Whether there is one, bool of shape (N,).
        residual_ns: Start of each op after all that it waited for, in ns, int64 of shape (N,); negative within the
            clocks' tolerance.
    """

    ops: pd.DataFrame
    dependencies: Dependencies
    order: StreamOrder
    meetings: Meetings
    host: Host
    resources: ResourceEdges
    is_event_kept: BoolArray
    launch_ns: Int64Array
    has_launch: BoolArray
    residual_ns: Int64Array

    @property
    def start_ns(self) -> Int64Array:
        """Recorded start of each op in ns, int64 of shape (N,)."""
        return self.ops["start_ns"].to_numpy()

    @property
    def end_ns(self) -> Int64Array:
        """Recorded end of each op in ns, int64 of shape (N,)."""
        return self.ops["end_ns"].to_numpy()

    @property
    def duration_ns(self) -> Int64Array:
        """Recorded duration of each op in ns, from the last arrival where it met others, int64 of shape (N,)."""
        return self.end_ns - self.meetings.arrival_ns


def make_recording(trace: Trace, dependencies: Dependencies, arrivals: Arrivals | NotApplicable) -> Recording:
    """Return a trace as a replay needs it.

    Args:
        trace: Classified trace.
        dependencies: What each op had to wait for.
        arrivals: Which communication ops of different ranks belong together, or why that cannot be told.
    """
    start, end = trace.ops["start_ns"].to_numpy(), trace.ops["end_ns"].to_numpy()
    order = _stream_order(dependencies.queue)
    meetings = find_meetings(start, end, _next_start(start, order), arrivals)
    producer, consumer = dependencies.events.producer, dependencies.events.consumer
    is_kept = (meetings.arrival_ns[producer] <= start[consumer]) & (producer < consumer)
    producer, consumer = producer[is_kept], consumer[is_kept]
    has_launch = dependencies.is_launch_known | ~dependencies.has_previous
    has_launch[consumer] = dependencies.is_launch_known[consumer]
    launch_ns = np.where(dependencies.is_launch_known, dependencies.launch_end_ns, start)
    ready = np.where(has_launch, launch_ns, _NEVER)
    np.maximum(ready, end[dependencies.previous], out=ready, where=dependencies.has_previous)
    np.maximum.at(ready, consumer, end[producer])
    resources = find_resource_edges(trace.ops, dependencies.queue, start - ready)
    np.maximum.at(ready, resources.consumer, end[resources.producer])
    return Recording(
        ops=trace.ops,
        dependencies=dependencies,
        order=order,
        meetings=meetings,
        host=find_host(trace, dependencies, meetings.arrival_ns),
        resources=resources,
        is_event_kept=is_kept,
        launch_ns=launch_ns,
        has_launch=has_launch,
        residual_ns=start - ready,
    )


def _stream_order(queue: Int64Array) -> StreamOrder:
    """Return ops by stream; within a stream they run in the order of the table, which is that of their starts."""
    small = queue.astype(np.uint16) if queue.max(initial=0) < 2**16 else queue
    rows = np.argsort(small, kind="stable")
    place = np.empty(len(rows), np.int64)
    place[rows] = np.arange(len(rows))
    return StreamOrder(rows, place, np.append(True, np.diff(queue[rows]) != 0)[: len(rows)])


def _next_start(start_ns: Int64Array, order: StreamOrder) -> Int64Array:
    """Return the start of the op after each in its stream; for the last of a stream, later than any."""
    following = np.full(len(start_ns), _ALWAYS)
    has_next = ~order.is_first[1:]
    following[order.rows[:-1][has_next]] = start_ns[order.rows[1:][has_next]]
    return following
