"""Pauses that fill most of a window: its shares then say little about the rest of it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from cptrace import intervals
from cptrace.analyses.scope import Scope
from cptrace.trace import Note
from cptrace.units import format_instant, format_ns


def long_pauses(scope: Scope) -> Iterable[Note]:
    """Yield a note for each rank of which one pause is more than half of the window.

    Args:
        scope: What to look at.
    """
    for rank in scope.ranks:
        window, activity = scope.windows[rank].pieces, scope.activities[rank]
        busy = intervals.merge(activity.compute, activity.comm, activity.exposed_rest)
        free = intervals.gaps(busy, window)
        lengths_ns, window_ns = free.end_ns - free.start_ns, intervals.total_ns(window)
        if 2 * int(lengths_ns.max(initial=0)) <= window_ns:
            continue
        longest = int(np.argmax(lengths_ns))
        start, end = (format_instant(int(edge[longest])) for edge in free)
        yield Note(
            "long-pause",
            f"rank {rank} does nothing for {format_ns(int(lengths_ns[longest]))} of {format_ns(window_ns)}, from"
            f" {start} to {end}; --window can leave that out",
        )
