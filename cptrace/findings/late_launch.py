"""Device work that waits for the host to launch it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import pandas as pd

from cptrace import intervals
from cptrace.analyses.start_causes import HOST_SYNC, LAUNCH
from cptrace.findings.case import MIN_SHARE, Case
from cptrace.findings.finding import (
    HIGH,
    MAX_EVIDENCE,
    MEDIUM,
    WARNING,
    Diagnosis,
    Explanation,
    Finding,
    Fix,
    op_evidence,
    ranks_text,
)
from cptrace.findings.verdict import gain_of, without_peers
from cptrace.intervals import Int64Array, Intervals
from cptrace.outcome import NotApplicable
from cptrace.replay import Changes
from cptrace.units import format_fraction, format_ns

CODE: Final = "late-launch"
IN_STEPS: Final = "in-steps"
BETWEEN_STEPS: Final = "between-steps"

# What a host that keeps up needs from one launch to the next: PyTorch's eager mode takes 5 to 20 us.
KEEPS_UP_NS: Final = 20_000
MIN_GAP_SHARE: Final = 0.05
"""A pause between steps that is shorter, as a share of the step, is not worth a reader's time."""
_HALF: Final = 0.5
_ALMOST_ALL: Final = 0.95
_NEVER: Final = np.iinfo(np.int64).min


class _Late(NamedTuple):
    """Ops that could have started before they were launched.

    Attributes:
        row: Rows of ops, int64 of shape (M,).
        ns: For how long within its step the device was ready for each, int64 of shape (M,).
    """

    row: Int64Array
    ns: Int64Array


class _Pauses(NamedTuple):
    """The time from each step of a rank to its next one.

    Attributes:
        rank: Rank, int64 of shape (P,).
        step: Number of the next step, int64 of shape (P,).
        row: Row of the op that ends the pause, int64 of shape (P,).
        late_ns: For how long the device was empty because the host launched nothing, int64 of shape (P,); else 0.
    """

    rank: Int64Array
    step: Int64Array
    row: Int64Array
    late_ns: Int64Array


def find(case: Case) -> Sequence[Finding] | NotApplicable:
    """Return the finding that the device runs empty because the host launches too slowly.

    Args:
        case: Case.
    """
    missing = _launches_missing(case, _HALF)
    return missing or _find_in_steps(case) or _find_between_steps(case) or _undecided(case)


def _undecided(case: Case) -> Sequence[Finding] | NotApplicable:
    """Return why ops that wait for their launch are no finding, where the replay does not know when to launch all."""
    return () if changes(case) is None else _launches_missing(case, _ALMOST_ALL) or ()


def _launches_missing(case: Case, least: float) -> NotApplicable | None:
    """Return why it cannot be told what waited for its launch; None where at least that share has a known one."""
    is_known = case.dependencies.is_launch_known[case.steps.op]
    if not len(is_known) or is_known.mean() >= least:
        return None
    meta = case.scope.trace.meta
    return NotApplicable(
        CODE,
        f"the trace has no launching call of {format_fraction(1 - is_known.mean())} of the ops, so whether they waited"
        f" for the host is not known; record again with: {meta.record_again}",
        tuple(table for table in meta.missing_tables if "RUNTIME" in table.upper()),
    )


def _find_in_steps(case: Case) -> Sequence[Finding]:
    gain = gain_of(case, changes)
    if gain is None:
        return ()
    rows, late_ns = _late_ops(case)
    ranks = np.unique(case.rank[rows]).tolist()
    worst = rows[np.lexsort((rows, -late_ns))[:MAX_EVIDENCE]].tolist()
    # Without steps nobody knows whether the host was to launch anything at all in a pause.
    where = "in steps" if case.has_steps else "in the window"
    return [
        Finding(
            code=CODE,
            form=IN_STEPS,
            severity=WARNING,
            summary=(
                f"{len(rows)} of {len(case.steps.op)} ops {where} on {ranks_text(ranks)} could have started before"
                f" they were launched, by {format_ns(int(np.median(late_ns)))} in the median: the host is slower"
                " than the device"
            ),
            rank=ranks[0] if len(ranks) == 1 else None,
            value=int(late_ns.sum()),
            unit="ns",
            confidence=_confidence(case),
            advice=(
                "Make the host faster or give it less to do per step: capture the step in a CUDA graph or use"
                " torch.compile(mode='reduce-overhead'), fuse small ops, move Python work (data loading, logging,"
                " allocation) out of the launching thread, and pin the process to cores near its GPU. The prediction is"
                f" for a host that needs at most {KEEPS_UP_NS // 1000} us from one launch to the next."
            ),
            recoverable_ns=gain.prediction.recoverable_ns,
            predicted_step_ns=gain.prediction.step_ns,
            evidence=[op_evidence(case, row, "started right after its launch") for row in worst],
        )
    ]


