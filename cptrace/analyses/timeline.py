"""When each operation ran in which stream, for those who draw it."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from cptrace.analyses.scope import Scope
from cptrace.classify import ROLES
from cptrace.groups import group_rows
from cptrace.intervals import Int64Array
from cptrace.outcome import NotApplicable
from cptrace.timeline import Timeline, TimelineLane, TimelineStep

MAX_ENTRIES: Final = 250_000
"""Operations that a page can hold; of more, short neighbours are merged."""

_SLOTS_PER_LANE: Final = 1 << 14


def make_timeline(scope: Scope, max_entries: int = MAX_ENTRIES) -> Timeline:
    """Return the timeline of the ranks looked at, in and out of their windows.

    With more than `max_entries` operations, those of a stream that start in the same short slot of time and are shorter
    than it become one entry.

    Args:
        scope: What to look at.
        max_entries: How many operations may be kept as they are.
    """
    ops = scope.trace.ops
    rows = np.flatnonzero(np.isin(ops["rank"].to_numpy(), scope.ranks))
    start, end = (ops[name].to_numpy()[rows] for name in ("start_ns", "end_ns"))
    used, names = np.unique(ops["name"].cat.codes.to_numpy()[rows], return_inverse=True)
    roles = ops["role"].cat.codes.to_numpy()[rows].astype(np.int8)
    keys = [ops[name].to_numpy()[rows] for name in ("rank", "context", "stream")]
    groups = group_rows(*keys) if len(rows) else []
    extent_ns = int(end.max() - start.min()) if len(rows) else 0
    slot_ns = 0 if len(rows) <= max_entries else max(1, extent_ns // _SLOTS_PER_LANE)
    lanes = []
    for members in groups:
        rank, context, stream = (int(key[members[0]]) for key in keys)
        columns = (start[members], end[members], names[members].astype(np.int32), roles[members])
        entries = _merge(*columns, slot_ns) if slot_ns else (*columns, np.ones(len(members), np.int32))
        lanes.append(TimelineLane(rank, context, stream, *entries))
    texts = ops["name"].cat.categories.to_numpy(dtype=object)[used]
    return Timeline(tuple(map(str, texts)), ROLES, tuple(lanes), _steps(scope), slot_ns)


def _steps(scope: Scope) -> tuple[TimelineStep, ...]:
    if isinstance(scope.steps, NotApplicable):
        return ()
    columns = (scope.steps[name].tolist() for name in ("rank", "step", "start_ns", "end_ns"))
    return tuple(TimelineStep(*values) for values in zip(*columns, strict=True))


def _merge(
    start: Int64Array,
    end: Int64Array,
    name: npt.NDArray[np.int32],
    role: npt.NDArray[np.int8],
    slot_ns: int,
) -> tuple[Int64Array, Int64Array, npt.NDArray[np.int32], npt.NDArray[np.int8], npt.NDArray[np.int32]]:
    """Return the columns with short ops of one slot of time as one entry each."""
    slot, is_short = start // slot_ns, end - start < slot_ns
    is_first = np.ones(len(start), bool)
    is_first[1:] = ~is_short[1:] | ~is_short[:-1] | (slot[1:] != slot[:-1])
    first = np.flatnonzero(is_first)
    n_ops = np.diff(np.append(first, len(start))).astype(np.int32)
    busy = np.stack(
        [np.add.reduceat(np.where(role == code, end - start, 0), first) for code in range(len(ROLES))]
    )
    main = np.where(n_ops > 1, np.argmax(busy, axis=0), role[first]).astype(np.int8)
    names = np.where(n_ops > 1, -1, name[first]).astype(np.int32)
    return start[first], np.maximum.reduceat(end, first), names, main, n_ops
