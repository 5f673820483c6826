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


def keeps(dropped: BoolArray | None, count: int) -> BoolArray:
    """Return what is left where some is dropped, bool of shape (count,).

    Args:
        dropped: What is gone; None for nothing.
        count: How many there are.
    """
    return np.ones(count, bool) if dropped is None else ~dropped