def _confidence(case: Case) -> str:
    """Return how sure it is that the host is slow, and not blocked by what the trace does not tell."""
    confidence = HIGH if case.has_steps and not case.n_inferred_syncs else MEDIUM
    return without_peers(case, confidence)


def _find_between_steps(case: Case) -> Sequence[Finding]:
    """Return the finding that devices are empty between steps until the host launches more.

    A rank is judged by its own pauses: its peers wait for it in their steps, where their devices are not empty.
    """
    steps = case.scope.steps
    if isinstance(steps, NotApplicable) or steps.empty:
        return ()
    pauses = _pauses(case, steps)
    least_ns = MIN_GAP_SHARE * case.step_ns
    of_rank = pd.Series(pauses.late_ns).groupby(pauses.rank).transform("mean").to_numpy()
    is_judged = of_rank > least_ns
    shown = np.flatnonzero(is_judged & (pauses.late_ns > least_ns))
    if not len(shown):
        return ()
    rows, late_ns = pauses.row[shown], pauses.late_ns[shown]
    ranks = np.unique(pauses.rank[shown]).tolist()
    longest = rows[np.lexsort((rows, -late_ns))[:MAX_EVIDENCE]].tolist()
    return [
        Finding(
            code=CODE,
            form=BETWEEN_STEPS,
            severity=WARNING,
            summary=(
                f"{_empty_text(ranks, late_ns, int(np.count_nonzero(is_judged)))} between steps, until the host"
                f" launches the next op; {_who_waits(case, pauses, ranks)}"
            ),
            rank=ranks[0] if len(ranks) == 1 else None,
            value=int(late_ns.sum()),
            unit="ns",
            confidence=HIGH,
            advice=(
                "Look at what the host does between steps: data loading in the main process, logging, checkpoints,"
                " optimizer work on the CPU, a synchronise call and what follows it. Prefetch data and launch the next"
                " step before the last one has ended."
            ),
            evidence=[op_evidence(case, row, "first op after the pause") for row in longest],
        )
    ]


def _empty_text(ranks: Sequence[int], late_ns: Int64Array, n_times: int) -> str:
    """Return which devices are empty, for how long, and how often of all times where that is not always."""
    devices = (
        f"the device of {ranks_text(ranks)} is" if len(ranks) == 1 else f"devices of {ranks_text(ranks)} are"
    )
    how_often = "" if len(late_ns) == n_times else f", {len(late_ns)} of {n_times} times"
    return f"{devices} empty for {format_ns(int(np.median(late_ns)))} (median{how_often})"


def _who_waits(case: Case, pauses: _Pauses, ranks: Sequence[int]) -> str:
    """Return whether steps contain the pauses: those of ranks that are back earlier and wait for the others do."""
    late_ns = pd.Series(pauses.late_ns).groupby(pauses.step)
    is_alike = (late_ns.max() - late_ns.min()).mean() <= MIN_GAP_SHARE * case.step_ns
    if is_alike or not case.is_comm.any():
        return "step times do not contain it"
    if len(ranks) == len(np.unique(pauses.rank)):
        return (
            "ranks that pause less wait for the others within their steps, which are longer by the difference"
        )
    return "the other ranks wait for that within their steps, whose times contain it"


def _pauses(case: Case, steps: pd.DataFrame) -> _Pauses:
    """Return the longest time without any op on a rank from each of its steps to the next, where that is the host's.

    The longest stretch, and not all of them together: copies of the next batch, or an iteration that no range calls a
    step, may run between two steps, and how closely their ops follow each other is no pause between steps.
    """
    ranks = np.unique(steps["rank"]).tolist()
    found = [_pauses_of(case, rank, steps[steps["rank"] == rank]) for rank in ranks]
    rank, step, row, empty_ns = (np.concatenate(parts) for parts in zip(*found, strict=True))
    end_ns = case.start_ns[row]
    is_late = case.has_cause(LAUNCH, HOST_SYNC)[row]
    is_late &= 2 * _blocked_ns(case, row, end_ns - empty_ns, end_ns) < empty_ns
    return _Pauses(rank, step, row, np.where(is_late, empty_ns, 0))


