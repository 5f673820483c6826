"""The timeline as the page's script reads it: a few compact arrays per lane."""

from __future__ import annotations

import base64
from typing import Any, Final

import numpy as np

from cptrace.names import function_name
from cptrace.renderers.html.markup import cut
from cptrace.timeline import Timeline, TimelineLane

_MAX_NAME: Final = 60
_MAX_FULL_NAME: Final = 300


def timeline_data(timeline: Timeline) -> dict[str, Any]:
    """Return the timeline as plain values; times are floats of ns from its first operation, exact below 2**53.

    Args:
        timeline: Timeline with at least one operation.
    """
    origin = min(int(lane.start_ns.min()) for lane in timeline.lanes)
    extent = max(int(lane.end_ns.max()) for lane in timeline.lanes) - origin
    return {
        "origin": str(origin),
        "extent": max(extent, 1),
        "mergedBelow": timeline.merged_below_ns,
        "roles": list(timeline.roles),
        "names": [_printable(cut(_last_part(name), _MAX_NAME)) for name in timeline.names],
        "fullNames": [_printable(cut(name, _MAX_FULL_NAME)) for name in timeline.names],
        "steps": [[s.rank, s.step, s.start_ns - origin, s.end_ns - origin] for s in timeline.steps],
        "lanes": [_lane(lane, origin) for lane in timeline.lanes],
    }


def _lane(lane: TimelineLane, origin: int) -> dict[str, Any]:
    is_merged = bool((lane.n_ops > 1).any())
    return {
        "rank": lane.rank,
        "context": lane.context,
        "stream": lane.stream,
        "start": _base64((lane.start_ns - origin).astype("<f8")),
        "duration": _base64((lane.end_ns - lane.start_ns).astype("<f8")),
        "name": _base64(lane.name.astype("<i4")),
        "role": _base64(lane.role.astype("u1")),
        "count": _base64(lane.n_ops.astype("<i4")) if is_merged else None,
    }


def _base64(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode("ascii")


def _last_part(name: str) -> str:
    """Return a function without its namespaces: boxes are narrow."""
    return function_name(name).rsplit("::", 1)[-1]


def _printable(name: str) -> str:
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in name)
