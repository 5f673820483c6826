"""Findings: what is wrong in a trace, one diagnosis per file.

`FINDINGS` is the list that reports, `cptrace explain`, help and tests go by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from cptrace.analyses.scope import Scope
from cptrace.errors import TraceError, UsageError
from cptrace.findings import case as cases
from cptrace.findings import (
    cp_off,
    graph_hidden,
    imbalance,
    late_launch,
    low_coverage,
    missing_event,
    padding,
    peer_wait,
    queue_order,
    required_order,
    shared_communicator,
    shared_stream,
    single_buffer,
)
from cptrace.findings.case import Case, ToMend
from cptrace.findings.finding import Diagnosis, Finding, Fix, importance
from cptrace.findings.verdict import gain_of, lower
from cptrace.outcome import NotApplicable

__all__ = [
    "FINDINGS",
    "Case",
    "Diagnosis",
    "Finding",
    "Fix",
    "Found",
    "diagnose",
    "find_diagnosis",
    "make_case",
]

FINDINGS: Final[tuple[Diagnosis, ...]] = (
    missing_event.DIAGNOSIS,
    shared_stream.DIAGNOSIS,
    single_buffer.DIAGNOSIS,
    shared_communicator.DIAGNOSIS,
    late_launch.DIAGNOSIS,
    queue_order.DIAGNOSIS,
    peer_wait.DIAGNOSIS,
    imbalance.DIAGNOSIS,
    required_order.DIAGNOSIS,
    cp_off.DIAGNOSIS,
    padding.DIAGNOSIS,
    graph_hidden.DIAGNOSIS,
    low_coverage.DIAGNOSIS,
)


# Delays that nothing explains are left out: what they hide, or are hidden by, cannot be told.
_TO_MEND: Final = (
    ToMend(missing_event.CODE, missing_event.RACE, missing_event.race_changes, is_wrong=True),
    *(
        ToMend(diagnosis.code, fix.form, fix.changes, trades_work=diagnosis is imbalance.DIAGNOSIS)
        for diagnosis in FINDINGS
        for fix in diagnosis.fixes
        if diagnosis is not queue_order.DIAGNOSIS
    ),
)


class Found(NamedTuple):
    """What a diagnosis gives.

    Attributes:
        findings: Findings, the most important first.
        not_applicable: What could not be looked for, and why.
    """

    findings: tuple[Finding, ...]
    not_applicable: tuple[NotApplicable, ...]


def make_case(scope: Scope) -> Case:
    """Return a trace under diagnosis.

    Args:
        scope: What to look at; its trace has device work.
    """
    return replace(cases.make_case(scope), causes_to_mend=_TO_MEND)


def diagnose(case: Case) -> Found:
    """Return what is wrong in a trace.

    Args:
        case: Case.
    """
    findings: list[Finding] = []
    not_applicable: list[NotApplicable] = []
    for diagnosis in FINDINGS:
        for outcome in outcomes(case, diagnosis):
            if isinstance(outcome, NotApplicable):
                not_applicable.append(outcome)
            else:
                findings.append(_behind(case, outcome))
    return Found(
        tuple(sorted(findings, key=lambda finding: importance(finding.to_row()))), _joined(not_applicable)
    )


def outcomes(case: Case, diagnosis: Diagnosis) -> Sequence[Finding | NotApplicable]:
    """Return what a diagnosis finds in a case, and what it could not look for; a replay that fails is such a reason.

    Args:
        case: Case.
        diagnosis: What to look for.
    """
    try:
        outcome = diagnosis.find(case)
    except TraceError as error:
        return (NotApplicable(diagnosis.code, f"the run without it cannot be replayed: {error}"),)
    return (outcome,) if isinstance(outcome, NotApplicable) else outcome


def _behind(case: Case, finding: Finding) -> Finding:
    """Return a finding with what hides it, which makes it less sure: it rests on a prediction."""
    if finding.predicted_step_ns is None:
        return finding
    for cause in case.causes_to_mend:
        if cause.code == finding.code and cause.form in (None, finding.form) and not cause.is_wrong:
            gain = gain_of(case, cause.changes)
            if gain is not None and gain.after:
                return replace(finding, after=gain.after, confidence=lower(finding.confidence))
    return finding


def find_diagnosis(code: str) -> Diagnosis:
    """Return the diagnosis with a code.

    Raises:
        UsageError: There is no such code; the message lists them.
    """
    for diagnosis in FINDINGS:
        if diagnosis.code == code:
            return diagnosis
    codes = ", ".join(diagnosis.code for diagnosis in FINDINGS)
    raise UsageError(f"there is no finding {code!r}; the codes are {codes}")


def _joined(entries: list[NotApplicable]) -> tuple[NotApplicable, ...]:
    """Return entries with the same reason as one that names all that it stands for."""
    by_reason: dict[str, list[str]] = {}
    for entry in entries:
        by_reason.setdefault(entry.reason, []).append(entry.analysis)
    first = {entry.reason: entry for entry in reversed(entries)}
    return tuple(
        replace(first[reason], analysis=", ".join(dict.fromkeys(names)))
        for reason, names in by_reason.items()
    )
