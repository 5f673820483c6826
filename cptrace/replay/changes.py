"""What a replay does otherwise than the recorded run."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cptrace.intervals import BoolArray, Int64Array


def _no_rows() -> Int64Array:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """What is to be different from a recording of N ops, E event edges, B blocking calls and R resource edges.

    An op that nothing is left to hold back starts when it did.

    Attributes:
        drop_previous: Ops that do not wait for the op before them in their stream, bool of shape (N,).
        drop_event: Edges of `dependencies.events` that are gone, bool of shape (E,).
        drop_blocking: Calls of `dependencies.blocking` that do not wait: the host goes on after what a call takes that
            finds nothing to wait for, bool of shape (B,).
        drop_launch: Ops that do not wait for their launch, bool of shape (N,).
        drop_resource: Edges of `Recording.resources` that are gone, bool of shape (R,).
        drop_residual: Ops without their delay that nothing explains, bool of shape (N,).
        added_producer: Rows of ops that others now wait for, int64 of shape (A,).
        added_consumer: Rows of the ops that wait for them, int64 of shape (A,).
        duration_ns: Duration of each op in ns, int64 of shape (N,); of one that meets ops of other ranks, the time from
            the last arrival to its end.
        host_gap_ns: Most host time between two successive launches of a thread, in ns.
    """

    drop_previous: BoolArray | None = None
    drop_event: BoolArray | None = None
    drop_blocking: BoolArray | None = None
    drop_launch: BoolArray | None = None
    drop_resource: BoolArray | None = None
    drop_residual: BoolArray | None = None
    added_producer: Int64Array = field(default_factory=_no_rows)
    added_consumer: Int64Array = field(default_factory=_no_rows)
    duration_ns: Int64Array | None = None
    host_gap_ns: int | None = None


def combine(one: Changes, other: Changes, recorded_ns: Int64Array) -> Changes:
    """Return what is different if both of two changes are made: what either drops is gone, what either adds is there.

    An op whose duration both change takes both ratios.

    Args:
        one: What is different.
        other: What else is different.
        recorded_ns: Recorded duration of each op, as `Recording.duration_ns`.
    """
    gaps = [gap for gap in (one.host_gap_ns, other.host_gap_ns) if gap is not None]
    return Changes(
        drop_previous=_either(one.drop_previous, other.drop_previous),
        drop_event=_either(one.drop_event, other.drop_event),
        drop_blocking=_either(one.drop_blocking, other.drop_blocking),
        drop_launch=_either(one.drop_launch, other.drop_launch),
        drop_resource=_either(one.drop_resource, other.drop_resource),
        drop_residual=_either(one.drop_residual, other.drop_residual),
        added_producer=np.concatenate((one.added_producer, other.added_producer)),
        added_consumer=np.concatenate((one.added_consumer, other.added_consumer)),
        duration_ns=_product(one.duration_ns, other.duration_ns, recorded_ns),
        host_gap_ns=min(gaps, default=None),
    )


def _either(one: BoolArray | None, other: BoolArray | None) -> BoolArray | None:
    if one is None or other is None:
        return other if one is None else one
    return one | other


def _product(one: Int64Array | None, other: Int64Array | None, recorded_ns: Int64Array) -> Int64Array | None:
    if one is None or other is None:
        return other if one is None else one
    ratio = other / np.maximum(recorded_ns, 1)
    return np.asarray(np.rint(one * ratio), np.int64)


def keeps(dropped: BoolArray | None, count: int) -> BoolArray:
    """Return what is left where some is dropped, bool of shape (count,).

    Args:
        dropped: What is gone; None for nothing.
        count: How many there are.
    """
    return np.ones(count, bool) if dropped is None else ~dropped
