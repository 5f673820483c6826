"""Two independent transfers one after the other because they use one communicator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from cptrace.findings.advice import scheme_name
from cptrace.findings.case import Case
from cptrace.findings.finding import WARNING, Diagnosis, Explanation, Finding, Fix, ranks_text
from cptrace.findings.held_up import HeldUp, once_each, waited_last, waiting_evidence
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
    transfers_served,
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
from cptrace.replay.resources import COMMUNICATOR, RESOURCES
from cptrace.units import plural

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
        return _unknown(case) or ()
    pairs = _held_up(case)
    ranks = np.unique(case.rank[pairs.delayed]).tolist()
    return [
        Finding(
            code=CODE,
            form=None,
            severity=WARNING,
            summary=(
                f"{plural(len(pairs.delayed), 'transfer')} on {ranks_text(ranks)} queued behind a transfer of something"
                f" else that is not needed first, {_how_many_wait(case, pairs)}: both use one communicator, which runs"
                " its transfers one by one"
            ),
            rank=ranks[0] if len(ranks) == 1 else None,
            value=case.exposed_together_ns(
                pairs.delayed, case.start_ns[pairs.delayed], case.end_ns[pairs.delayed]
            ),
            unit="ns",
            confidence=confidence_of(case),
            advice=(
                f"Create a second process group (torch.distributed.new_group) for the gradients of K and V in"
                f" {scheme_name(case)}: transfers of one group always run one after another, whatever streams they"
                " are issued on, and every rank must create the groups in the same order."
            ),
            recoverable_ns=gain.prediction.recoverable_ns,
            predicted_step_ns=gain.prediction.step_ns,
            evidence=waiting_evidence(
                case,
                pairs,
                case.exposed_ns[pairs.delayed],
                ("waits for the communicator", "uses the communicator"),
                ("is behind another transfer of the communicator", "is ahead of it"),
            ),
        )
    ]


def _unknown(case: Case) -> NotApplicable | None:
    """Return why transfers that cost nothing in turn cannot be called harmless; None where they can.

    Which transfers are behind another one is seen without any wait; what that costs is not.
    """
    if changes(case) is None:
        return calls_missing(case, CODE)
    return order_missing(case, CODE)


def _held_up(case: Case) -> HeldUp:
    """Return the transfers that are behind one of another channel, each once.

    Where the copy of what a transfer sends is behind the other one, the transfer is what that holds up.
    """
    freed, turns = np.flatnonzero(_behind_other_channel(case)), _turns(case)
    resources = case.recording.resources
    first = np.concatenate((freed, resources.consumer[turns]))
    culprit = np.concatenate((case.stream_before[freed], resources.producer[turns]))
    pairs = HeldUp(transfers_served(case, first), first, culprit)
    return once_each(case, pairs.where(case.is_measured(pairs.delayed)))


def _how_many_wait(case: Case, pairs: HeldUp) -> str:
    """Return how many transfers start when the one ahead of them ends, for people."""
    n_waiting = int(np.count_nonzero(waited_last(case, pairs)))
    if not n_waiting:
        return "and held up longer by something else for now"
    return f"{'' if n_waiting == len(pairs.delayed) else f'{n_waiting} of them '}starting when that ends"


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
