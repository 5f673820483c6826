"""Exposed communication that the data flow asks for right there: a second stream gains nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from cptrace import labels
from cptrace.findings.advice import RINGS, scheme_name
from cptrace.findings.case import MIN_SHARE, Case
from cptrace.findings.finding import (
    INFO,
    MAX_EVIDENCE,
    Diagnosis,
    Explanation,
    Finding,
    op_evidence,
)
from cptrace.findings.missing_event import inline_syncs
from cptrace.findings.ranks import find_peer_waits
from cptrace.findings.shared_stream import accidental
from cptrace.findings.single_buffer import buffer_waits
from cptrace.findings.verdict import scheme_missing
from cptrace.intervals import BoolArray, Int64Array
from cptrace.outcome import NotApplicable
from cptrace.units import format_ns, plural

CODE: Final = "required-order"
DATA_FLOW: Final = "data-flow"
TRANSFER_BOUND: Final = "transfer-bound"

_OVERLAPPING: Final = (*RINGS, "all_gather_sliced", "ulysses_chunked")


def find(case: Case) -> Sequence[Finding] | NotApplicable:
    """Return the finding that communication is exposed because attention needs it before it can go on.

    Args:
        case: Case.
    """
    if case.flow is None:
        return scheme_missing(case, CODE)
    required = case.is_what(*labels.COMMUNICATION) & ~_explained(case) & (case.exposed_ns > 0)
    rows = np.flatnonzero(required)
    from_ns = _waited_until(case)[rows]
    exposed = case.exposed_ns[rows] - _waited(case)[rows]
    window_ns = sum(int((w.pieces.end_ns - w.pieces.start_ns).sum()) for w in case.scope.windows.values())
    total_ns = case.exposed_together_ns(rows, from_ns, case.end_ns[rows])
    if total_ns <= MIN_SHARE * window_ns:
        return ()
    is_bound = case.recognition.scheme in _OVERLAPPING
    worst = rows[np.lexsort((rows, -exposed))[:MAX_EVIDENCE]].tolist()
    return [
        Finding(
            code=CODE,
            form=TRANSFER_BOUND if is_bound else DATA_FLOW,
            severity=INFO,
            summary=(
                f"{plural(len(rows), 'transfer')} of {scheme_name(case)} exposed for {format_ns(total_ns)}"
                f" ({total_ns / max(window_ns, 1):.1%} of the time, waiting for other ranks apart): "
                + (
                    "longer than the attention that can run meanwhile, or with none to hide behind"
                    if is_bound
                    else "needed before attention starts, or made of what it puts out"
                )
            ),
            value=total_ns,
            unit="ns",
            confidence=case.recognition.confidence,
            advice=_advice(case, is_bound=is_bound),
            evidence=[op_evidence(case, row, "exposed") for row in worst],
        )
    ]


def _explained(case: Case) -> BoolArray:
    """Return which ops another finding explains, bool of shape (N,)."""
    explained = accidental(case)
    explained[case.stream_before[np.flatnonzero(explained)]] = True
    explained[buffer_waits(case).transfer] = True
    explained[inline_syncs(case).producer] = True
    return explained


def _waited(case: Case) -> Int64Array:
    """Return how much of each op's exposed time is waiting for other ranks, int64 of shape (N,)."""
    waited = np.zeros(len(case.ops), np.int64)
    waits = find_peer_waits(case)
    if not isinstance(waits, NotApplicable):
        waited[waits.rows] = waits.exposed_ns
    return waited


def _waited_until(case: Case) -> Int64Array:
    """Return until when each op waits for other ranks; its start where it does not, int64 of shape (N,)."""
    until = case.start_ns.copy()
    waits = find_peer_waits(case)
    if not isinstance(waits, NotApplicable):
        until[waits.rows] = waits.until_ns
    return until


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
        detected="Exposed communication of a recognised scheme that no accidental order, buffer or blocked host"
        " explains. Waiting for other ranks is taken off: see peer-wait. What the cause is removed by is another"
        " scheme, so no gain is predicted.",
        looks="nccl kernel, attention kernel, nccl kernel, with gaps in the compute row as long as the transfers.",
        fix="Chunk by heads, slice and prefetch, or use a scheme whose transfers have attention to hide behind.",
    ),
    find,
    forms=(DATA_FLOW, TRANSFER_BOUND),
)
