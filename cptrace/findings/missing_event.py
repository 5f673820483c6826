"""Order made in the wrong way: by blocking the host where an event would do, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import pandas as pd

from cptrace import labels
from cptrace.dependencies.reach import is_ordered
from cptrace.findings.case import Case
from cptrace.findings.finding import (
    ERROR,
    HIGH,
    MEDIUM,
    WARNING,
    Diagnosis,
    Explanation,
    Finding,
    Fix,
    Outcome,
    pair_evidence,
    ranks_text,
)
from cptrace.findings.rewire import Edges, behind_needed, buffer_edges, join, needed_edges
from cptrace.findings.verdict import (
    calls_missing,
    confidence_of,
    gain_of,
    has_unknown_waits,
    loss_of,
    lower,
    scheme_missing,
    unknown_records_share,
)
from cptrace.intervals import BoolArray, Int64Array
from cptrace.outcome import NotApplicable
from cptrace.recognition.places import BY_LABEL
from cptrace.replay import Changes
from cptrace.units import format_ns

CODE: Final = "missing-event"
HOST_SYNC: Final = "host-sync"
RACE: Final = "race"


def find(case: Case) -> Outcome:
    """Return the findings that the host waits inside a step, and that data is read without waiting for it.

    Args:
        case: Case.
    """
    races = scheme_missing(case, f"{CODE} ({RACE})") if case.flow is None else _find_race(case)
    return [*((races,) if isinstance(races, NotApplicable) else races), *_find_host_sync(case)]


class _Inline(NamedTuple):
    """Calls that block between launches of one step: their numbers, the op each waited for, the op launched next."""

    call: Int64Array
    producer: Int64Array
    following: Int64Array


def _find_host_sync(case: Case) -> Sequence[Finding | NotApplicable]:
    gain = gain_of(case, changes)
    if gain is None:
        return _host_sync_unknown(case)
    inline = inline_syncs(case)
    inside = case.scope.is_inside[inline.following]
    inline = _Inline(*(part[inside] for part in inline))
    blocking = case.dependencies.blocking
    blocked_ns = (blocking.end_ns - blocking.start_ns)[inline.call]
    ranks = np.unique(case.rank[inline.following]).tolist()
    names = _call_names(case, inline.call)
    where = "inside steps" if case.has_steps else "in the window"
    return [
        Finding(
            code=CODE,
            form=HOST_SYNC,
            severity=WARNING,
            summary=(
                f"the host of {ranks_text(ranks)} blocks {len(inline.call)} times {where} ({names}) before it"
                " launches the next op: what comes after is queued only when the device has caught up"
            ),
            rank=ranks[0] if len(ranks) == 1 else None,
            value=int(blocked_ns.sum()),
            unit="ns",
            confidence=_host_sync_confidence(case),
            advice=_HOST_SYNC_ADVICE,
            recoverable_ns=gain.prediction.recoverable_ns,
            predicted_step_ns=gain.prediction.step_ns,
            evidence=pair_evidence(
                case,
                inline.following,
                inline.producer,
                blocked_ns,
                ("launched after the host had waited", "what the host waited for"),
            ),
        )
    ]


def _host_sync_confidence(case: Case) -> str:
    confidence = confidence_of(case) if case.flow is not None else MEDIUM
    return lower(confidence) if case.n_inferred_syncs else confidence


def _host_sync_unknown(case: Case) -> Sequence[NotApplicable]:
    """Return why blocking calls that cost nothing by the replay cannot be called harmless; empty where they can."""
    name = f"{CODE} ({HOST_SYNC})"
    if not (loss_ns := loss_of(case, changes)):
        # Between which launches a call blocks cannot be told without the launches.
        missing = calls_missing(case, name)
        return () if missing is None else (missing,)
    return (
        NotApplicable(
            name,
            f"the host blocks inside steps, and a replay in which it does not is {format_ns(loss_ns)} a step slower,"
            " which no run would be: the order that the data needs, guessed from the order of kernels, is wrong; mark"
            " ops with ranges of the domain cptrace (cptrace/labels.py)",
        ),
    )


def changes(case: Case) -> Changes | None:
    """Return the changes that events in place of blocking calls make, None where no call blocks inside a step.

    Args:
        case: Case.
    """
    inline = inline_syncs(case)
    if not len(inline.call):
        return None
    dropped = np.zeros(len(case.dependencies.blocking.thread), bool)
    dropped[inline.call] = True
    edges = Edges(inline.producer, inline.following)
    if case.flow is not None:
        edges = join(behind_needed(case, edges), needed_edges(case), buffer_edges(case))
    return Changes(drop_blocking=dropped, added_producer=edges.producer, added_consumer=edges.consumer)


def inline_syncs(case: Case) -> _Inline:
    """Return the blocking calls between whose neighbouring launches on the thread no step ends.

    What a step ends with, one synchronisation behind all its launches, serialises nothing within it.
    """
    blocking, launched = case.dependencies.blocking, case.dependencies.launch_start_ns
    step = np.full(len(case.ops), -1, np.int64)
    step[case.steps.op] = case.steps.step
    parts = []
    candidates = np.flatnonzero(case.dependencies.is_launch_known)
    for thread in pd.unique(blocking.thread).tolist():
        ops = candidates[case.dependencies.launch_thread[candidates] == thread]
        ops = ops[np.argsort(launched[ops], kind="stable")]
        calls = np.flatnonzero((blocking.thread == thread) & blocking.has_producer)
        after = np.searchsorted(launched[ops], blocking.end_ns[calls], side="left")
        is_between = (after > 0) & (after < len(ops))
        calls, after = calls[is_between], after[is_between]
        same_step = (step[ops[after]] == step[ops[after - 1]]) & (step[ops[after]] >= 0)
        # In steps that are not measured too: what they leave behind, one rank ahead of another, is measured.
        same_step |= _is_one_block(case, ops[after], ops[after - 1])
        following = _next_elsewhere(case, ops, blocking.producer[calls], after)
        is_inline = same_step & (following >= 0)
        chosen = calls[is_inline]
        parts.append((chosen, blocking.producer[chosen], following[is_inline]))
    if not parts:
        none = np.zeros(0, np.int64)
        return _Inline(none, none, none)
    return _Inline(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def _is_one_block(case: Case, one: Int64Array, other: Int64Array) -> BoolArray:
    """Return whether pairs of ops are of one block, bool of shape (P,)."""
    first, second, block = case.position[one], case.position[other], case.places.block
    is_placed = (first >= 0) & (second >= 0)
    if not len(block):
        return is_placed
    return np.asarray(is_placed & (block[first] == block[second]), bool)


def _next_elsewhere(case: Case, ops: Int64Array, producer: Int64Array, place: Int64Array) -> Int64Array:
    """Return the first op launched from each place on into another stream than that of an op, -1 where none follows.

    Args:
        case: Case.
        ops: Rows of a thread's ops in launch order.
        producer: Rows of ops, int64 of shape (P,).
        place: Places in the launch order, int64 of shape (P,).
    """
    queue = case.dependencies.queue
    first = np.full(len(place), len(ops))
    for number in np.unique(queue[ops]):
        mine = np.flatnonzero(queue[ops] == number)
        following = np.append(mine, len(ops))[np.searchsorted(mine, place, side="left")]
        first = np.where(queue[producer] == number, first, np.minimum(first, following))
    # Where all is in one stream, the device still runs empty while the host waits: the next op is what is late.
    first = np.where(first < len(ops), first, place)
    return np.where(first < len(ops), ops[np.minimum(first, len(ops) - 1)], -1)


def _call_names(case: Case, call: Int64Array) -> str:
    """Return the kinds of blocking calls, the most frequent first."""
    kinds = case.scope.trace.syncs["kind"].astype(str).to_numpy()[case.dependencies.blocking.sync[call]]
    return ", ".join(f"{kind} synchronize" for kind in pd.Series(kinds).value_counts().index)


def race_changes(case: Case) -> Changes | None:
    """Return the changes that the missing waits make, None where none is missing or that cannot be told.

    Args:
        case: Case.
    """
    if case.flow is None or case.places.basis != BY_LABEL or _order_unknown(case) is not None:
        return None
    races = case.remembered("races", _unordered)
    if not len(races.consumer):
        return None
    return Changes(added_producer=races.producer, added_consumer=races.consumer)


def _unordered(case: Case) -> Edges:
    """Return the transfers and other ops of which one needs the other's data, and nothing orders the two."""
    assert case.flow is not None
    consumer, producer = case.flow.edges()
    is_comm = case.places.is_what(*labels.COMMUNICATION)
    crossing = is_comm[consumer] != is_comm[producer]
    after, before = case.places.rows[consumer[crossing]], case.places.rows[producer[crossing]]
    is_safe = is_ordered(case.dependencies, case.start_ns, case.end_ns, before, after)
    return Edges(before[~is_safe], after[~is_safe])


