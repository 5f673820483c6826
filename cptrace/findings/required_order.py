"""Exposed communication that the data flow asks for right there: a second stream gains nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from cptrace import intervals, labels
from cptrace.errors import TraceError
from cptrace.findings.advice import RINGS, scheme_name
from cptrace.findings.case import MIN_SHARE, Case
from cptrace.findings.finding import INFO, MAX_EVIDENCE, Diagnosis, Explanation, Finding, op_evidence
from cptrace.findings.verdict import (
    LOW,
    gain_of,
    is_order_incomplete,
    lower,
    order_missing,
    scheme_missing,
    without_peers,
)
from cptrace.intervals import Int64Array, Intervals
from cptrace.outcome import NotApplicable
from cptrace.peers import Arrivals, peers_missing
from cptrace.replay import Changes, Replayed, combine, replay
from cptrace.units import format_fraction, format_ns, plural

CODE: Final = "required-order"
DATA_FLOW: Final = "data-flow"
TRANSFER_BOUND: Final = "transfer-bound"

_HIDDEN: Final = {
    **dict.fromkeys(RINGS, (labels.SEND_RECV,)),
    "all_gather_sliced": (labels.ALL_GATHER, labels.REDUCE_SCATTER),
    "ulysses_chunked": (labels.ALL_TO_ALL,),
}
"""Which transfers run beside attention in schemes that have such."""
_WHY: Final = {
    TRANSFER_BOUND: "longer than the attention that can run meanwhile, or with none to hide behind",
    DATA_FLOW: "needed before attention starts, or made of what it puts out",
}


def find(case: Case) -> Sequence[Finding] | NotApplicable:
    """Return the finding that communication is exposed because attention needs it before it can go on.

    Args:
        case: Case.
    """
    if case.flow is None:
        return scheme_missing(case, CODE)
    mended = _mend_others(case)
    rows = np.flatnonzero(case.is_what(*labels.COMMUNICATION) & case.scope.is_inside)
    exposed, total_ns, window_ns = _exposed(case, mended, rows)
    if total_ns <= MIN_SHARE * window_ns:
        return ()
    rows, exposed = rows[exposed > 0], exposed[exposed > 0]
    form, why = _reason(case, rows, exposed)
    over, of_what = _summed_over(case)
    worst = rows[np.lexsort((rows, -exposed))[:MAX_EVIDENCE]].tolist()
    return [
        Finding(
            code=CODE,
            form=form,
            severity=INFO,
            summary=(
                f"{plural(len(rows), 'transfer')} of {scheme_name(case)} exposed for {format_ns(total_ns)}{over}"
                f" ({format_fraction(total_ns / max(window_ns, 1))} of {of_what}, {mended.words}): {why}"
            ),
            value=total_ns,
            unit="ns",
            confidence=_confidence(case, form),
            advice=_advice(case, is_bound=form == TRANSFER_BOUND),
            evidence=[op_evidence(case, row, "exposed") for row in worst],
        )
    ]


def _reason(case: Case, rows: Int64Array, exposed_ns: Int64Array) -> tuple[str, str]:
    """Return the form that most of the exposed time has, and why it is exposed, for people.

    Args:
        case: Case.
        rows: Rows of exposed transfers, int64 of shape (M,).
        exposed_ns: How much of each is, int64 of shape (M,).
    """
    is_bound = case.is_what(*_HIDDEN.get(case.recognition.scheme, ()))[rows]
    bound = int(exposed_ns[is_bound].sum()) / int(exposed_ns.sum())
    form, other, share = (
        (TRANSFER_BOUND, DATA_FLOW, bound) if bound > 0.5 else (DATA_FLOW, TRANSFER_BOUND, 1 - bound)
    )
    if share > 1 - MIN_SHARE:
        return form, _WHY[form]
    return form, f"{format_fraction(share)} of it {_WHY[form]}; the rest {_WHY[other]}"


def _summed_over(case: Case) -> tuple[str, str]:
    """Return over what times are sums, and what their shares are of, for people."""
    several = ["ranks"] * (len(case.scope.ranks) > 1) + ["steps"] * (len(np.unique(case.steps.step)) > 1)
    return (f" over all {' and '.join(several)}", "their time") if several else ("", "the time")


@dataclass(frozen=True, slots=True)
class _Mended:
    """The run as it would be without what other findings explain.

    Attributes:
        times: When ops start and end.
        duration_ns: Duration of each op from the last arrival of its participants, int64 of shape (N,).
        words: What is left out, for people.
    """

    times: Replayed
    duration_ns: Int64Array
    words: str


def _mend_others(case: Case) -> _Mended:
    """Return the run without what other findings explain: exposure that goes with them is not required."""
    recording = case.recording
    made = Changes()
    n_causes = 0
    for cause in case.causes_to_mend:
        try:
            gain = gain_of(case, cause.changes)
        except TraceError:  # it cannot be replayed without that one: its own finding says so
            continue
        if gain is not None:
            made, n_causes = combine(made, gain.changes, recording.duration_ns), n_causes + 1
    duration = recording.duration_ns if made.duration_ns is None else made.duration_ns
    waiting = _waiting_words(case)
    if not n_causes:
        return _Mended(Replayed(case.start_ns, case.end_ns), duration, waiting)
    try:
        # Where peers are matched, no op of a replay waits longer than they take to come.
        words = "with the other findings mended"
        is_apart = peers_missing(case.scope.arrivals) is None
        return _Mended(replay(recording, made), duration, words if is_apart else f"{words}, {waiting}")
    except TraceError:  # two fixes contradict each other: then what was recorded is all there is to go by
        return _Mended(Replayed(case.start_ns, case.end_ns), recording.duration_ns, waiting)


def _waiting_words(case: Case) -> str:
    """Return whether waiting for other ranks is taken off, for people."""
    arrivals = case.scope.arrivals
    if peers_missing(arrivals) is None:
        return "waiting for other ranks apart"
    is_some_apart = isinstance(arrivals, Arrivals) and bool(arrivals.is_matched.any())
    return f"waiting for other ranks included{' where' if is_some_apart else ', as'} it cannot be told apart"


def _exposed(case: Case, mended: _Mended, rows: Int64Array) -> tuple[Int64Array, int, int]:
    """Return how much of each transfer is exposed, how much of all together, and the time of the windows, in ns.

    Args:
        case: Case.
        mended: When what runs.
        rows: Rows of transfers, int64 of shape (M,).
    """
    start, end = mended.times
    moving = np.maximum(start[rows], end[rows] - mended.duration_ns[rows])
    exposed, total_ns, window_ns = np.zeros(len(rows), np.int64), 0, 0
    for rank in case.scope.ranks:
        window = _window(case, mended.times, rank)
        busy = np.flatnonzero(case.is_compute & (case.rank == rank))
        free = intervals.gaps(intervals.union(Intervals(start[busy], end[busy])), window)
        mine = np.flatnonzero(case.rank[rows] == rank)
        exposed[mine] = intervals.covered_ns(free, moving[mine], end[rows[mine]])
        parts = intervals.union(Intervals(moving[mine], end[rows[mine]]))
        total_ns += intervals.total_ns(intervals.intersect(parts, free))
        window_ns += intervals.total_ns(window)
    return exposed, total_ns, window_ns


def _window(case: Case, times: Replayed, rank: int) -> Intervals:
    """Return the united steps of a rank: as recorded, or from the first to the last op of each where times are new."""
    if times.start_ns is case.start_ns or not case.has_steps:
        return case.scope.windows[rank].pieces
    op, step = case.steps
    mine = case.rank[op] == rank
    of_step = pd.DataFrame(
        {"step": step[mine], "start": times.start_ns[op[mine]], "end": times.end_ns[op[mine]]}
    ).groupby("step")
    return intervals.union(Intervals(of_step["start"].min().to_numpy(), of_step["end"].max().to_numpy()))


def _confidence(case: Case, form: str) -> str:
    """Return how sure it is that nothing else holds the transfers up: where order is not recorded, that may."""
    confidence = without_peers(case, case.recognition.confidence)
    if form != TRANSFER_BOUND or not is_order_incomplete(case):
        return confidence
    return LOW if order_missing(case, CODE) else lower(confidence)


def _advice(case: Case, *, is_bound: bool) -> str:
    scheme = case.recognition.scheme
    if is_bound:
        return (
            "More tokens per rank (fewer ranks, or a longer sequence), grouped-query attention or fp8 messages make"
            " transfers smaller against the attention they hide behind; a faster link does the same. The first transfer"
            " of a pass and the last one of a backward pass have little or nothing to hide behind in any case."
        )
    if scheme == "ulysses":
        return (
            "A second stream alone gains nothing: attention needs q, k and v, and the last exchange needs its output."
            " Pipeline by heads instead: exchange the next group of heads while attention works on this one (compare"
            " cptrace run --scheme ulysses_chunked), or use a ring, whose transfers hide behind attention; with"
            " grouped-query attention the ring sends less while P * Hkv < Hq + Hkv."
        )
    if scheme == "usp":
        return (
            "The exchanges of q, k, v and of the output have no attention beside them. Make the Ulysses groups smaller"
            " (--ulysses-size of cptrace run) or keep them on the fastest links, or exchange by groups of heads, the"
            " next while attention works on this one; the hops of the ring hide behind attention."
        )
    if scheme == "all_gather":
        return (
            "Gather K and V in slices, one KV head at a time, the next while attention works on this one (compare"
            " cptrace run --scheme all_gather_sliced), or use a ring."
        )
    return "Split the transfer so that a part of it runs beside the compute that does not need it yet."


DIAGNOSIS: Final = Diagnosis(
    CODE,
    "exposed because the data flow needs it there",
    Explanation(
        what="Some communication must be done before attention can start or go on: Ulysses exchanges q, k and v before"
        " it and the output after it, a plain all-gather all K and V. No stream, event or buffer changes that. Form"
        " data-flow: the scheme cannot overlap it. Form transfer-bound: the scheme overlaps, but transfers are longer"
        " than the attention beside them.",
        detected="Communication of a recognised scheme that is exposed even in a replay in which all other findings are"
        " mended. Waiting for other ranks is taken off where they are in the trace: see peer-wait. Where some transfers"
        " have one form and some the other, the form is that of most of the exposed time. What the cause is removed by"
        " is another scheme, so no gain is predicted.",
        looks="nccl kernel, attention kernel, nccl kernel, with gaps in the compute row as long as the transfers.",
        fix="Chunk by heads, slice and prefetch, or use a scheme whose transfers have attention to hide behind.",
    ),
    find,
    forms=(DATA_FLOW, TRANSFER_BOUND),
)
