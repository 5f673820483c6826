"""Whether a finding is worth saying, and how sure it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Final, NamedTuple

from cptrace.analyses.start_causes import MAX_UNKNOWN_WAITS
from cptrace.errors import TraceError
from cptrace.findings.case import MIN_SHARE, Case, Prediction, ToMend
from cptrace.findings.finding import CONFIDENCES, HIGH, LOW, MEDIUM
from cptrace.intervals import BoolArray
from cptrace.launches import calls_of
from cptrace.outcome import NotApplicable
from cptrace.peers import peers_missing
from cptrace.replay import Changes, combine
from cptrace.units import format_fraction

_MAX_UNKNOWN_CALLS: Final = 0.05


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
    return {**found, **_find_together(case, made, tuple(mended), waiting)}


def _find_together(
    case: Case, made: Changes, mended: tuple[str, ...], waiting: Sequence[tuple[ToMend, Changes]]
) -> dict[Callable[[Case], Changes | None], Gain]:
    """Return what pays only with another: neither of two alone, but both together, each on top of the other.

    Such are balanced work and a slow device: with as much work as the others it would set the pace, and without that
    it is not waited for.
    """
    found: dict[Callable[[Case], Changes | None], Gain] = {}
    for one, other in combinations(waiting, 2):
        if not (one[0].trades_work or other[0].trades_work):
            continue
        both = combine(
            made, combine(one[1], other[1], case.recording.duration_ns), case.recording.duration_ns
        )
        step_ns = _step_ns(case, both)
        for (cause, changes), (second, without) in ((one, other), (other, one)):
            before_ns = _step_ns(case, combine(made, without, case.recording.duration_ns))
            if step_ns is None or before_ns is None:
                continue
            prediction = Prediction(step_ns, before_ns - step_ns)
            if _is_worth(prediction):
                found[cause.changes] = Gain(changes, prediction, (*mended, second.name))
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
    return without_peers(case, lower(confidence) if is_order_incomplete(case) else confidence)


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


def is_order_incomplete(case: Case) -> bool:
    """Return whether anything that orders device work lacks: the record of a wait, or the call of an op or a record.

    One lost edge is enough for a replay to keep as it was what the edge had held up.

    Args:
        case: Case.
    """
    return has_unknown_waits(case) or unknown_launches_share(case) > 0 or unknown_records_share(case) > 0


def unknown_launches_share(case: Case) -> float:
    """Return the share of the ops in the window whose launching call the trace does not hold.

    Args:
        case: Case.
    """
    return _unknown_share(case.scope.launches.is_known[case.scope.is_inside])


def unknown_records_share(case: Case) -> float:
    """Return the share of event records whose call the trace does not hold: behind which op they are is not known.

    Args:
        case: Case.
    """
    return case.remembered("unknown records", _find_unknown_records)


def _find_unknown_records(case: Case) -> float:
    trace = case.scope.trace
    return _unknown_share(calls_of(trace.event_records, trace.api_calls).is_known)


def _unknown_share(is_known: BoolArray) -> float:
    return 1 - float(is_known.mean()) if len(is_known) else 0.0


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


def order_missing(case: Case, code: str) -> NotApplicable | None:
    """Return why a finding that rests on the order of ops cannot be excluded; None where enough is known.

    Args:
        case: Case.
        code: Code of the finding.
    """
    return waits_missing(case, code) or calls_missing(case, code)


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


def calls_missing(case: Case, code: str) -> NotApplicable | None:
    """Return why a finding that rests on when the host called what cannot be excluded; None where enough is known.

    Args:
        case: Case.
        code: Code of the finding.
    """
    again = case.scope.trace.meta.record_again
    if (share := unknown_launches_share(case)) > _MAX_UNKNOWN_CALLS:
        what = f"the launching call of {format_fraction(share)} of the ops is not in the trace, so what the host did"
        return NotApplicable(code, f"{what} before each of them is not known; record again with: {again}")
    if (share := unknown_records_share(case)) > _MAX_UNKNOWN_CALLS:
        what = f"the call of {format_fraction(share)} of the event records is not in the trace, so what each stands for"
        return NotApplicable(code, f"{what} is not known; record again with: {again}")
    return None


__all__ = [
    "HIGH",
    "LOW",
    "MEDIUM",
    "calls_missing",
    "confidence_of",
    "gain_of",
    "has_unknown_waits",
    "is_order_incomplete",
    "loss_of",
    "lower",
    "order_missing",
    "scheme_missing",
    "unknown_launches_share",
    "unknown_records_share",
    "unknown_waits_share",
    "waits_missing",
    "without_peers",
]
