"""Whether a finding is worth saying, and how sure it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from cptrace.findings.case import MIN_SHARE, Case, Prediction
from cptrace.findings.finding import CONFIDENCES, HIGH, LOW, MEDIUM
from cptrace.outcome import NotApplicable
from cptrace.peers import peers_missing
from cptrace.replay import Changes

MAX_UNKNOWN_WAITS: Final = 0.05
"""Up to this share of waits without a record, what looks like no cause is believed to have none."""

_MIN_KNOWN_LAUNCHES: Final = 0.95


class Gain(NamedTuple):
    """A change that is worth saying, and what it would give.

    Attributes:
        changes: What is different.
        prediction: What that would give.
    """

    changes: Changes
    prediction: Prediction


def gain_of(case: Case, find_changes: Callable[[Case], Changes | None]) -> Gain | None:
    """Return a finding's change and what it would give; None where it changes nothing, or gives too little.

    Several findings ask for the same one, and a replay takes its time: each is made once.

    Args:
        case: Case.
        find_changes: Returns what is different; None for nothing.
    """
    name = f"gain of {find_changes.__module__}.{find_changes.__qualname__}"
    return case.remembered(name, lambda case: _gain(case, find_changes(case)))


def _gain(case: Case, made: Changes | None) -> Gain | None:
    if made is None:
        return None
    prediction = case.predict(made)
    is_worth = prediction.recoverable_ns > MIN_SHARE * case.step_ns
    return Gain(made, prediction) if is_worth else None


def confidence_of(case: Case) -> str:
    """Return how sure a finding about the order of ops is: as sure as the scheme, less where edges or ranks lack.

    Args:
        case: Case.
    """
    confidence = case.recognition.confidence
    known = case.scope.launches.is_known
    if has_unknown_waits(case) or (len(known) and float(known.mean()) < _MIN_KNOWN_LAUNCHES):
        confidence = lower(confidence)
    return without_peers(case, confidence)


def without_peers(case: Case, confidence: str) -> str:
    """Return a confidence, lowered where ranks that the communication is with are not in the trace.

    What such a rank would do after a change is not known: the prediction takes it as recorded.

    Args:
        case: Case.
        confidence: How sure the finding would be with all of them.
    """
    return confidence if peers_missing(case.scope.arrivals) is None else lower(confidence)


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
    "lower",
    "scheme_missing",
    "unknown_waits_share",
    "without_peers",
]
