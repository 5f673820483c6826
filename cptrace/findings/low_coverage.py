"""Too much is unknown for the figures to be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from cptrace import intervals
from cptrace.analyses.start_causes import MAX_UNKNOWN_WAITS
from cptrace.findings.case import Case
from cptrace.findings.finding import HIGH, WARNING, Diagnosis, Explanation, Finding
from cptrace.findings.verdict import unknown_waits_share
from cptrace.intervals import Intervals
from cptrace.units import format_fraction, plural

CODE: Final = "low-coverage"
UNCLASSIFIED: Final = "unclassified"
LAUNCHES: Final = "launches"
WAITS: Final = "waits"

_LARGE_SHARE: Final = 0.05


def find(case: Case) -> Sequence[Finding]:
    """Return the findings that much of the trace is unknown.

    Args:
        case: Case.
    """
    found = [_unclassified(case), _launches(case), _waits(case)]
    return [finding for finding in found if finding is not None]


def _unclassified(case: Case) -> Finding | None:
    scope = case.scope
    window_ns = sum(intervals.total_ns(scope.windows[rank].pieces) for rank in scope.ranks)
    # Graphs traced as a whole are no compute, and have a finding of their own.
    unknown = np.flatnonzero(scope.is_inside & case.ops["is_unclassified"].to_numpy() & case.is_compute)
    unknown_ns = 0
    for rank in scope.ranks:
        rows = unknown[case.rank[unknown] == rank]
        runs = intervals.union(Intervals(case.start_ns[rows], case.end_ns[rows]))
        unknown_ns += intervals.total_ns(intervals.intersect(runs, scope.windows[rank].pieces))
    share = unknown_ns / max(window_ns, 1)
    if share <= _LARGE_SHARE:
        return None
    return _finding(
        UNCLASSIFIED,
        share,
        f"{format_fraction(share)} of the time runs kernels that no rule knows; they count as compute, and hide"
        " communication if they are communication",
        "Look at coverage.unclassified for their names. If one of them communicates, overlap and exposed time are wrong"
        " by what it takes.",
    )


def _launches(case: Case) -> Finding | None:
    known = case.scope.launches.is_known[case.scope.is_inside]
    share = float(np.mean(~known)) if len(known) else 0.0
    if share <= _LARGE_SHARE:
        return None
    return _finding(
        LAUNCHES,
        share,
        f"the launching call of {format_fraction(share)} of the ops is not in the trace: launch delays, steps and"
        " labels cannot be told for them",
        f"Record again with: {case.scope.trace.meta.record_again}",
    )


def _waits(case: Case) -> Finding | None:
    share, n_waits = unknown_waits_share(case), case.dependencies.n_waits
    if share <= MAX_UNKNOWN_WAITS:
        return None
    return _finding(
        WAITS,
        share,
        f"{format_fraction(share)} of {plural(n_waits, 'wait')} for events have no record in the trace:"
        " what they wait for is not known, so races cannot be looked for and start causes may be wrong",
        f"Record with {case.scope.trace.meta.record_waits}.",
    )


def _finding(form: str, share: float, summary: str, advice: str) -> Finding:
    return Finding(CODE, form, WARNING, summary, share, "fraction", HIGH, advice)


DIAGNOSIS: Final = Diagnosis(
    CODE,
    "much of the trace is unknown",
    Explanation(
        what="Figures rest on what was recorded and recognised. Where a large part was not, they are doubtful, and"
        " so is every diagnosis that rests on them.",
        detected="Form unclassified: more than a twentieth of the time is in kernels that no rule knows. Form launches:"
        " more than a twentieth of the ops have no launching call. Form waits: more than a twentieth of the waits for"
        " events have no record.",
        looks="Kernels with unfamiliar names; no CUDA API row; stream waits without event records.",
        fix="Record again with cuda and nvtx traced; report kernels that are missing in the rule table.",
    ),
    find,
    forms=(UNCLASSIFIED, LAUNCHES, WAITS),
)