def _find_race(case: Case) -> Sequence[Finding] | NotApplicable:
    if case.places.basis != BY_LABEL:
        return NotApplicable(
            f"{CODE} (race)",
            "which data each op reads is only guessed from the order of kernels, which is too little to call a missing"
            " wait a race; mark ops with ranges of the domain cptrace (cptrace/labels.py)",
        )
    before, after = case.remembered("races", _unordered)
    inside = case.scope.is_inside[after] & case.scope.is_inside[before]
    after, before = after[inside], before[inside]
    if not len(after):
        return ()
    if (missing := _order_unknown(case)) is not None:
        return missing
    n_early = int(np.count_nonzero(case.start_ns[after] < case.end_ns[before]))
    ranks = np.unique(case.rank[after]).tolist()
    return [
        Finding(
            code=CODE,
            form=RACE,
            severity=ERROR,
            summary=(
                f"{len(after)} ops on {ranks_text(ranks)} use data without waiting for the op that writes it; {n_early}"
                " of them started before it was complete. Results may be wrong, however good the overlap looks"
            ),
            rank=ranks[0] if len(ranks) == 1 else None,
            value=len(after),
            unit="count",
            confidence=HIGH if confidence_of(case) == HIGH else MEDIUM,
            advice=_RACE_ADVICE,
            evidence=pair_evidence(
                case,
                after,
                before,
                case.end_ns[before] - case.start_ns[after],
                (
                    "uses the data",
                    "writes the data; no event, stream or host order leads from it to the other",
                ),
            ),
        )
    ]


