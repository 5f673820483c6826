"""Ranks that have more attention to compute than others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from cptrace.classify import is_attention
from cptrace.findings.case import MIN_SHARE, Case
from cptrace.findings.finding import (
    HIGH,
    INFO,
    LOW,
    MAX_EVIDENCE,
    MEDIUM,
    WARNING,
    Diagnosis,
    Explanation,
    Finding,
    Fix,
    op_evidence,
    ranks_text,
)
from cptrace.findings.ranks import SLOWER, RankSpeeds, find_speeds, in_common_steps
from cptrace.findings.schedule import is_contiguous_causal
from cptrace.findings.verdict import gain_of, without_peers
from cptrace.intervals import BoolArray
from cptrace.outcome import NotApplicable
from cptrace.peers import peers_missing
from cptrace.replay import Changes
from cptrace.units import plural

CODE: Final = "imbalance"
SCHEDULE: Final = "schedule"
WORK: Final = "work"

_CONTIGUOUS_SCHEME: Final = "ring"


def find(case: Case) -> Sequence[Finding] | NotApplicable:
    """Return the finding that some ranks have more attention to compute than others.

    Args:
        case: Case.
    """
    if _has_parts_of_steps(case):
        return NotApplicable(
            CODE,
            "ranks are compared by whole steps, and the window holds none; widen it, or leave --window out",
        )
    if without := _without_steps(case):
        return NotApplicable(
            CODE,
            f"ranks are compared by the same steps, and {ranks_text(without)} have none: put a step range around each"
            " step on every rank, or look at all with --window all",
        )
    speeds, attention = find_speeds(case), _attention(case)
    if not is_unbalanced(case, speeds):
        return ()
    # Without their peers ranks are replayed each alone, and nobody waits for the one with most work.
    are_met = peers_missing(case.scope.arrivals) is None
    gain = gain_of(case, changes) if are_met else None
    if gain is None and (are_met or not _is_worth(case, speeds)):
        return ()
    share = speeds.work / speeds.work.mean()
    most, least = int(share.argmax()), int(share.argmin())
    is_schedule, odd_counts = is_contiguous_causal(case), _odd_counts(case, speeds)
    return [
        Finding(
            code=CODE,
            form=SCHEDULE if is_schedule else WORK,
            # A contiguous ring is unbalanced by choice of the scheme; elsewhere it is a mistake.
            severity=INFO if _is_by_design(case) else WARNING,
            summary=(
                f"rank {speeds.ranks[most]} {_computes(case, speeds, float(share[most]))},"
                f" rank {speeds.ranks[least]} {share[least]:.2f} times"
                + (
                    ": contiguous chunks under a causal mask give late ranks more keys to look at"
                    if is_schedule
                    else ""
                )
                + (f"; {odd_counts}" if odd_counts else "")
                + (_ODD_TIMES if _has_odd_times(speeds) else "")
            ),
            rank=speeds.ranks[most],
            value=float(share[most]) - 1,
            unit="fraction",
            confidence=without_peers(case, _confidence(case, speeds, is_odd=bool(odd_counts))),
            advice=_SCHEDULE_ADVICE if is_schedule else _WORK_ADVICE,
            recoverable_ns=gain.prediction.recoverable_ns if gain else None,
            predicted_step_ns=gain.prediction.step_ns if gain else None,
            evidence=_evidence(case, attention, (speeds.ranks[most], speeds.ranks[least])),
        )
    ]


def changes(case: Case) -> Changes | None:
    """Return the changes that the mean attention time on every rank makes, None where the work is balanced.

    Args:
        case: Case.
    """
    if _has_parts_of_steps(case) or _without_steps(case) or not is_unbalanced(case, find_speeds(case)):
        return None
    speeds, attention = find_speeds(case), is_attention(case.ops)
    work, slowness = speeds.work, speeds.slowness
    # The rank with most work sets the pace. With the mean in place of it, each of its ops is that much shorter, and so
    # are those of others, which have fewer of the same size. In the steps before too: who was early there would wait.
    ratio = np.full(len(speeds.ranks), work.mean() / work.max())
    # On a slow device the mean work may take longer than what it has now, and then it sets the pace.
    is_slow = slowness >= SLOWER
    ratio[is_slow] = (work.mean() / work)[is_slow]
    duration = case.recording.duration_ns.copy()
    for rank, factor in zip(speeds.ranks, ratio.tolist(), strict=True):
        mine = attention & (case.rank == rank)
        duration[mine] = np.rint(duration[mine] * factor).astype(np.int64)
    return Changes(duration_ns=duration)


def _without_steps(case: Case) -> list[int]:
    """Return the ranks that have no step while others have."""
    if not case.has_steps:
        return []
    return sorted(set(case.scope.ranks) - set(case.rank[case.steps.op].tolist()))


def _has_parts_of_steps(case: Case) -> bool:
    """Return whether all that is looked at are steps cut by the window, of which ranks have unequal parts."""
    return not case.has_steps and bool(len(case.scope.cut_steps))


def _confidence(case: Case, speeds: RankSpeeds, *, is_odd: bool) -> str:
    if _has_odd_times(speeds):
        return LOW
    return HIGH if is_contiguous_causal(case) and not is_odd else MEDIUM


def _has_odd_times(speeds: RankSpeeds) -> bool:
    """Return whether ranks take other times than the schedule's shares of work, and no one slow device explains it."""
    is_as_share = speeds.compute.max() < SLOWER * speeds.compute.min()
    return speeds.has_shares and not is_as_share and speeds.slow_device is None


