"""Ranks that wait for another rank: which one, and why it is late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cptrace.findings.case import MIN_SHARE, Case, Prediction
from cptrace.findings.finding import (
    HIGH,
    INFO,
    LOW,
    MEDIUM,
    WARNING,
    Diagnosis,
    Evidence,
    Explanation,
    Finding,
    Fix,
    pair_evidence,
    ranks_text,
)
from cptrace.findings.imbalance import is_unbalanced
from cptrace.findings.ranks import (
    SLOWER,
    SLOWER_LINK,
    PeerWaits,
    RankSpeeds,
    find_peer_waits,
    find_speeds,
    waiting_of,
)
from cptrace.findings.verdict import gain_of, has_unknown_waits, without_peers
from cptrace.intervals import BoolArray
from cptrace.outcome import NotApplicable
from cptrace.peers import peers_missing
from cptrace.replay import Changes
from cptrace.units import format_fraction, format_ns, joined

CODE: Final = "peer-wait"
STRAGGLER: Final = "straggler"
SLOW_LINK: Final = "slow-link"
SKEW: Final = "skew"


@dataclass(frozen=True, slots=True)
class _Root:
    """Why a rank is late."""

    form: str
    rank: int
    ratio: float
    changes: Changes


def find(case: Case) -> Sequence[Finding] | NotApplicable:
    """Return the finding that ranks wait for another one.

    Args:
        case: Case.
    """
    waits = find_peer_waits(case)
    if isinstance(waits, NotApplicable):
        return waits
    speeds = find_speeds(case)
    found, roots = [], []
    for find_root, fix in ((_straggler, straggler_changes), (_slow_link, slow_link_changes)):
        root, gain = find_root(case, speeds), gain_of(case, fix)
        if root is not None and gain is not None:
            found.append(_of_root(case, waits, root, gain.prediction))
        elif root is not None:
            roots.append(root)
    if found:
        return found
    is_explained = is_unbalanced(case, speeds)
    # A replay tells only what passes along waits that the trace holds: without them the measured ratio is to go by.
    if not is_explained or has_unknown_waits(case) or peers_missing(case.scope.arrivals) is not None:
        found = [
            _of_root(case, waits, root, None) for root in roots if _is_waited_for(case, waits, root.rank)
        ]
    if found or is_explained or not _is_much(case, _together(case, waits, np.ones(len(waits.rows), bool))):
        return found
    return [_skew(case, waits, speeds)]


def _is_waited_for(case: Case, waits: PeerWaits, rank: int) -> bool:
    """Return whether other ranks wait much for one."""
    return _is_much(case, _together(case, waits, case.rank[waits.late] == rank))


def _is_much(case: Case, waited_ns: int) -> bool:
    """Return whether waiting, summed over ranks and steps, costs enough for a finding."""
    n_steps = max(len(np.unique(case.steps.step)), 1)
    return waited_ns > MIN_SHARE * case.step_ns * n_steps * max(len(case.scope.ranks), 1)


def _together(case: Case, waits: PeerWaits, which: BoolArray) -> int:
    """Return for how long ranks wait exposed in some of the waits: what a rank waits for at once counts once."""
    rows = waits.rows[which]
    return case.exposed_together_ns(rows, case.start_ns[rows], waits.until_ns[which])


def straggler_changes(case: Case) -> Changes | None:
    """Return the changes that the speed of the others makes on a straggler, None where there is none.

    Args:
        case: Case.
    """
    return _changes(case, _straggler)


def slow_link_changes(case: Case) -> Changes | None:
    """Return the changes that the speed of the others makes on a slow link, None where there is none.

    Args:
        case: Case.
    """
    return _changes(case, _slow_link)


def _changes(case: Case, find_root: Callable[[Case, RankSpeeds], _Root | None]) -> Changes | None:
    if isinstance(find_peer_waits(case), NotApplicable):
        return None
    root = find_root(case, find_speeds(case))
    return None if root is None else root.changes


def _straggler(case: Case, speeds: RankSpeeds) -> _Root | None:
    """Return the one rank whose compute is slower than that of all others, for the same ops."""
    worst = speeds.slow_device
    if worst is None:
        return None
    rank, ratio = speeds.ranks[worst], float(speeds.compute[worst])
    duration = case.recording.duration_ns.copy()
    slow = case.is_compute & (case.rank == rank)
    duration[slow] = np.rint(duration[slow] / ratio).astype(np.int64)
    return _Root(STRAGGLER, rank, ratio, Changes(duration_ns=duration))


def _slow_link(case: Case, speeds: RankSpeeds) -> _Root | None:
    """Return the one rank whose transfers take longer than those of all others, once all have arrived."""
    worst = speeds.outlier(speeds.transfer, SLOWER_LINK)
    if worst is None:
        return None
    rank, ratio = speeds.ranks[worst], float(speeds.transfer[worst])
    duration = case.recording.duration_ns.copy()
    slow = case.is_comm & (case.rank == rank)
    duration[slow] = np.rint(duration[slow] / ratio).astype(np.int64)
    return _Root(SLOW_LINK, rank, ratio, Changes(duration_ns=duration))


def _of_root(case: Case, waits: PeerWaits, root: _Root, prediction: Prediction | None) -> Finding:
    is_other = case.rank[waits.rows] != root.rank
    waited_ns = _together(case, waits, is_other)
    others = np.unique(case.rank[waits.rows[is_other]]).tolist()
    what = "its compute kernels take" if root.form == STRAGGLER else "its transfers take"
    cause = _elsewhere(case) if root.form == STRAGGLER else "as those of other ranks"
    advice = _STRAGGLER_ADVICE if root.form == STRAGGLER else _SLOW_LINK_ADVICE
    return Finding(
        code=CODE,
        form=root.form,
        severity=WARNING,
        summary=(
            f"{_wait(others)} {format_ns(waited_ns)} for rank {root.rank}:"
            f" {what} {root.ratio:.2f} times as long {cause}"
            + (
                ""
                if prediction
                else "; a replay of what the trace holds does not tell what mending that gives"
            )
        ),
        rank=root.rank,
        value=waited_ns,
        unit="ns",
        confidence=_confidence(case, root.form, prediction),
        advice=advice.format(rank=root.rank),
        recoverable_ns=prediction.recoverable_ns if prediction else None,
        predicted_step_ns=prediction.step_ns if prediction else None,
        evidence=_evidence(case, waits, root.rank),
    )


def _elsewhere(case: Case) -> str:
    """Return what a slow rank's kernels are compared with, for people."""
    if find_speeds(case).has_shares:
        return "as those elsewhere, each for its share of the causal mask"
    return "as the same kernels elsewhere"