def _order_unknown(case: Case) -> NotApplicable | None:
    """Return why missing order cannot be told from order that was not recorded; None where it can."""
    dependencies = case.dependencies
    again = f"record again with: {case.scope.trace.meta.record_again}"
    if has_unknown_waits(case):
        reason = (
            f"{dependencies.n_waits - dependencies.n_waits_paired} of {dependencies.n_waits} waits for events have no"
            " record in the trace, so what they order is not known"
        )
        again = f"record with {case.scope.trace.meta.record_waits}"
    elif not dependencies.is_launch_known.all():
        reason = "some launches were not recorded, so the order of waits and launches is not known"
    elif unknown_records_share(case) > 0:
        reason = (
            "the calls of some event records were not recorded, so what waits for these wait for is not known"
        )
    elif case.scope.trace.syncs.empty and case.scope.trace.event_records.empty:
        reason = "the trace has neither event records nor waits: perhaps there were none, perhaps they were not traced"
    else:
        return None
    return NotApplicable(f"{CODE} (race)", f"{reason}; {again}")


_HOST_SYNC_ADVICE: Final = (
    "Replace the host's wait by an event wait on the stream that needs the data: event.record(comm_stream);"
    " torch.cuda.current_stream().wait_event(event). work.wait() of torch.distributed already does that. Look for"
    " torch.cuda.synchronize(), event.synchronize(), .item(), .cpu() and prints of tensors between the launches, and"
    " for TORCH_NCCL_BLOCKING_WAIT=1 or CUDA_LAUNCH_BLOCKING=1 in the environment."
)
_RACE_ADVICE: Final = (
    "Record an event on the stream that writes, right behind the op that writes, and make the stream that reads wait"
    " for it before the op that reads: work.wait() for torch.distributed, or wait_event(event). Check results with the"
    " wait in place before you trust any timing of this run."
)

DIAGNOSIS: Final = Diagnosis(
    CODE,
    "order by a blocked host, or no order",
    Explanation(
        what="Form host-sync: the host blocks until a transfer is done and only then launches what uses its data. The"
        " device runs empty meanwhile, and nothing can be queued ahead. Form race: an op uses data of another stream"
        " and nothing makes it wait for that. It may read what is not there yet, and the overlap looks perfect because"
        " nobody waits.",
        detected="Host-sync: a blocking call (not a poll such as cudaEventQuery) lies between two launches of one step."
        " The cost is a replay in which the host does not block and the next compute op waits on the device instead."
        " Race: for each pair of ops of which the scheme's data flow says that one needs the other, a path of recorded"
        " edges is looked for (stream order, event record and wait, blocked host). A pair without one is a race,"
        " whether or not it went wrong this time.",
        looks="Host-sync: a long green synchronize call in the CUDA API row, gaps in all device rows that end when it"
        " returns. Race: nothing to see in the timeline, save for attention that starts while the transfer it reads"
        " still runs.",
        fix="Use events: record behind the producer, wait_event on the consumer's stream.",
    ),
    find,
    forms=(HOST_SYNC, RACE),
    fixes=(Fix(changes, HOST_SYNC),),
)
