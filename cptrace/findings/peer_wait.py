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
    Explanation,
    Finding,
    Fix,
    pair_evidence,
    ranks_text,
)
from cptrace.findings.imbalance import is_comparable, is_unbalanced
from cptrace.findings.ranks import (
    SLOWER,
    SLOWER_LINK,
    PeerWaits,
    RankSpeeds,
    find_peer_waits,
    find_speeds,
)
from cptrace.findings.verdict import gain_of
from cptrace.outcome import NotApplicable
from cptrace.replay import Changes
from cptrace.units import format_fraction, format_ns

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
    found = []
    for find_root, fix in ((_straggler, straggler_changes), (_slow_link, slow_link_changes)):
        root, gain = find_root(case, speeds), gain_of(case, fix)
        if root is not None and gain is not None:
            found.append(_of_root(case, waits, root, gain.prediction))
    if found:
        return found
    total_ns = case.exposed_together_ns(waits.rows, case.start_ns[waits.rows], waits.until_ns)
    if is_unbalanced(case, speeds) or total_ns <= MIN_SHARE * case.step_ns * max(len(case.scope.ranks), 1):
        return ()
    return [_skew(case, waits, total_ns)]


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
    compute = speeds.compute if is_comparable(case, speeds) else speeds.beside_attention
    worst = speeds.outlier(compute, SLOWER)
    if worst is None:
        return None
    rank, ratio = speeds.ranks[worst], float(compute[worst])
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


def _of_root(case: Case, waits: PeerWaits, root: _Root, prediction: Prediction) -> Finding:
    is_other = case.rank[waits.rows] != root.rank
    rows = waits.rows[is_other]
    waited_ns = case.exposed_together_ns(rows, case.start_ns[rows], waits.until_ns[is_other])
    others = np.unique(case.rank[rows]).tolist()
    what = "its compute kernels take" if root.form == STRAGGLER else "its transfers take"
    cause = "as the same kernels elsewhere" if root.form == STRAGGLER else "as those of other ranks"
    advice = _STRAGGLER_ADVICE if root.form == STRAGGLER else _SLOW_LINK_ADVICE
    return Finding(
        code=CODE,
        form=root.form,
        severity=WARNING,
        summary=(
            f"{_wait(others)} {format_ns(waited_ns)} for rank {root.rank}:"
            f" {what} {root.ratio:.2f} times as long {cause}"
        ),
        rank=root.rank,
        value=waited_ns,
        unit="ns",
        # On a busy machine threads of an emulated device are slow in turns.
        confidence=HIGH if case.is_exact else LOW,
        advice=advice.format(rank=root.rank),
        recoverable_ns=prediction.recoverable_ns,
        predicted_step_ns=prediction.step_ns,
        evidence=pair_evidence(
            case, waits.rows, waits.late, waits.exposed_ns, ("waits for its peer", "arrives last")
        ),
    )


def _skew(case: Case, waits: PeerWaits, total_ns: int) -> Finding:
    """Return that ranks wait for each other, without a cause that the trace would show."""
    by_rank = np.bincount(case.rank[waits.late], weights=waits.exposed_ns.astype(np.float64))
    late = int(np.argmax(by_rank))
    share = float(by_rank[late]) / max(total_ns, 1)
    waiting = np.unique(case.rank[waits.rows[case.rank[waits.late] == late]]).tolist()
    return Finding(
        code=CODE,
        form=SKEW,
        severity=INFO,
        summary=(
            f"{_wait(waiting)} {format_ns(int(by_rank[late]))} for rank {late} in communication,"
            f" {format_fraction(share)} of all such waiting; its kernels and transfers are no slower than others'"
        ),
        rank=late,
        value=total_ns,
        unit="ns",
        confidence=MEDIUM,
        advice=(
            f"Look at what the host of rank {late} does before it launches these ops: late launches, a data loader, or"
            " work that only this rank has. Start ranks at the same time (a barrier before the measured steps) to tell"
            " a late start from a slow rank."
        ),
        evidence=pair_evidence(
            case, waits.rows, waits.late, waits.exposed_ns, ("waits for its peer", "arrives last")
        ),
    )


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
        " fast as they are.",
        looks="Long nccl kernels on all ranks but one, ending together; the one that starts last has the short one.",
        fix="Mend or exclude the slow device or link; balance the work (see imbalance).",
    ),
    find,
    forms=(STRAGGLER, SLOW_LINK, SKEW),
    fixes=(Fix(straggler_changes, STRAGGLER), Fix(slow_link_changes, SLOW_LINK)),
)