def _confidence(case: Case, form: str, prediction: Prediction | None) -> str:
    """Return how sure it is that a rank's measured slowness is what others wait for."""
    if not case.is_exact:  # on a busy machine threads of an emulated device are slow in turns
        return LOW
    is_doubtful = has_unknown_waits(case) or (form == STRAGGLER and not _is_slow_at_all(find_speeds(case)))
    return without_peers(case, MEDIUM if is_doubtful else HIGH) if prediction else MEDIUM


def _is_slow_at_all(speeds: RankSpeeds) -> bool:
    """Return whether a slow rank is slow beside attention too: attention alone may be more work."""
    slow = speeds.slow_device
    is_sure = speeds.is_much_beside or not speeds.has_shares
    return slow is not None and is_sure and speeds.is_slow_beside(slow)


def _evidence(case: Case, waits: PeerWaits, rank: int) -> list[Evidence]:
    """Return the longest waits for one rank; those for any where none is for that one."""
    is_for = case.rank[waits.late] == rank
    which = is_for if is_for.any() else np.ones(len(is_for), bool)
    words = ("waits for its peer", "arrives last")
    return pair_evidence(case, waits.rows[which], waits.late[which], waits.exposed_ns[which], words)


def _skew(case: Case, waits: PeerWaits, speeds: RankSpeeds) -> Finding:
    """Return that ranks wait for each other, without a cause that the trace would show."""
    by_rank = np.bincount(case.rank[waits.late], weights=waits.exposed_ns.astype(np.float64))
    late = int(np.argmax(by_rank))
    is_for = case.rank[waits.late] == late
    waited_ns, total_ns = (_together(case, waits, which) for which in (is_for, np.ones(len(is_for), bool)))
    waiting = np.unique(case.rank[waits.rows[is_for]]).tolist()
    is_looked_at = late in case.scope.ranks
    before = _waits_itself(case, late)
    return Finding(
        code=CODE,
        form=SKEW,
        severity=INFO,
        summary=(
            f"{_wait(waiting)} {format_ns(waited_ns)} for rank {late} in communication,"
            f" {format_fraction(waited_ns / max(total_ns, 1))} of all such waiting; {_speed(case, speeds, late)}"
            + (f"; rank {late} itself waits {format_ns(before[1])} for rank {before[0]}" if before else "")
        ),
        rank=late,
        value=total_ns,
        unit="ns",
        confidence=without_peers(case, MEDIUM if is_looked_at else LOW),
        advice=(
            "" if is_looked_at else "Analyse all ranks together: who is late, and why, takes all of them. "
        )
        + (f"Look at rank {before[0]} first: who waits for it is late for others. " if before else "")
        + (_STRAGGLER_ADVICE.format(rank=late) + " Else: " if _is_slow(case, speeds, late) else "")
        + (
            f"Look at what the host of rank {late} does before it launches these ops: late launches, a data loader, or"
            " work that only this rank has. Start ranks at the same time (a barrier before the measured steps) to tell"
            " a late start from a slow rank."
        ),
        evidence=_evidence(case, waits, late),
    )


