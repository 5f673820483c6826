"""Communication and attention queued in one stream, in an order that neither needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from cptrace import labels
from cptrace.findings.advice import scheme_name
from cptrace.findings.case import Case
from cptrace.findings.finding import WARNING, Diagnosis, Explanation, Finding, Fix, ranks_text
from cptrace.findings.held_up import HeldUp, waiting_evidence
from cptrace.findings.rewire import (
    buffer_edges,
    is_free_of,
    is_sending,
    join,
    needed_edges,
    stream_edges,
)
from cptrace.findings.verdict import (
    calls_missing,
    confidence_of,
    gain_of,
    order_missing,
    scheme_missing,
)
from cptrace.intervals import BoolArray
from cptrace.outcome import NotApplicable
from cptrace.replay import Changes

CODE: Final = "shared-stream"


def find(case: Case) -> Sequence[Finding] | NotApplicable:
    """Return the finding that transfers and attention hold each other up in one stream.

    Args:
        case: Case.
    """
    if case.flow is None:
        return scheme_missing(case, CODE)
    gain = gain_of(case, changes)
    if gain is None:
        return _unknown(case) or ()
    delayed = np.flatnonzero(accidental(case))
    delayed = delayed[case.is_measured(delayed)]
    culprit = case.stream_before[delayed]
    transfers = np.unique(np.where(case.is_comm[delayed], delayed, culprit))
    exposed = case.exposed_ns[np.where(case.is_comm[delayed], delayed, culprit)]
    ranks = np.unique(case.rank[delayed]).tolist()
    streams = sorted(set(case.ops["stream"].to_numpy()[delayed].tolist()))
    return [
        Finding(
            code=CODE,
            form=None,
            severity=WARNING,
            summary=(
                f"{len(transfers)} transfers share stream {', '.join(map(str, streams))} with attention on"
                f" {ranks_text(ranks)}: {len(delayed)} times one is queued behind the other without needing its result"
            ),
            rank=ranks[0] if len(ranks) == 1 else None,
            value=case.exposed_together_ns(transfers, case.start_ns[transfers], case.end_ns[transfers]),
            unit="ns",
            confidence=confidence_of(case),
            advice=_advice(case),
            recoverable_ns=gain.prediction.recoverable_ns,
            predicted_step_ns=gain.prediction.step_ns,
            evidence=waiting_evidence(
                case,
                HeldUp(delayed, delayed, culprit),
                exposed,
                ("waits in the stream", "is ahead in the same stream"),
                ("is behind it in the stream, and starts later", "is ahead in the same stream"),
            ),
        )
    ]


def _unknown(case: Case) -> NotApplicable | None:
    """Return why a shared stream that costs nothing cannot be called harmless; None where it can.

    Which ops share a stream is seen without any wait; what that costs is not.
    """
    if changes(case) is None:
        return calls_missing(case, CODE)
    return order_missing(case, CODE)


def changes(case: Case) -> Changes | None:
    """Return the trace's changes without the accidental order, None where there is none.

    Args:
        case: Case.
    """
    if case.flow is None:
        return None
    freed = accidental(case)
    if not freed.any():
        return None
    freed |= _between_channels(case, freed)
    edges = join(stream_edges(case, freed), needed_edges(case), buffer_edges(case))
    return Changes(drop_previous=freed, added_producer=edges.producer, added_consumer=edges.consumer)


def accidental(case: Case) -> BoolArray:
    """Return which ops wait in their stream for one of the other sort that they do not need, bool of shape (N,)."""
    before = case.stream_before
    rows = np.flatnonzero((before >= 0) & (case.dependencies.previous == before))
    comm = case.is_what(*labels.COMMUNICATION)
    work = (case.position >= 0) & ~is_sending(case)
    ahead = before[rows]
    rows = rows[(comm[rows] & work[ahead]) | (work[rows] & comm[ahead])]
    freed = np.zeros(len(case.ops), bool)
    freed[rows[~case.is_needed(rows, before[rows])]] = True
    return freed


def _between_channels(case: Case, freed: BoolArray) -> BoolArray:
    """Return which transfers wait for one of another channel in the streams of freed ops, bool of shape (N,).

    Only because both are in the stream of attention are they behind one another: moved out, each channel has its own.
    """
    queue, before = case.dependencies.queue, case.stream_before
    rows = np.flatnonzero((before >= 0) & (case.dependencies.previous == before))
    rows = rows[np.isin(queue[rows], np.unique(queue[freed]))]
    comm = case.is_what(*labels.COMMUNICATION)
    rows = rows[comm[rows] & comm[before[rows]]]
    found = np.zeros(len(case.ops), bool)
    found[rows[is_free_of(case, rows, before[rows])]] = True
    return found


def _advice(case: Case) -> str:
    return (
        f"Give the transfers of {scheme_name(case)} a stream of their own: issue them under"
        " torch.cuda.stream(comm_stream), or with async_op=True (since PyTorch 2.x, async_op=False runs them on the"
        " current stream), and order them by events alone: comm_stream.wait_event(produced), then"
        " torch.cuda.current_stream().wait_event(arrived) right before the first kernel that reads the data."
    )


DIAGNOSIS: Final = Diagnosis(
    CODE,
    "transfers and attention in one stream",
    Explanation(
        what="A stream runs its work in the order of launch. A transfer queued behind attention starts when that"
        " attention ends, and attention queued behind a transfer waits for it, although neither needs the other's"
        " result. The two can never overlap.",
        detected="For each transfer and each attention op the op before it in its stream is looked at. If it is of the"
        " other sort and the scheme's data flow does not ask for that order, the order is accidental. The cost is what"
        " a replay gives in which the accidental order is gone and the needed one is kept.",
        looks="One row in the timeline holds both nccl and attention kernels, strictly one after the other; the row of"
        " the communication stream is empty or does not exist; overlap is near zero.",
        fix="Issue transfers on a stream of their own and order them by events. In PyTorch: a torch.cuda.Stream for"
        " communication, or async_op=True and work.wait() as late as possible (it makes the current stream wait, not"
        " the host).",
    ),
    find,
    fixes=(Fix(changes),),
)
