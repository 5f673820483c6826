"""Device work that waits for the host to launch it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

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
from cptrace.units import format_ns

CODE: Final = "late-launch"
IN_STEPS: Final = "in-steps"
BETWEEN_STEPS: Final = "between-steps"

# What a host that keeps up needs from one launch to the next: PyTorch's eager mode takes 5 to 20 us.
KEEPS_UP_NS: Final = 20_000
MIN_GAP_SHARE: Final = 0.05
"""A pause between steps that is shorter, as a share of the step, is not worth a reader's time."""
_NEVER: Final = np.iinfo(np.int64).min


def find(case: Case) -> Sequence[Finding]:
    """Return the finding that the device runs empty because the host launches too slowly.

    Args:
        case: Case.
    """
    return _find_in_steps(case) or _find_between_steps(case)


def _find_in_steps(case: Case) -> Sequence[Finding]:
    gain = gain_of(case, changes)
    if gain is None:
        return ()
    rows = late_ops(case)
    late_ns = _late_ns(case, rows)
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
    """Return the finding that devices are empty from the end of a step until the host launches the next one."""
    steps = case.scope.steps
    if isinstance(steps, NotApplicable) or steps.empty:
        return ()
    ordered = steps.sort_values(["rank", "step"])
    is_next = ordered["rank"].eq(ordered["rank"].shift()).to_numpy()
    gap_ns = (ordered["start_ns"] - ordered["end_ns"].shift()).to_numpy()[is_next].astype(np.int64)
    start_ns, rank = (ordered[name].to_numpy()[is_next] for name in ("start_ns", "rank"))
    first = _first_ops(case, start_ns, rank)
    is_late = case.has_cause(LAUNCH, HOST_SYNC)[first] & (gap_ns > 0)
    is_late &= 2 * _blocked_ns(case, first, start_ns - gap_ns, start_ns) < gap_ns
    if not is_late.any() or gap_ns[is_late].mean() <= MIN_GAP_SHARE * case.step_ns:
        return ()
    rows, gap_ns = first[is_late], gap_ns[is_late]
    ranks = np.unique(case.rank[rows]).tolist()
    return [
        Finding(
            code=CODE,
            form=BETWEEN_STEPS,
            severity=WARNING,
            summary=(
                f"devices of {ranks_text(ranks)} are empty for {format_ns(int(np.median(gap_ns)))} (median) between"
                " steps, until the host launches the first op of the next one; step times do not contain it"
            ),
            rank=ranks[0] if len(ranks) == 1 else None,
            value=int(gap_ns.sum()),
            unit="ns",
            confidence=HIGH,
            advice=(
                "Look at what the host does between steps: data loading in the main process, logging, checkpoints,"
                " optimizer work on the CPU, a synchronise call and what follows it. Prefetch data and launch the next"
                " step before the last one has ended."
            ),
            evidence=[op_evidence(case, int(row), "first op of a step") for row in rows[:MAX_EVIDENCE]],
        )
    ]


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


def _first_ops(case: Case, start_ns: Int64Array, rank: Int64Array) -> Int64Array:
    """Return the row of an op that starts at each given time on each given rank."""
    key = pd.MultiIndex.from_arrays([case.rank, case.start_ns])
    wanted = pd.MultiIndex.from_arrays([rank.astype(np.int64), start_ns])
    order = pd.Series(np.arange(len(key)), index=key)
    first = order[~order.index.duplicated()]
    return first.reindex(wanted).to_numpy(dtype=np.int64)


def changes(case: Case) -> Changes | None:
    """Return the changes that a host that keeps up makes, None where ops hardly wait for their launch.

    Args:
        case: Case.
    """
    rows = late_ops(case)
    return None if _is_little(case, rows) else Changes(host_gap_ns=KEEPS_UP_NS)


def _late_ns(case: Case, rows: Int64Array) -> Int64Array:
    """Return for how long the device was ready for each op before its launch."""
    return case.dependencies.launch_end_ns[rows] - case.causes.device_ready_ns[rows]


def _is_little(case: Case, rows: Int64Array) -> bool:
    """Return whether all delays together, on the rank with most, cannot be worth a replay."""
    late_ns = _late_ns(case, rows)
    n_steps = max(len(np.unique(case.steps.step)), 1)
    most_ns = np.bincount(case.rank[rows], weights=late_ns.astype(np.float64)).max(initial=0)
    return bool(most_ns / n_steps <= MIN_SHARE * case.step_ns)


def late_ops(case: Case) -> Int64Array:
    """Return the ops in steps that waited last for their launch, but for the first of each step and rank.

    Those that no device work comes before, such as the first of a stream, cannot be called late.

    Args:
        case: Case.
    """
    is_late = case.has_cause(LAUNCH)[case.steps.op]
    is_late &= case.causes.device_ready_ns[case.steps.op] > _NEVER
    key = case.rank[case.steps.op] * (int(case.steps.step.max(initial=0)) + 1) + case.steps.step
    is_late[np.unique(key, return_index=True)[1]] = False  # rows are ordered by start
    return case.steps.op[is_late]


DIAGNOSIS: Final = Diagnosis(
    CODE,
    "the host launches too late",
    Explanation(
        what="An op cannot start before the host has launched it. When launches take longer than the work they start,"
        " the device is empty between ops, and no stream or buffer helps. Form in-steps: within steps. Form"
        " between-steps: only from the end of one step to the first launch of the next.",
        detected="The end of the launching call is the last thing that an op waited for, later than all device work"
        " before it, and the host was not blocked meanwhile. The cost is a replay in which no two launches of a thread"
        f" are more than {KEEPS_UP_NS // 1000} us apart.",
        looks="Each kernel begins right at the end of its launch call; gaps in all rows of the device; the CUDA API row"
        " has no long synchronize call.",
        fix="CUDA graphs, torch.compile, fewer and larger ops, a quieter launching thread.",
    ),
    find,
    forms=(IN_STEPS, BETWEEN_STEPS),
    fixes=(Fix(changes),),
)
