"""Whether a finding is worth saying, and how sure it is."""

from __future__ import annotations

from typing import Final

from cptrace.findings.case import MIN_SHARE, Case, Prediction
from cptrace.findings.finding import CONFIDENCES, HIGH, LOW, MEDIUM
from cptrace.outcome import NotApplicable
from cptrace.replay import Changes

MAX_UNKNOWN_WAITS: Final = 0.05
"""Up to this share of waits without a record, what looks like no cause is believed to have none."""

_MIN_KNOWN_LAUNCHES: Final = 0.95


def is_worth(case: Case, prediction: Prediction) -> bool:
    """Return whether a change gives enough of the step's time to be said.

    Args:
        case: Case.
        prediction: What the change would give.
    """
    return prediction.recoverable_ns > MIN_SHARE * case.step_ns


def gain_of(case: Case, made: Changes | None) -> Prediction | None:
    """Return what a change would give; None where there is nothing to change, or too little to gain.

    Args:
        case: Case.
        made: What is different; None for nothing.
    """
    if made is None:
        return None
    prediction = case.predict(made)
    return prediction if is_worth(case, prediction) else None


def confidence_of(case: Case) -> str:
    """Return how sure a finding about the order of ops is: as sure as the scheme, and less where edges are missing.

    Args:
        case: Case.
    """
    confidence = case.recognition.confidence
    known = case.scope.launches.is_known
    if has_unknown_waits(case) or (len(known) and float(known.mean()) < _MIN_KNOWN_LAUNCHES):
        confidence = lower(confidence)
    return confidence


def has_unknown_waits(case: Case) -> bool:
    """Return whether streams wait for events whose records the trace does not hold.

    Args:
        case: Case.
    """
    return case.dependencies.n_waits_paired < case.dependencies.n_waits


def unknown_waits_share(case: Case) -> float:
    """Return the share of waits for events whose records the trace does not hold.

    Args:
        case: Case.
    """
    dependencies = case.dependencies
    return 1 - dependencies.n_waits_paired / max(dependencies.n_waits, 1) if dependencies.n_waits else 0.0


def lower(confidence: str) -> str:
    """Return the next lower confidence."""
    return CONFIDENCES[max(CONFIDENCES.index(confidence) - 1, 0)]


def scheme_missing(case: Case, code: str) -> NotApplicable:
    """Return why a finding that rests on the data flow cannot be made.

    Args:
        case: Case.
        code: Code of the finding.
    """
    return NotApplicable(
        code,
        "which order is needed cannot be told, because no context-parallel scheme was recognised:"
        f" {case.recognition.evidence}; mark ops with ranges of the domain cptrace (cptrace/labels.py) to name it",
    )


__all__ = [
    "HIGH",
    "LOW",
    "MAX_UNKNOWN_WAITS",
    "MEDIUM",
    "confidence_of",
    "gain_of",
    "has_unknown_waits",
    "is_worth",
    "lower",
    "scheme_missing",
    "unknown_waits_share",
]
