"""How the ranks of a job differ: whose compute is slow, who has more work, whose link is slow, who waits for whom."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from cptrace import intervals, labels
from cptrace.classify import is_attention
from cptrace.findings.case import Case
from cptrace.findings.schedule import attention_shares, is_contiguous_causal
from cptrace.groups import number_groups
from cptrace.intervals import BoolArray, Int64Array, Intervals
from cptrace.outcome import NotApplicable

Float64Array = npt.NDArray[np.float64]

SLOWER: Final = 1.1
"""From this ratio on a rank counts as slower or as having more work than others."""
SLOWER_LINK: Final = 1.3
_ALIKE: Final = 1.05
_MUCH_BESIDE: Final = 0.2


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
        compute: Duration of the same compute kernels, float64 of shape (R,); of attention that is known to be of
            unequal work, per unit of that.
        as_recorded: The same whatever the work, float64 of shape (R,).
        attention: Time of all attention, float64 of shape (R,).
        n_attention: Number of attention ops, int64 of shape (R,).
        transfer: Duration of the same transfers once all had arrived, float64 of shape (R,).
        beside_attention: As `compute`, of all kernels but attention and copies for transfers: the same work on all
            ranks where attention is not.
        slowness: By how much the device of each rank is slower at the same work, float64 of shape (R,); 1 where that
            cannot be told from more work.
        has_shares: Whether attention is of unequal work, which the schedule tells.
        is_much_beside: Whether kernels beside attention take enough of the time to tell a slow device.
        compared: Which of these were measured, for want of the same ops on all ranks the others are 1: of `compute`,
            `as_recorded`, `transfer` and `beside_attention`.
    """

    ranks: tuple[int, ...]
    compute: Float64Array
    as_recorded: Float64Array
    attention: Float64Array
    n_attention: Int64Array
    transfer: Float64Array
    beside_attention: Float64Array
    slowness: Float64Array
    has_shares: bool
    is_much_beside: bool
    compared: frozenset[str]

    @property
    def work(self) -> Float64Array:
        """Attention of each rank as work, the speed of its device taken out, to the scale of `attention`."""
        return self.attention / self.slowness

    @property
    def slow_device(self) -> int | None:
        """Position of the one rank whose device is slower than all others; None where there is none.

        Where only its attention takes longer, and much else on the same device does not, it has more attention.
        """
        worst = self.outlier(self.compute, SLOWER)
        if worst is None:
            return None
        # Kernels that compute what a mask hides are no less work on the first of two ranks: slow is what is slow
        # either way. Of more ranks the others would not be alike.
        if len(self.ranks) == 2 and self.as_recorded[worst] < SLOWER * self.as_recorded[1 - worst]:
            return None
        return None if self.is_much_beside and not self.is_slow_beside(worst) else worst

    def is_slow_beside(self, position: int) -> bool:
        """Return whether one rank, and no other, is slower at what it computes beside attention too."""
        return self.outlier(self.beside_attention, SLOWER) == position

    def outlier(self, ratios: Float64Array, threshold: float) -> int | None:
        """Return the position of the one rank whose ratio is above a threshold while all others are alike."""
        if len(ratios) < 2:
            return None
        worst = int(np.argmax(ratios))
        others = np.delete(ratios, worst)
        spread, lead = others.max() / others.min() - 1, ratios[worst] / others.max() - 1
        # Alike, or at least much more alike than the one is to them: on a busy machine no two are the same. What is
        # measured against work that was worked out and not seen has to be more alike.
        are_alike = spread <= max(_ALIKE - 1, lead / (8 if self.has_shares else 4))
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


def in_common_steps(case: Case) -> BoolArray:
    """Return which ops are in steps that all ranks have, bool of shape (N,): in the window where there are no steps.

    Args:
        case: Case.
    """
    return case.remembered("common_steps", _find_common_steps)


def _find_common_steps(case: Case) -> BoolArray:
    if not case.has_steps:
        return case.scope.is_inside
    op, step = case.steps
    pairs = pd.DataFrame({"rank": case.rank[op], "step": step}).drop_duplicates()
    n_ranks = pairs.groupby("step")["rank"].nunique()
    with_steps = pairs["rank"].nunique()
    which = np.zeros(len(case.ops), bool)
    which[op[np.isin(step, n_ranks.index[n_ranks == with_steps])]] = True
    return which


def waiting_of(case: Case, rank: int) -> tuple[int | None, int]:
    """Return which other rank one waits for most, and for how long it waits exposed, in ns, in the time looked at.

    Args:
        case: Case.
        rank: Any rank of the trace, also one that is not looked at.
    """
    found = case.remembered("all_waits", _find_waits)
    windows = [window.pieces for window in case.scope.windows.values() if len(window.pieces.start_ns)]
    if isinstance(found, NotApplicable) or not windows:
        return None, 0
    rows, late, until = found
    first, last = min(int(p.start_ns[0]) for p in windows), max(int(p.end_ns[-1]) for p in windows)
    mine = (case.rank[rows] == rank) & (case.start_ns[rows] >= first) & (case.start_ns[rows] < last)
    if not mine.any():
        return None, 0
    start, until, late = case.start_ns[rows[mine]], until[mine], late[mine]
    computes = np.flatnonzero(case.is_compute & (case.rank == rank))
    busy = intervals.union(Intervals(case.start_ns[computes], case.end_ns[computes]))
    parts = intervals.subtract(intervals.union(Intervals(start, until)), busy)
    by_rank = np.bincount(case.rank[late], weights=(until - start).astype(np.float64))
    return int(np.argmax(by_rank)), intervals.total_ns(parts)


