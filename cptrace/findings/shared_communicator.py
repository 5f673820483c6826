"""Two independent transfers one after the other because they use one communicator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from cptrace.findings.advice import scheme_name
from cptrace.findings.case import Case
from cptrace.findings.finding import WARNING, Diagnosis, Explanation, Finding, Fix, pair_evidence, ranks_text
from cptrace.findings.rewire import (
    Edges,
    are_other_channels,
    behind_needed,
    buffer_edges,
    is_sending,
    join,
    lanes,
    needed_edges,
    stream_edges,
)
from cptrace.findings.verdict import confidence_of, gain_of, scheme_missing
from cptrace.intervals import BoolArray
from cptrace.outcome import NotApplicable
from cptrace.replay import Changes
from cptrace.replay.resources import COMMUNICATOR, RESOURCES

CODE: Final = "shared-communicator"


def find(case: Case) -> Sequence[Finding] | NotApplicable:
    """Return the finding that transfers of different channels wait for each other.

    Args:
        case: Case.
    """
    if case.flow is None:
        return scheme_missing(case, CODE)
    gain = gain_of(case, changes)
    if gain is None:
        return ()
    freed, turns = _behind_other_channel(case), _turns(case)
    resources = case.recording.resources
    delayed = np.concatenate((np.flatnonzero(freed), resources.consumer[turns]))
    culprit = np.concatenate((case.stream_before[np.flatnonzero(freed)], resources.producer[turns]))
    is_measured = case.is_measured(delayed)
    delayed, culprit = delayed[is_measured], culprit[is_measured]
    ranks = np.unique(case.rank[delayed]).tolist()
    return [
        Finding(
            code=CODE,
            form=None,
            severity=WARNING,
            summary=(
                f"{len(delayed)} transfers on {ranks_text(ranks)} wait for a transfer of something else that they do"
                " not need: both use one communicator, which runs its transfers one by one"
            ),
            rank=ranks[0] if len(ranks) == 1 else None,
            value=case.exposed_together_ns(delayed, case.start_ns[delayed], case.end_ns[delayed]),
            unit="ns",
            confidence=confidence_of(case),
            advice=(
                f"Create a second process group (torch.distributed.new_group) for the gradients of K and V in"
                f" {scheme_name(case)}: transfers of one group always run one after another, whatever streams they"
                " are issued on, and every rank must create the groups in the same order."
            ),
            recoverable_ns=gain.prediction.recoverable_ns,
            predicted_step_ns=gain.prediction.step_ns,
            evidence=pair_evidence(
                case,
                delayed,
                culprit,
                case.exposed_ns[delayed],
                ("waits for the communicator", "uses the communicator"),
            ),
        )
    ]


def changes(case: Case) -> Changes | None:
    """Return the changes that a communicator per channel makes, None where channels do not wait for each other.

    Args:
        case: Case.
    """
    if case.flow is None:
        return None
    freed, turns = _behind_other_channel(case), _turns(case)
    if not freed.any() and not turns.any():
        return None
    late = _late_records(case, freed)
    events = case.dependencies.events
    behind = behind_needed(case, Edges(events.producer[late], events.consumer[late]))
    edges = join(stream_edges(case, freed), behind, needed_edges(case), buffer_edges(case))
    return Changes(
        drop_previous=freed,
        drop_event=late,
        drop_resource=turns,
        added_producer=edges.producer,
        added_consumer=edges.consumer,
    )


def _late_records(case: Case, freed: BoolArray) -> BoolArray:
    """Return which event edges stand for a transfer of the other channel, bool of shape (E,).

    An event recorded in a stream that channels share stands for all that is queued there, also for a transfer that
    whoever waits for it does not need.
    """
    events, queue = case.dependencies.events, case.dependencies.queue
    is_placed = (case.position[events.producer] >= 0) & (case.position[events.consumer] >= 0)
    late = is_placed & case.is_comm[events.producer]
    late &= np.isin(queue[events.producer], np.unique(queue[freed]))
    number = np.flatnonzero(late)
    late[number] = ~case.is_needed(events.consumer[number], events.producer[number])
    return late


def _behind_other_channel(case: Case) -> BoolArray:
    """Return which transfers, or copies for them, wait in their stream for one of another channel, bool of (N,)."""
    freed = np.zeros(len(case.ops), bool)
    before = case.stream_before
    sending = is_sending(case)
    rows = np.flatnonzero((before >= 0) & sending & (case.dependencies.previous == before))
    rows = rows[sending[before[rows]]]
    freed[rows[_is_other_channel(case, rows, before[rows])]] = True
    return freed


def _turns(case: Case) -> BoolArray:
    """Return which inferred turns at a communicator are between channels, bool of shape (R,)."""
    resources = case.recording.resources
    turns: BoolArray = resources.kind == RESOURCES.index(COMMUNICATOR)
    has_place = (case.position[resources.consumer] >= 0) & (case.position[resources.producer] >= 0)
    turns &= has_place
    number = np.flatnonzero(turns)
    turns[number] = _is_other_channel(case, resources.consumer[number], resources.producer[number])
    return turns


def _is_other_channel(case: Case, consumer: np.ndarray, producer: np.ndarray) -> BoolArray:
    """Return whether pairs of transfers or copies for them, as rows of ops, are of two channels of one block."""
    is_other = are_other_channels(lanes(case)[consumer], lanes(case)[producer])
    return np.asarray(is_other & ~case.is_needed(consumer, producer), bool)


DIAGNOSIS: Final = Diagnosis(
    CODE,
    "independent transfers on one communicator",
    Explanation(
        what="A communicator (process group) runs its transfers one after another, in the order of launch. K and V on"
        " their way to the next hop and gradients on their way home need nothing of each other; on one communicator"
        " each waits for the other.",
        detected="A transfer starts when another of the same rank ends, in the same stream or exactly then in another"
        " one, though it carries something else and does not need it. The cost is a replay in which the two are free"
        " of each other.",
        looks="Two nccl kernels back to back in one row, where the second could have started earlier; the backward pass"
        " has one communication row in place of two.",
        fix="One process group per independent flow: KV and dKV.",
    ),
    find,
    fixes=(Fix(changes),),
)
