"""How the ranks of a job differ: whose compute is slow, who has more work, whose link is slow, who waits for whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from cptrace import intervals
from cptrace.classify import is_attention
from cptrace.findings.case import Case
from cptrace.groups import number_groups
from cptrace.intervals import BoolArray, Int64Array
from cptrace.outcome import NotApplicable

Float64Array = npt.NDArray[np.float64]

SLOWER: Final = 1.1
"""From this ratio on a rank counts as slower or as having more work than others."""
SLOWER_LINK: Final = 1.3
_ALIKE: Final = 1.05


@dataclass(frozen=True, slots=True)
class PeerWaits:
    """Waiting for other ranks.

    Attributes:
        rows: Rows of communication ops that waited for another rank, int64 of shape (W,).
        late: Row of the participant that each waited for, int64 of shape (W,).
        exposed_ns: Part of the waiting in which no compute ran, within the window, int64 of shape (W,).
        until_ns: End of the waiting in ns, int64 of shape (W,).
    """

    rows: Int64Array
    late: Int64Array
    exposed_ns: Int64Array
    until_ns: Int64Array


@dataclass(frozen=True, slots=True)
class RankSpeeds:
    """How ranks compare, each ratio to the lower median of all ranks.

    Attributes:
        ranks: Ranks, ascending.
        compute: Duration of the same compute kernels, float64 of shape (R,).
        attention: Time of all attention, float64 of shape (R,).
        n_attention: Number of attention ops, int64 of shape (R,).
        transfer: Duration of the same transfers once all had arrived, float64 of shape (R,).
        beside_attention: As `compute`, of all kernels but attention: the same on all ranks where attention is not.
    """

    ranks: tuple[int, ...]
    compute: Float64Array
    attention: Float64Array
    n_attention: Int64Array
    transfer: Float64Array
    beside_attention: Float64Array

    def outlier(self, ratios: Float64Array, threshold: float) -> int | None:
        """Return the position of the one rank whose ratio is above a threshold while all others are alike."""
        if len(ratios) < 2:
            return None
        worst = int(np.argmax(ratios))
        others = np.delete(ratios, worst)
        spread, lead = others.max() / others.min() - 1, ratios[worst] / others.max() - 1
        # Alike, or at least much more alike than the one is to them: on a busy machine no two are the same.
        are_alike = spread <= max(_ALIKE - 1, lead / 4)
        return worst if are_alike and lead >= threshold - 1 else None


def find_peer_waits(case: Case) -> PeerWaits | NotApplicable:
    """Return who waited for whom.

    Args:
        case: Case.
    """
    return case.remembered("peer_waits", _find_peer_waits)


def find_speeds(case: Case) -> RankSpeeds:
    """Return how the ranks' compute, work and links compare.

    Args:
        case: Case.
    """
    return case.remembered("speeds", _find_speeds)


def _find_peer_waits(case: Case) -> PeerWaits | NotApplicable:
    arrivals = case.scope.arrivals
    if isinstance(arrivals, NotApplicable):
        return arrivals
    start = case.start_ns
    order = np.argsort(start[arrivals.partner], kind="stable")
    late = np.full(len(case.ops), -1, np.int64)
    late[arrivals.partner_op[order]] = arrivals.partner[order]  # the latest is written last
    last_ns = np.minimum(arrivals.last_ns, case.end_ns[arrivals.rows])
    is_early = (
        arrivals.is_matched
        & (late[arrivals.rows] >= 0)
        & (last_ns > start[arrivals.rows])
        & case.scope.is_inside[arrivals.rows]
    )
    rows = arrivals.rows[is_early]
    exposed = np.zeros(len(rows), np.int64)
    for rank in case.scope.ranks:
        mine = np.flatnonzero(case.rank[rows] == rank)
        free = case.scope.without_compute(rank)
        exposed[mine] = intervals.covered_ns(free, start[rows[mine]], last_ns[is_early][mine])
    return PeerWaits(rows, late[rows], exposed, last_ns[is_early])


def _find_speeds(case: Case) -> RankSpeeds:
    ranks = case.scope.ranks
    attention = is_attention(case.ops) & case.scope.is_inside
    is_compute = case.is_compute & case.scope.is_inside
    duration = case.end_ns - case.start_ns
    totals = np.array([duration[attention & (case.rank == rank)].sum() for rank in ranks], np.float64)
    counts = np.array([np.count_nonzero(attention & (case.rank == rank)) for rank in ranks], np.int64)
    is_transfer = case.is_comm & case.scope.is_inside
    return RankSpeeds(
        ranks=ranks,
        compute=_ratios(case, is_compute, duration),
        attention=totals / max(_lower_median(totals), 1.0),
        n_attention=counts,
        transfer=_ratios(case, is_transfer, case.recording.duration_ns),
        beside_attention=_ratios(case, is_compute & ~is_attention(case.ops), duration),
    )


def _ratios(case: Case, which: BoolArray, duration_ns: Int64Array) -> Float64Array:
    """Return how long each rank takes for the same ops, as a ratio to the lower median of the ranks.

    Ops are the same if they have the same name and place (kind, pass and hop); kinds count by the time they take.
    """
    rows = np.flatnonzero(which)
    frame = pd.DataFrame(
        {
            "rank": case.rank[rows],
            "sort": _sorts(case, rows),
            "duration": duration_ns[rows].astype(np.float64),
        }
    )
    medians = (
        frame.groupby(["sort", "rank"])["duration"]
        .median()
        .unstack("rank")
        .reindex(columns=list(case.scope.ranks))
    )
    medians = medians.dropna()
    if medians.empty:
        return np.ones(len(case.scope.ranks))
    usual = np.sort(medians.to_numpy(), axis=1)[:, (len(case.scope.ranks) - 1) // 2]
    weight = frame.groupby("sort")["duration"].sum().reindex(medians.index).to_numpy() + 1.0
    ratio = np.maximum(medians.to_numpy(), 1.0) / np.maximum(usual, 1.0)[:, None]
    return np.asarray((ratio * weight[:, None]).sum(axis=0) / weight.sum(), np.float64)


def _sorts(case: Case, rows: Int64Array) -> Int64Array:
    """Return a number for what each op is: its name, and where it has a place its kind, pass and hop."""
    position, places = case.position[rows], case.places
    keys = [case.ops["name"].cat.codes.to_numpy()[rows].astype(np.int64), (position >= 0).astype(np.int64)]
    if len(places):
        keys += [
            np.where(position >= 0, part[position], 0)
            for part in (places.kind, places.is_backward, places.hop)
        ]
    return number_groups(*keys)[0]


def _lower_median(values: Float64Array) -> float:
    return float(np.sort(values)[(len(values) - 1) // 2]) if len(values) else 0.0
