"""Ops that could have started and did not, though nothing in the trace held them back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from cptrace import labels
from cptrace.analyses.start_causes import QUEUE_ORDER
from cptrace.classify import is_attention
from cptrace.findings.case import Case
from cptrace.findings.finding import (
    LOW,
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
from cptrace.findings.verdict import gain_of, has_unknown_waits, waits_missing, without_peers
from cptrace.intervals import BoolArray
from cptrace.outcome import NotApplicable
from cptrace.replay import Changes
from cptrace.units import format_ns

CODE: Final = "queue-order"


def find(case: Case) -> Sequence[Finding] | NotApplicable:
    """Return the finding that ops start long after everything they are known to wait for.

    Args:
        case: Case.
    """
    if not case.is_exact:
        return NotApplicable(
            CODE,
            "on the emulated device with the paced or the real clock an op starts when its thread is woken up, which"
            " says nothing about queues; use --clock virtual",
        )
    if (missing := waits_missing(case, CODE)) is not None:
        return missing  # an op that waits for what is not recorded looks like one that could run and did not
    gain = gain_of(case, changes)
    if gain is None:
        return ()
    rows = np.flatnonzero(_late(case))
    residual = case.causes.residual_ns[rows]
    ranks = np.unique(case.rank[rows]).tolist()
    worst = rows[np.lexsort((rows, -residual))[:MAX_EVIDENCE]].tolist()
    return [
        Finding(
            code=CODE,
            form=None,
            severity=WARNING,
            summary=(
                f"{len(rows)} communication and attention ops on {ranks_text(ranks)} start"
                f" {format_ns(int(np.median(residual)))} (median) after all that they are known to wait for"
            ),
            rank=ranks[0] if len(ranks) == 1 else None,
            value=int(residual.sum()),
            unit="ns",
            confidence=without_peers(case, LOW if has_unknown_waits(case) else MEDIUM),
            advice=(
                "Check CUDA_DEVICE_MAX_CONNECTIONS: 1 puts all streams into one hardware queue, in the order of launch"
                " (it must be set before CUDA starts). Else the device was full: give the communication stream a higher"
                " priority (torch.cuda.Stream(priority=-1)) or leave it SMs (NCCL_MAX_CTAS, smaller attention grids)."
            ),
            recoverable_ns=gain.prediction.recoverable_ns,
            predicted_step_ns=gain.prediction.step_ns,
            evidence=[op_evidence(case, row, "started long after it could have") for row in worst],
        )
    ]


def changes(case: Case) -> Changes | None:
    """Return the changes that starting without a delay makes, None where no op starts late for an unknown reason.

    Args:
        case: Case.
    """
    late = _late(case) if case.is_exact else None
    return None if late is None or not late.any() else Changes(drop_residual=late)


def _late(case: Case) -> BoolArray:
    """Return which communication and attention ops have a large residual that no turn at a resource explains."""
    late = case.has_cause(QUEUE_ORDER) & (case.is_comm | is_attention(case.ops) | case.is_what(labels.MERGE))
    late &= case.scope.is_inside
    late[case.recording.resources.consumer] = False
    return late


DIAGNOSIS: Final = Diagnosis(
    CODE,
    "could run, and did not",
    Explanation(
        what="An op was launched, its stream was free and its events had fired, and still it did not start: hardware"
        " queues, priorities or a full device held it back.",
        detected="The residual, from when the last known cause was over to the start, is more than ten times the"
        " trace's usual one and more than 20 us, and no turn at the device or at a communicator explains it. Causes"
        " that were not recorded look the same, so it is never said with high confidence.",
        looks="A nccl kernel that starts only when a long attention kernel ends, in another stream, with no event"
        " between the two.",
        fix="CUDA_DEVICE_MAX_CONNECTIONS, stream priorities, fewer SMs for the kernel that fills the device.",
    ),
    find,
    fixes=(Fix(changes),),
)
