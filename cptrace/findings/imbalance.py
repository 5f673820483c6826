"""Ranks that have more attention to compute than others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from cptrace.classify import is_attention
from cptrace.findings.case import MIN_SHARE, Case
from cptrace.findings.finding import (
    HIGH,
    INFO,
    MAX_EVIDENCE,
    MEDIUM,
    WARNING,
    Diagnosis,
    Explanation,
    Finding,
    Fix,
    op_evidence,
)
from cptrace.findings.ranks import SLOWER, RankSpeeds, find_speeds
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
    speeds, attention, totals = find_speeds(case), _attention(case), _totals(case)
    if not is_unbalanced(case, speeds):
        return ()
    # Without their peers ranks are replayed each alone, and nobody waits for the one with most work.
    are_met = peers_missing(case.scope.arrivals) is None
    gain = gain_of(case, changes) if are_met else None
    if gain is None and (are_met or not _is_worth(case, totals)):
        return ()
    mean = sum(totals.values()) / len(totals)
    most = max(totals, key=lambda rank: totals[rank])
    least = min(totals, key=lambda rank: totals[rank])
    is_schedule, odd_counts = is_contiguous_causal(case), _odd_counts(case, speeds)
    looked_at = "all ranks" if len(totals) == len(case.scope.trace.ranks) else "the ranks looked at"
    return [
        Finding(
            code=CODE,
            form=SCHEDULE if is_schedule else WORK,
            # A contiguous ring is unbalanced by choice of the scheme; elsewhere it is a mistake.
            severity=INFO if _is_by_design(case) else WARNING,
            summary=(
                f"rank {most} computes {totals[most] / max(mean, 1):.2f} times the mean attention time of {looked_at},"
                f" rank {least} {totals[least] / max(mean, 1):.2f} times"
                + (
                    ": contiguous chunks under a causal mask give late ranks more keys to look at"
                    if is_schedule
                    else ""
                )
                + (f"; {odd_counts}" if odd_counts else "")
            ),
            rank=most,
            value=totals[most] / max(mean, 1) - 1,
            unit="fraction",
            confidence=without_peers(case, HIGH if is_schedule and not odd_counts else MEDIUM),
            advice=(
                "Use a layout that gives every rank as much work: zigzag (rank r holds chunks r and 2P-1-r) or striped"
                " (token-cyclic). Positions and masks must follow the layout."
            ),
            recoverable_ns=gain.prediction.recoverable_ns if gain else None,
            predicted_step_ns=gain.prediction.step_ns if gain else None,
            evidence=_evidence(case, attention, (most, least)),
        )
    ]


def changes(case: Case) -> Changes | None:
    """Return the changes that the mean attention time on every rank makes, None where the work is balanced.

    Args:
        case: Case.
    """
    if _has_parts_of_steps(case) or not is_unbalanced(case, find_speeds(case)):
        return None
    totals = list(_totals(case).values())
    # The rank with most work sets the pace. With the mean in place of it, each of its ops is that much shorter, and so
    # are those of others, which have fewer of the same size. In the steps before too: who was early there would wait.
    duration, attention = case.recording.duration_ns.copy(), is_attention(case.ops)
    ratio = sum(totals) / len(totals) / max(*totals, 1)
    duration[attention] = np.rint(duration[attention] * ratio).astype(np.int64)
    return Changes(duration_ns=duration)


def _has_parts_of_steps(case: Case) -> bool:
    """Return whether all that is looked at are steps cut by the window, of which ranks have unequal parts."""
    return not case.has_steps and bool(len(case.scope.cut_steps))


def _is_worth(case: Case, totals: Mapping[int, int]) -> bool:
    """Return whether the rank with most attention has enough more than the mean, per step, for a finding."""
    more_ns = max(totals.values()) - sum(totals.values()) / len(totals)
    return more_ns > MIN_SHARE * case.step_ns * len(np.unique(case.steps.step))


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


def _totals(case: Case) -> dict[int, int]:
    """Return the attention time of each rank in ns."""
    attention, duration = _attention(case), case.recording.duration_ns
    return {rank: int(duration[attention & (case.rank == rank)].sum()) for rank in case.scope.ranks}


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
    if speeds.attention.max() < SLOWER * speeds.attention.min():
        return False
    if len(set(speeds.n_attention.tolist())) > 1 or is_contiguous_causal(case):
        return True
    return speeds.outlier(speeds.compute, SLOWER) is None


def _is_by_design(case: Case) -> bool:
    return is_contiguous_causal(case) and case.scope.trace.meta.run.get("scheme") == _CONTIGUOUS_SCHEME


def _attention(case: Case) -> BoolArray:
    return is_attention(case.ops) & case.scope.is_inside


def _evidence(case: Case, attention: BoolArray, ranks: Sequence[int]) -> list[dict[str, object]]:
    """Return the longest attention ops of the rank with most and the rank with least work."""
    found = []
    for rank, what in zip(ranks, ("most attention work", "least attention work"), strict=True):
        rows = np.flatnonzero(attention & (case.rank == rank))
        longest = rows[np.argsort(-(case.end_ns - case.start_ns)[rows], kind="stable")[: MAX_EVIDENCE // 2]]
        found += [op_evidence(case, int(row), what) for row in longest.tolist()]
    return found


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