def _is_slow(case: Case, speeds: RankSpeeds, rank: int) -> bool:
    """Return whether a rank's kernels are slower than others', though it is not the only such rank."""
    if rank not in speeds.ranks:
        return False
    ratios = speeds.beside_attention if speeds.has_shares else speeds.compute
    return bool(ratios[speeds.ranks.index(rank)] >= SLOWER)


def _waits_itself(case: Case, rank: int) -> tuple[int, int] | None:
    """Return which rank one waits for, and for how long in ns; None where that is too little to make it late."""
    whom, waited_ns = waiting_of(case, rank)
    least_ns = MIN_SHARE * case.step_ns * max(len(np.unique(case.steps.step)), 1)
    return None if whom is None or waited_ns <= least_ns else (whom, waited_ns)


def _speed(case: Case, speeds: RankSpeeds, rank: int) -> str:
    """Return what is measured of the speed of a rank, for people."""
    if rank not in speeds.ranks:
        return f"what rank {rank} itself does is not looked at here"
    place = speeds.ranks.index(rank)
    compute = "beside_attention" if speeds.has_shares else "compute"
    slow, usual, unknown = list[str](), list[str](), list[str]()
    for what, name, least in (("kernels", compute, SLOWER), ("transfers", "transfer", SLOWER_LINK)):
        ratio = float(getattr(speeds, name)[place])
        if name not in speeds.compared:
            unknown.append(what)
        else:
            (slow if ratio >= least else usual).append(f"{what} ({ratio:.2f} x the median)")
    groups = (
        (slow, "are slower than others'"),
        (usual, "are no slower than others'"),
        (unknown, "cannot be compared with others'"),
    )
    return ", ".join(f"its {joined(what)} {words}" for what, words in groups if what)


def _wait(ranks: Sequence[int]) -> str:
    """Return that ranks wait, for people; the others where none of them is in the window."""
    return f"{ranks_text(ranks) if ranks else 'other ranks'} wait{'s' if len(ranks) == 1 else ''}"


_STRAGGLER_ADVICE: Final = (
    "Look at the device of rank {rank}: clocks and throttling (nvidia-smi -q -d CLOCK,PERFORMANCE), power limit,"
    " another process on it, ECC errors. All ranks run at the pace of the slowest; replace or exclude it."
)
_SLOW_LINK_ADVICE: Final = (
    "Look at the links of rank {rank}: nvidia-smi nvlink -s, nvidia-smi topo -m (a pair that goes through the host or a"
    " slower switch), NIC and GPU on different sockets, NCCL_DEBUG=INFO for the transport that was chosen. Place ranks"
    " so that ring neighbours share the fastest link."
)

DIAGNOSIS: Final = Diagnosis(
    CODE,
    "waiting for another rank",
    Explanation(
        what="A communication kernel runs until all its participants are there. Time in which it only waits is not"
        " transfer, and no stream or buffer shortens it. Form straggler: one rank's kernels are slower. Form slow-link:"
        " one rank's transfers are slower. Form skew: a rank is late for a reason that the trace does not show.",
        detected="Communication ops of different ranks are matched, and each is split into waiting (until the last has"
        " arrived) and transfer. Then the ranks are compared: the same kernels, the same transfers once all are there."
        " Only one rank that differs from all others, which are alike, is named. The cost is a replay in which it is as"
        " fast as they are; where the trace lacks what links the ranks, none is predicted.",
        looks="Long nccl kernels on all ranks but one, ending together; the one that starts last has the short one.",
        fix="Mend or exclude the slow device or link; balance the work (see imbalance).",
    ),
    find,
    forms=(STRAGGLER, SLOW_LINK, SKEW),
    fixes=(Fix(straggler_changes, STRAGGLER), Fix(slow_link_changes, SLOW_LINK)),
)
