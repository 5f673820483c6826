"""Timeline: when each operation of a trace ran in which stream, small enough to draw.

It is beside the report, not in its JSON: a page that shows a trace needs it, and nothing else does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class TimelineLane:
    """Operations of one stream, by start; neighbours too short to be told apart may be one entry.

    Attributes:
        rank: Rank.
        context: CUDA context of the stream.
        stream: Stream.
        start_ns: Start of each entry, int64 of shape (N,).
        end_ns: End of each entry, int64 of shape (N,).
        name: Place of each entry's name in `Timeline.names`, -1 where several operations are merged, int32 (N,).
        role: Role of each entry, a place in `Timeline.roles`; of merged ones that with most time, int8 (N,).
        n_ops: Operations in each entry, int32 of shape (N,).
    """

    rank: int
    context: int
    stream: int
    start_ns: npt.NDArray[np.int64]
    end_ns: npt.NDArray[np.int64]
    name: npt.NDArray[np.int32]
    role: npt.NDArray[np.int8]
    n_ops: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TimelineStep:
    """One training step of one rank, on its device."""

    rank: int
    step: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """When what ran where.

    Attributes:
        names: Distinct names of operations.
        roles: Names of the roles.
        lanes: One per stream, by rank, context and stream.
        steps: Training steps.
        merged_below_ns: Operations shorter than this may be merged with their neighbours; 0 where none are.
    """

    names: tuple[str, ...]
    roles: tuple[str, ...]
    lanes: tuple[TimelineLane, ...] = ()
    steps: tuple[TimelineStep, ...] = ()
    merged_below_ns: int = 0


def join(timelines: tuple[Timeline, ...]) -> Timeline | None:
    """Return one timeline of several files, None where there is none.

    Args:
        timelines: Timelines of the files of one job.
    """
    if not timelines:
        return None
    names: list[str] = []
    lanes: list[TimelineLane] = []
    for timeline in timelines:
        shift = len(names)
        names += timeline.names
        lanes += [replace(lane, name=lane.name + shift * (lane.name >= 0)) for lane in timeline.lanes]
    return Timeline(
        names=tuple(names),
        roles=timelines[0].roles,
        lanes=tuple(lanes),
        steps=tuple(step for timeline in timelines for step in timeline.steps),
        merged_below_ns=max(timeline.merged_below_ns for timeline in timelines),
    )
