"""CUDA graphs traced as a whole hide the kernels inside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cptrace.analyses.account import hidden_ns
from cptrace.findings.case import Case
from cptrace.findings.finding import HIGH, WARNING, Diagnosis, Explanation, Finding, ranks_text
from cptrace.units import format_ns

CODE: Final = "graph-hidden"


def find(case: Case) -> Sequence[Finding]:
    """Return the finding that device time lies inside graphs that were traced as a whole.

    Args:
        case: Case.
    """
    hidden = hidden_ns(case.scope)
    if not hidden:
        return ()
    total = sum(hidden.values())
    return [
        Finding(
            code=CODE,
            form=None,
            severity=WARNING,
            summary=(
                f"{format_ns(total)} of device time on {ranks_text(sorted(hidden))} lie inside CUDA graphs that were"
                " traced as a whole: what runs in them, and what overlaps, cannot be seen"
            ),
            rank=next(iter(hidden)) if len(hidden) == 1 else None,
            value=total,
            unit="ns",
            confidence=HIGH,
            advice=(
                "Record again with nsys profile --cuda-graph-trace=node. Tracing nodes slows graph launches"
                " somewhat, so compare times only between traces made the same way."
            ),
        )
    ]


DIAGNOSIS: Final = Diagnosis(
    CODE,
    "kernels hidden in CUDA graphs",
    Explanation(
        what="By default Nsight Systems records one row per launch of a CUDA graph. The kernels inside, communication"
        " among them, are not in the trace.",
        detected="The trace has rows of graph launches and no kernels of graph nodes for them.",
        looks="One long bar called CUDA graph launch in place of kernels.",
        fix="--cuda-graph-trace=node.",
    ),
    find,
)
