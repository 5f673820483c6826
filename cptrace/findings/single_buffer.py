"""A transfer that waits until attention has read the only buffer that it could be received into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from cptrace import labels
from cptrace.findings.advice import scheme_name
from cptrace.findings.case import Case, is_attention_work
from cptrace.findings.finding import WARNING, Diagnosis, Explanation, Finding, Fix, ranks_text
from cptrace.findings.held_up import HeldUp, once_each, waiting_evidence
from cptrace.findings.rewire import (
    DOUBLE_BUFFER,
    Edges,
    buffer_edges,
    join,
    needed_edges,
)
from cptrace.findings.verdict import (
    confidence_of,
    gain_of,
    order_missing,
    scheme_missing,
)
from cptrace.intervals import Int64Array
from cptrace.outcome import NotApplicable
from cptrace.recognition.places import BY_PATTERN
from cptrace.replay import Changes
from cptrace.units import plural

CODE: Final = "single-buffer"
_EXCHANGING: Final = "usp"
_READS: Final = "reads the buffer; an event is recorded behind it"


class _Waits(NamedTuple):
    """Event edges that make a transfer wait for the buffer's reader: their numbers, and rows of the ops."""

    edge: Int64Array
    transfer: Int64Array
    attention: Int64Array


def find(case: Case) -> Sequence[Finding] | NotApplicable:
    """Return the finding that transfers wait for a buffer that a second one would make free.

    Args:
        case: Case.
    """
    if case.flow is None:
        return scheme_missing(case, CODE)
    if case.recognition.scheme == _EXCHANGING and case.places.basis == BY_PATTERN:
        return NotApplicable(
            CODE,
            "between exchanges of heads, which hop a transfer is of is only guessed from the order of kernels; mark ops"
            " with ranges of the domain cptrace (cptrace/labels.py)",
        )
    gain = gain_of(case, changes)
    if gain is None:
        return order_missing(case, CODE) or ()
    waits = buffer_waits(case)
    pairs = HeldUp(waits.transfer, waits.transfer, waits.attention)
    pairs = once_each(case, pairs.where(case.is_measured(pairs.delayed)))
    transfers = pairs.delayed
    ranks = np.unique(case.rank[transfers]).tolist()
    return [
        Finding(
            code=CODE,
            form=None,
            severity=WARNING,
            summary=(
                f"{plural(len(transfers), 'transfer')} on {ranks_text(ranks)} may start only when the attention that"
                " reads the chunk before is done: one buffer is received into and read by turns (period 1; two buffers"
                " make it 2)"
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
                pairs,
                case.exposed_ns[transfers],
                ("waits for the buffer", _READS),
                ("may start only behind the reader of the buffer, and starts later", _READS),
            ),
        )
    ]


def changes(case: Case) -> Changes | None:
    """Return the changes that a second buffer makes, None where no transfer waits for the only one.

    Args:
        case: Case.
    """
    if case.flow is None:
        return None
    waits = buffer_waits(case)
    if not len(waits.edge):
        return None
    dropped = np.zeros(len(case.dependencies.events.producer), bool)
    dropped[waits.edge] = True
    edges = join(buffer_edges(case), needed_edges(case))
    return Changes(drop_event=dropped, added_producer=edges.producer, added_consumer=edges.consumer)


def buffer_waits(case: Case) -> _Waits:
    """Return the event edges by which a transfer waits for attention that it does not need, one hop before its reader.

    With two buffers a transfer waits, at most, for the attention two hops before the one that will read its data.
    """
    assert case.flow is not None
    edges = Edges(case.dependencies.events.producer, case.dependencies.events.consumer)
    comm, work = case.is_what(*labels.COMMUNICATION), is_attention_work(case)
    number = np.flatnonzero(comm[edges.consumer] & work[edges.producer])
    transfer, attention = edges.consumer[number], edges.producer[number]
    period = case.flow.reader_hop()[case.position[transfer]] - case.places.hop[case.position[attention]]
    is_single = ~case.is_needed(transfer, attention) & (period < DOUBLE_BUFFER)
    # In one stream order holds anyway: that is another finding.
    queue = case.dependencies.queue
    is_single &= queue[transfer] != queue[attention]
    return _Waits(number[is_single], transfer[is_single], attention[is_single])


def _advice(case: Case) -> str:
    return (
        f"Receive into two buffers by turns in {scheme_name(case)}: post the transfer of hop i+1 into buffer (i+1) % 2"
        " before the attention of hop i, which reads buffer i % 2, and let it wait only for the event recorded after"
        " the attention of hop i-1. It costs one more chunk of K and V per rank."
    )


DIAGNOSIS: Final = Diagnosis(
    CODE,
    "one receive buffer where two would overlap",
    Explanation(
        what="A transfer must not overwrite a buffer that is still being read. With one buffer it therefore waits for"
        " the attention that reads the chunk before, and attention then waits for the transfer: they take turns and"
        " never overlap, although streams and events are all as they should be.",
        detected="The transfer waits for an event recorded behind attention whose result it does not need, and that"
        " attention is the one right before the attention that will read its data: period 1. With two buffers the"
        " event of the attention before that would do: period 2. The cost is a replay with period 2.",
        looks="Two streams that strictly alternate: nccl kernel, attention kernel, nccl kernel; each nccl kernel starts"
        " within microseconds of the end of the attention before it.",
        fix="Allocate a second K/V buffer and use them by turns (ping-pong). One block of K and V is not enough, two"
        " are.",
    ),
    find,
    fixes=(Fix(changes),),
)
