"""The earliest times of a network of waits: each node is as late as the latest of what it waits for, plus a lag."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from cptrace.intervals import Int64Array

NEVER: Final = -(2**62)
"""Earlier than any time, and far enough from the end of 64 bits to add lags to."""


class Edges(NamedTuple):
    """K edges between nodes.

    Attributes:
        source: Node that comes first, int64 of shape (K,).
        target: Node that waits, int64 of shape (K,).
        lag_ns: Least time between the two, int64 of shape (K,); may be negative.
    """

    source: Int64Array
    target: Int64Array
    lag_ns: Int64Array


def join(*parts: Edges) -> Edges:
    """Return the edges of all parts.

    Args:
        *parts: One or more sets of edges.
    """
    return Edges(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def earliest_times(not_before_ns: Int64Array, edges: Edges) -> tuple[Int64Array, Int64Array]:
    """Return the time of each node, and the nodes that could not be timed because they wait for each other.

    Nodes are taken in any order in which none comes before what it waits for. (Kahn, Topological sorting of large
    networks, 1962.)

    Args:
        not_before_ns: Earliest time of each of V nodes in ns, int64 of shape (V,).
        edges: Who waits for whom.
    """
    order = np.argsort(edges.source, kind="stable")
    first = np.searchsorted(edges.source[order], np.arange(len(not_before_ns) + 1)).tolist()
    target, lag = edges.target[order].tolist(), edges.lag_ns[order].tolist()
    n_open = np.bincount(edges.target, minlength=len(not_before_ns)).tolist()
    time = not_before_ns.tolist()
    ready = [node for node, count in enumerate(n_open) if not count]
    for node in ready:  # grows while it is gone through
        now = time[node]
        for edge in range(first[node], first[node + 1]):
            waiting = target[edge]
            reached = now + lag[edge]
            if reached > time[waiting]:
                time[waiting] = reached
            n_open[waiting] -= 1
            if not n_open[waiting]:
                ready.append(waiting)
    return np.array(time, np.int64), np.flatnonzero(np.array(n_open, np.int64))


def find_cycle(stuck: Int64Array, edges: Edges) -> list[int]:
    """Return nodes that wait for each other in a circle, each for the one before it.

    Args:
        stuck: Nodes that could not be timed, each of which waits for another one of them.
        edges: Who waits for whom.
    """
    is_stuck = np.isin(edges.source, stuck) & np.isin(edges.target, stuck)
    waits_for = dict(zip(edges.target[is_stuck].tolist(), edges.source[is_stuck].tolist(), strict=True))
    path: dict[int, int] = {}
    node = int(stuck[0])
    while node not in path:
        path[node] = len(path)
        node = waits_for[node]
    return list(path)[path[node] :][::-1]
