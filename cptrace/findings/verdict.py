"""Whether a finding is worth saying, and how sure it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from cptrace.analyses.start_causes import MAX_UNKNOWN_WAITS
from cptrace.errors import TraceError
from cptrace.findings.case import MIN_SHARE, Case, Prediction, ToMend
from cptrace.findings.finding import CONFIDENCES, HIGH, LOW, MEDIUM
from cptrace.outcome import NotApplicable
from cptrace.peers import peers_missing
from cptrace.replay import Changes, combine
from cptrace.units import format_fraction

_MIN_KNOWN_LAUNCHES: Final = 0.95


class Gain(NamedTuple):
    """A change that is worth saying, and what it would give.

    Attributes:
        changes: What is different.
        prediction: What that would give, on top of what `after` names.
        after: Names of what hides it: before they are mended it gives nothing.
    """

    changes: Changes
    prediction: Prediction
    after: tuple[str, ...] = ()


def gain_of(case: Case, find_changes: Callable[[Case], Changes | None]) -> Gain | None:
    """Return a finding's change and what it would give; None where it changes nothing, or gives too little.

    One cause may hide another: transfers that share a stream with attention cost nothing while the host launches too
    slowly for either. What gives nothing alone is therefore tried again on top of all that does.

    Args:
        case: Case.
        find_changes: Returns what is different; None for nothing.
    """
    alone = _alone(case, find_changes)
    if isinstance(alone, TraceError):
        raise alone
    if alone is not None and _is_worth(alone.prediction):
        return alone
    return case.remembered("hidden", _find_hidden).get(find_changes)


def loss_of(case: Case, find_changes: Callable[[Case], Changes | None]) -> int:
    """Return by how much a step is predicted to be longer with a change, in ns; 0 where it is not, or not by much.

    What only takes waits away makes no run slower. Where the replay says so, the order that it keeps in their place,
    guessed from the kernels, is not the one that the program needs.

    Args:
        case: Case.
        find_changes: Returns what is different; None for nothing.
    """
    alone = _alone(case, find_changes)
    if alone is None or isinstance(alone, TraceError):
        return 0
    loss_ns = -alone.prediction.recoverable_ns
    return loss_ns if loss_ns > MIN_SHARE * case.step_ns else 0


def _alone(case: Case, find_changes: Callable[[Case], Changes | None]) -> Gain | TraceError | None:
    """Return what a change gives by itself; several findings ask, and a replay takes its time: it is made once."""
    name = f"gain of {find_changes.__module__}.{find_changes.__qualname__}"
    return case.remembered(name, lambda case: _predicted(case, find_changes(case)))


def _predicted(case: Case, made: Changes | None) -> Gain | TraceError | None:
    """Return a change with what it gives, or why that cannot be replayed."""
    if made is None:
        return None
    try:
        return Gain(made, case.predict(made))
    except TraceError as error:
        return error


def _is_worth(prediction: Prediction) -> bool:
    return prediction.recoverable_ns > MIN_SHARE * (prediction.step_ns + prediction.recoverable_ns)


def _find_hidden(case: Case) -> dict[Callable[[Case], Changes | None], Gain]:
    """Return what pays only once all that pays by itself is mended, the most first; each on top of those before it."""
    mended, made = [], Changes()
    waiting: list[tuple[ToMend, Changes]] = []
    for cause in case.causes_to_mend:
        changes, is_shown = _shown(case, cause)
        if changes is not None and is_shown:
            mended.append(cause.name)
            made = combine(made, changes, case.recording.duration_ns)
        elif changes is not None:
            waiting.append((cause, changes))
    found: dict[Callable[[Case], Changes | None], Gain] = {}
    while mended and waiting:
        gains = _gains_on_top(case, made, [changes for _, changes in waiting])
        if not gains:
            break
        most = max(gains, key=lambda number: gains[number].recoverable_ns)
        cause, changes = waiting.pop(most)
        found[cause.changes] = Gain(changes, gains[most], tuple(mended))
        mended.append(cause.name)
        made = combine(made, changes, case.recording.duration_ns)
    return found


def _shown(case: Case, cause: ToMend) -> tuple[Changes | None, bool]:
    """Return what mending a cause changes, and whether it is to be mended for itself."""
    if cause.is_wrong:
        return cause.changes(case), True
    gain = _alone(case, cause.changes)
    if isinstance(gain, TraceError):
        return cause.changes(case), False
    return (None, False) if gain is None else (gain.changes, _is_worth(gain.prediction))


def _gains_on_top(case: Case, made: Changes, waiting: Sequence[Changes]) -> dict[int, Prediction]:
    """Return what changes give on top of others, by their numbers; without those that give too little."""
    before_ns = _step_ns(case, made)
    if before_ns is None:
        return {}
    gains = {}
    for number, changes in enumerate(waiting):
        step_ns = _step_ns(case, combine(made, changes, case.recording.duration_ns))
        if step_ns is not None and _is_worth(gain := Prediction(step_ns, before_ns - step_ns)):
            gains[number] = gain
    return gains


def _step_ns(case: Case, changes: Changes) -> int | None:
    """Return the predicted time of a step in ns, None where changes contradict each other."""
    try:
        return case.predict(changes).step_ns
    except TraceError:
        return None


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


def waits_missing(case: Case, code: str) -> NotApplicable | None:
    """Return why a finding that rests on what streams wait for cannot be excluded; None where enough is known.

    Args:
        case: Case.
        code: Code of the finding.
    """
    share = unknown_waits_share(case)
    if share <= MAX_UNKNOWN_WAITS:
        return None
    return NotApplicable(
        code,
        f"{format_fraction(share)} of the waits for events have no record in the trace (low-coverage says how to record"
        " them)",
    )


__all__ = [
    "HIGH",
    "LOW",
    "MEDIUM",
    "confidence_of",
    "gain_of",
    "has_unknown_waits",
    "loss_of",
    "lower",
    "scheme_missing",
    "unknown_waits_share",
    "waits_missing",
    "without_peers",
]
