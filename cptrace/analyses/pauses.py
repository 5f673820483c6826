"""Windows of which shares say little: those that a pause fills, and those that are not alike on all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from cptrace import intervals
from cptrace.analyses.scope import Scope
from cptrace.analyses.windows import BY_STEPS
from cptrace.trace import Note
from cptrace.units import format_instant, format_ns, joined

_MAX_NAMED: Final = 6


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


def unequal_windows(scope: Scope) -> Iterable[Note]:
    """Yield that some ranks are accounted over their steps and others, which have none, over everything.

    Args:
        scope: What to look at.
    """
    with_steps = [rank for rank in scope.ranks if scope.windows[rank].basis == BY_STEPS]
    without = [rank for rank in scope.ranks if scope.windows[rank].basis != BY_STEPS]
    if not with_steps or not without:
        return
    names = [str(rank) for rank in without]
    more = [f"{len(names) - _MAX_NAMED} more"] if len(names) > _MAX_NAMED else []
    who = f"{'ranks' if len(names) > 1 else 'rank'} {joined([*names[:_MAX_NAMED], *more])}"
    have, are = ("have", "are") if len(names) > 1 else ("has", "is")
    yield Note(
        "unequal-windows",
        f"{who} {have} no step ranges and {are} accounted for from first to last operation, warm-up included, the"
        " others over their steps: means over ranks mix the two; put step ranges on all ranks, or use --window all",
        len(without),
    )