def _computes(case: Case, speeds: RankSpeeds, share: float) -> str:
    """Return how much more attention than the mean a rank has, for people; as time where devices are as fast."""
    looked_at = "all ranks" if len(speeds.ranks) == len(case.scope.trace.ranks) else "the ranks looked at"
    if np.all(speeds.slowness == 1):
        return f"computes {share:.2f} times the mean attention time of {looked_at}"
    return f"has {share:.2f} times the mean attention work of {looked_at} (time at the speed of each one's device)"


def _is_worth(case: Case, speeds: RankSpeeds) -> bool:
    """Return whether the rank with most attention has enough more than the mean, per step, for a finding."""
    duration = case.recording.duration_ns[_attention(case)]
    more = speeds.work.max() / speeds.work.sum() - 1 / len(speeds.ranks)
    return bool(more * duration.sum() > MIN_SHARE * case.step_ns * len(np.unique(case.steps.step)))


def _odd_counts(case: Case, speeds: RankSpeeds) -> str:
    """Return what the numbers of attention ops say against a whole trace, for people; empty where they are as usual.

    Each rank has as many, or under a causal mask over contiguous chunks the more the later its chunk is.
    """
    counts = speeds.n_attention
    if len(set(counts.tolist())) == 1 or (is_contiguous_causal(case) and np.all(np.diff(counts) >= 0)):
        return ""
    least, most = (speeds.ranks[place] for place in (int(counts.argmin()), int(counts.argmax())))
    return (
        f"rank {most} has {plural(int(counts.max()), 'attention op')} and rank {least} {int(counts.min()):,}, which no"
        " schedule that is known here explains: some may be missing in the trace"
    )


def is_unbalanced(case: Case, speeds: RankSpeeds) -> bool:
    """Return whether ranks differ in how much attention they have, and not in how fast they are.

    Different numbers of attention ops, a schedule that is known to be unbalanced, or times that are graded over the
    ranks say so; one rank alone that is slower at everything is a straggler.

    Args:
        case: Case.
        speeds: How the ranks compare.
    """
    if len(speeds.ranks) < 2 or not speeds.n_attention.all():  # a rank without any has nothing to compare
        return False
    if speeds.work.max() < SLOWER * speeds.work.min():
        return False
    if len(set(speeds.n_attention.tolist())) > 1 or is_contiguous_causal(case):
        return True
    return speeds.slow_device is None


def _is_by_design(case: Case) -> bool:
    return is_contiguous_causal(case) and case.scope.trace.meta.run.get("scheme") == _CONTIGUOUS_SCHEME


def _attention(case: Case) -> BoolArray:
    return is_attention(case.ops) & in_common_steps(case)


def _evidence(case: Case, attention: BoolArray, ranks: Sequence[int]) -> list[dict[str, object]]:
    """Return the longest attention ops of the rank with most and the rank with least work."""
    found = []
    for rank, what in zip(ranks, ("most attention work", "least attention work"), strict=True):
        rows = np.flatnonzero(attention & (case.rank == rank))
        longest = rows[np.argsort(-(case.end_ns - case.start_ns)[rows], kind="stable")[: MAX_EVIDENCE // 2]]
        found += [op_evidence(case, int(row), what) for row in longest.tolist()]
    return found


_ODD_TIMES: Final = (
    "; their times are not in proportion to that: devices differ in speed, or kernels compute"
    " what the mask hides"
)
_SCHEDULE_ADVICE: Final = (
    "Use a layout that gives every rank as much work: zigzag (rank r holds chunks r and 2P-1-r) or striped"
    " (token-cyclic). Positions and masks must follow the layout."
)
_WORK_ADVICE: Final = (
    "Assign tokens to ranks by the work that the mask leaves of them and not by their number: documents of unequal"
    " length packed together are unequal work. Where a causal mask lies over contiguous chunks, a zigzag or striped"
    " layout gives every rank as much."
)

DIAGNOSIS: Final = Diagnosis(
    CODE,
    "some ranks have more work",
    Explanation(
        what="All ranks of a step end when the one with most work does. Form schedule: the scheme itself gives ranks"
        " unequal work (a causal mask over contiguous chunks: rank r works on r + 1 of P). Form work: the ranks differ"
        " beyond that.",
        detected="The time of all attention per rank differs by more than a tenth, and it is not that one rank is"
        " slower at the same ops. The cost is a replay in which every rank has the mean attention time; where the"
        " communication of the ranks cannot be matched, none is predicted.",
        looks="Attention kernels fill one rank's row and leave gaps in another's, where a nccl kernel waits.",
        fix="zigzag or striped layout; for sequences of unequal length, assign tokens by work and not by count.",
    ),
    find,
    forms=(SCHEDULE, WORK),
    fixes=(Fix(changes),),
)
