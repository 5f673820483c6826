"""Who waited for whom: the rank that came last to each transfer is the one that the others waited for."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from cptrace.analyses.scope import Scope
from cptrace.groups import number_groups
from cptrace.outcome import NotApplicable
from cptrace.peers import Arrivals

_COLUMNS: Final = ("rank", "peer", "count", "wait_ns")


def by_peer(scope: Scope) -> pd.DataFrame | NotApplicable:
    """Return one row per rank and peer that it waited for: how many communication ops, and how long.

    Times are sums over ops: where ops of a rank run at once, more than the union that its account states.

    Args:
        scope: What to look at.
    """
    if isinstance(scope.arrivals, NotApplicable):  # stated once, by the account's split
        return pd.DataFrame(columns=list(_COLUMNS), dtype="int64")
    ops = scope.trace.ops
    start, end, rank = (ops[name].to_numpy() for name in ("start_ns", "end_ns", "rank"))
    op, last = _last_partners(scope.arrivals, start, rank)
    wait = np.minimum(start[last], end[op]) - start[op]
    is_wait = (wait > 0) & scope.is_inside[op]
    op, last, wait = op[is_wait], last[is_wait], wait[is_wait]
    slot, first = number_groups(rank[op], rank[last])
    total = np.zeros(len(first), np.int64)
    np.add.at(total, slot, wait)
    counts = np.bincount(slot, minlength=len(first))
    values = (rank[op][first], rank[last][first], counts, total)
    frame = pd.DataFrame(dict(zip(_COLUMNS, values, strict=True)))
    return frame.sort_values(["rank", "peer"], ignore_index=True)


def _last_partners(arrivals: Arrivals, start: np.ndarray, rank: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each op that has partners, and of these the one that started last (of several the lowest rank)."""
    order = np.lexsort((rank[arrivals.partner], -start[arrivals.partner], arrivals.partner_op))
    op, partner = arrivals.partner_op[order], arrivals.partner[order]
    is_first = np.ones(len(op), bool)
    is_first[1:] = op[1:] != op[:-1]
    return op[is_first], partner[is_first]