def _find_peer_waits(case: Case) -> PeerWaits | NotApplicable:
    found = case.remembered("all_waits", _find_waits)
    if isinstance(found, NotApplicable):
        return found
    rows, late, until = (part[case.scope.is_inside[found[0]]] for part in found)
    exposed = np.zeros(len(rows), np.int64)
    for rank in case.scope.ranks:
        mine = np.flatnonzero(case.rank[rows] == rank)
        free = case.scope.without_compute(rank)
        exposed[mine] = intervals.covered_ns(free, case.start_ns[rows[mine]], until[mine])
    return PeerWaits(rows, late, exposed, until)


def _find_waits(case: Case) -> tuple[Int64Array, Int64Array, Int64Array] | NotApplicable:
    """Return the ops of all ranks that wait, the participant that each waits for, and until when in ns."""
    arrivals = case.scope.arrivals
    if isinstance(arrivals, NotApplicable):
        return arrivals
    start = case.start_ns
    # The latest is written last; of several the lowest rank, as in the analysis of who waited for whom.
    order = np.lexsort((-case.rank[arrivals.partner], start[arrivals.partner]))
    late = np.full(len(case.ops), -1, np.int64)
    late[arrivals.partner_op[order]] = arrivals.partner[order]
    last_ns = np.minimum(arrivals.last_ns, case.end_ns[arrivals.rows])
    is_early = arrivals.is_matched & (late[arrivals.rows] >= 0) & (last_ns > start[arrivals.rows])
    rows = arrivals.rows[is_early]
    return rows, late[rows], last_ns[is_early]


def _find_speeds(case: Case) -> RankSpeeds:
    ranks = case.scope.ranks
    attention = is_attention(case.ops) & in_common_steps(case)
    is_compute = case.is_compute & case.scope.is_inside
    duration = case.end_ns - case.start_ns
    totals = np.array([duration[attention & (case.rank == rank)].sum() for rank in ranks], np.float64)
    counts = np.array([np.count_nonzero(attention & (case.rank == rank)) for rank in ranks], np.int64)
    shares = attention_shares(case, counts)
    beside = is_compute & ~is_attention(case.ops) & ~case.is_what(labels.COPY)
    found = {
        "compute": _ratios(case, is_compute, _per_share(case, duration, shares)),
        "as_recorded": _ratios(case, is_compute, duration),
        "transfer": _ratios(case, _same_transfers(case), case.recording.duration_ns),
        "beside_attention": _ratios(case, beside, duration),
    }
    as_usual = np.ones(len(ranks))
    speeds = RankSpeeds(
        ranks=ranks,
        slowness=as_usual,
        is_much_beside=bool(duration[beside].sum() > _MUCH_BESIDE * duration[is_compute].sum()),
        attention=totals / max(_lower_median(totals), 1.0),
        n_attention=counts,
        has_shares=shares is not None,
        compared=frozenset(name for name, ratios in found.items() if ratios is not None),
        **{name: as_usual if ratios is None else ratios for name, ratios in found.items()},
    )
    return replace(speeds, slowness=_slowness(case, speeds))


def _slowness(case: Case, speeds: RankSpeeds) -> Float64Array:
    """Return by how much each device is slower at the same work, float64 of shape (R,).

    Contiguous chunks under a causal mask have ops of known work. Elsewhere attention may be more work or slower, and
    what a rank computes beside it tells: where that is much, or differs between ranks just as attention does.
    """
    as_usual = np.ones(len(speeds.ranks))
    if is_contiguous_causal(case):
        # Times that no one slow device explains are not those of the schedule's work.
        is_slow = np.arange(len(speeds.ranks)) == speeds.slow_device
        return np.where(is_slow, speeds.compute, as_usual)
    beside = speeds.beside_attention
    beyond = speeds.attention / beside
    is_explained = len(beyond) > 0 and beyond.max() < SLOWER * beyond.min()
    if not (is_explained or speeds.is_much_beside):
        return as_usual
    slowness = speeds.attention if is_explained else beside
    return np.where(slowness >= SLOWER, slowness, as_usual)


def _per_share(case: Case, duration_ns: Int64Array, shares: Float64Array | None) -> Float64Array:
    """Return durations in ns, those of attention per unit of the work that each rank's share of it is."""
    found = duration_ns.astype(np.float64)
    if shares is not None:
        attention = is_attention(case.ops)
        for rank, share in zip(case.scope.ranks, shares.tolist(), strict=True):
            found[attention & (case.rank == rank)] /= share
    return found


def _is_transfer(case: Case) -> BoolArray:
    """Return which ops are known to be transfer from some instant on: without their peers they may be all waiting."""
    which = np.zeros(len(case.ops), bool)
    arrivals = case.scope.arrivals
    if not isinstance(arrivals, NotApplicable):
        which[arrivals.rows[arrivals.is_matched]] = True
    return which


def _same_transfers(case: Case) -> BoolArray:
    """Return which transfers are compared: of sorts of which each rank has as many, bool of shape (N,).

    Where the parts of some on other ranks were not found, one rank's may be others of the same name, of other sizes.
    """
    which = _is_transfer(case) & case.scope.is_inside
    rows = np.flatnonzero(which)
    sort = _sorts(case, rows)
    counts = pd.crosstab(sort, case.rank[rows]).reindex(columns=list(case.scope.ranks), fill_value=0)
    even = counts.index[counts.min(axis=1) == counts.max(axis=1)]
    which[rows[~np.isin(sort, even)]] = False
    return which


def _ratios(case: Case, which: BoolArray, duration_ns: Int64Array | Float64Array) -> Float64Array | None:
    """Return how long each rank takes for the same ops, as a ratio to the lower median of the ranks; None without any.

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
    if medians.empty or len(case.scope.ranks) < 2:
        return None
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