def _pauses_of(case: Case, rank: int, steps: pd.DataFrame) -> tuple[Int64Array, ...]:
    """Return rank, step, row of the op that ends it, and length in ns of the longest time without ops before steps."""
    ordered = steps.sort_values(["start_ns", "end_ns"])
    before_ns, next_ns = ordered["end_ns"].cummax().to_numpy()[:-1], ordered["start_ns"].to_numpy()[1:]
    rows = np.flatnonzero(case.rank == rank)
    busy = intervals.union(Intervals(case.start_ns[rows], case.end_ns[rows]))
    empty = intervals.gaps(busy, intervals.union(Intervals(before_ns, next_ns)))
    number = np.searchsorted(next_ns, empty.end_ns)
    order = np.lexsort((empty.start_ns - empty.end_ns, number))
    longest = order[np.unique(number[order], return_index=True)[1]]
    # What ends a time without ops is an op: steps begin with one.
    ends, empty_ns = next_ns.copy(), np.zeros(len(next_ns), np.int64)
    ends[number[longest]] = empty.end_ns[longest]
    empty_ns[number[longest]] = (empty.end_ns - empty.start_ns)[longest]
    row = rows[np.searchsorted(case.start_ns[rows], ends)]
    return np.full(len(row), rank), ordered["step"].to_numpy()[1:], row, empty_ns


def _blocked_ns(case: Case, rows: Int64Array, start_ns: Int64Array, end_ns: Int64Array) -> Int64Array:
    """Return for how long in a time before each op the thread that launched it was blocked, in ns.

    Args:
        case: Case.
        rows: Rows of ops, int64 of shape (M,).
        start_ns: Start of each time, int64 of shape (M,).
        end_ns: End of each time, int64 of shape (M,).
    """
    blocking, launch_thread = case.dependencies.blocking, case.dependencies.launch_thread[rows]
    blocked = np.zeros(len(rows), np.int64)
    for thread in np.unique(launch_thread).tolist():
        calls, mine = blocking.thread == thread, np.flatnonzero(launch_thread == thread)
        busy = intervals.union(Intervals(blocking.start_ns[calls], blocking.end_ns[calls]))
        blocked[mine] = intervals.covered_ns(busy, start_ns[mine], end_ns[mine])
    return blocked


def changes(case: Case) -> Changes | None:
    """Return the changes that a host that keeps up makes, None where ops hardly wait for their launch.

    Args:
        case: Case.
    """
    if _launches_missing(case, _HALF) is not None:
        return None
    return None if _is_little(case, _late_ops(case)) else Changes(host_gap_ns=KEEPS_UP_NS)


def _is_little(case: Case, late: _Late) -> bool:
    """Return whether all delays together, on the rank with most, cannot be worth a replay."""
    n_steps = max(len(np.unique(case.steps.step)), 1)
    most_ns = np.bincount(case.rank[late.row], weights=late.ns.astype(np.float64)).max(initial=0)
    return bool(most_ns / n_steps <= MIN_SHARE * case.step_ns)


def _late_ops(case: Case) -> _Late:
    """Return the ops in steps that waited last for their launch, but for the first of each step and rank.

    Those that no device work comes before, such as the first of a stream, cannot be called late. What was ready before
    the step waited since its start: the time before is none of the step's.
    """
    rows = case.steps.op
    key = case.rank[rows] * (int(case.steps.step.max(initial=0)) + 1) + case.steps.step
    _, first, of_step = np.unique(key, return_index=True, return_inverse=True)  # rows are ordered by start
    ready_ns = np.maximum(case.causes.device_ready_ns[rows], case.start_ns[rows[first]][of_step])
    late_ns = case.dependencies.launch_end_ns[rows] - ready_ns
    is_late = case.has_cause(LAUNCH)[rows] & (late_ns > 0)
    is_late &= case.causes.device_ready_ns[rows] > _NEVER
    is_late[first] = False
    return _Late(rows[is_late], late_ns[is_late])


DIAGNOSIS: Final = Diagnosis(
    CODE,
    "the host launches too late",
    Explanation(
        what="An op cannot start before the host has launched it. When launches take longer than the work they start,"
        " the device is empty between ops, and no stream or buffer helps. Form in-steps: within steps. Form"
        " between-steps: only from the end of one step to the next.",
        detected="The end of the launching call is the last thing that an op waited for, later than all device work"
        " before it, and the host was not blocked meanwhile. The cost of form in-steps is a replay in which no two"
        f" launches of a thread are more than {KEEPS_UP_NS // 1000} us apart. Form between-steps is the longest time"
        " without any op from a step to the next, on each rank by itself; nothing is predicted for it.",
        looks="Each kernel begins right at the end of its launch call; gaps in all rows of the device; the CUDA API row"
        " has no long synchronize call.",
        fix="CUDA graphs, torch.compile, fewer and larger ops, a quieter launching thread.",
    ),
    find,
    forms=(IN_STEPS, BETWEEN_STEPS),
    fixes=(Fix(changes, IN_STEPS),),
)
