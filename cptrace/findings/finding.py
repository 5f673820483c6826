"""A finding: what is wrong, where, how it is known, what it costs, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pandas as pd

from cptrace.intervals import Int64Array
from cptrace.outcome import NotApplicable

if TYPE_CHECKING:
    from cptrace.findings.case import Case
    from cptrace.replay import Changes

ERROR: Final = "error"
WARNING: Final = "warning"
INFO: Final = "info"
SEVERITIES: Final = (ERROR, WARNING, INFO)

HIGH: Final = "high"
MEDIUM: Final = "medium"
LOW: Final = "low"
CONFIDENCES: Final = (LOW, MEDIUM, HIGH)

MAX_EVIDENCE: Final = 6

Evidence = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """One diagnosis.

    Attributes:
        code: Stable code, one of `FINDINGS`.
        form: Which form of it, None where there is one only.
        severity: `error` (results may be wrong), `warning` (time is lost) or `info`.
        summary: One sentence: what was seen and where.
        rank: Rank that it is about, None for several or all.
        step: Step that it is about, None for several or all.
        value: What was measured, in `unit`.
        unit: Unit of the value.
        confidence: `high`, `medium` or `low`.
        advice: What to change.
        recoverable_ns: How much shorter a step gets without this cause, by replay; None where it cannot be removed.
        predicted_step_ns: Time of a step without it; None likewise.
        after: Names of the findings that hide it: the prediction is on top of mending them; empty where it pays alone.
        evidence: Ops that show it, as a person finds them in a timeline.
    """

    code: str
    form: str | None
    severity: str
    summary: str
    value: float | int
    unit: str
    confidence: str
    advice: str
    rank: int | None = None
    step: int | None = None
    recoverable_ns: int | None = None
    predicted_step_ns: int | None = None
    after: tuple[str, ...] = ()
    evidence: Sequence[Evidence] = field(default_factory=tuple)

    def to_row(self) -> dict[str, Any]:
        """Return the finding as a report states it."""
        return {
            "code": self.code,
            "form": self.form,
            "severity": self.severity,
            "summary": self.summary,
            "rank": self.rank,
            "step": self.step,
            "value": self.value,
            "unit": self.unit,
            "recoverable_ns": self.recoverable_ns,
            "predicted_step_ns": self.predicted_step_ns,
            "after": list(self.after),
            "confidence": self.confidence,
            "evidence": list(self.evidence),
            "advice": self.advice,
        }


def importance(row: Mapping[str, Any]) -> tuple[int, bool, int, float, str, str]:
    """Return what findings are ordered by: wrong results first, what pays alone, what can be recovered, what it takes.

    Args:
        row: A finding as a report states it.
    """
    in_time = float(row["value"]) if row["unit"] == "ns" else 0.0
    recoverable = row["recoverable_ns"] or 0
    is_hidden = bool(row.get("after"))
    return (
        SEVERITIES.index(row["severity"]),
        is_hidden,
        -recoverable,
        -in_time,
        row["code"],
        row["form"] or "",
    )


Outcome = Sequence[Finding | NotApplicable] | NotApplicable
"""What a diagnosis gives: what it found, and what it could not look for."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `cptrace explain` says about a code.

    Attributes:
        what: What it is.
        detected: How it is detected.
        looks: How it looks in the timeline.
        fix: How to fix it.
    """

    what: str
    detected: str
    looks: str
    fix: str


@dataclass(frozen=True, slots=True)
class Fix:
    """What a replay changes to take the cause of a finding out.

    Attributes:
        changes: Returns what is different in a case without the cause; None where the case does not have it.
        form: Form of the finding that it mends; None for all.
    """

    changes: Callable[[Case], Changes | None]
    form: str | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One line of the list of findings.

    Attributes:
        code: Stable code.
        title: A few words.
        forms: Forms that it comes in; empty where there is one only.
        explanation: What `cptrace explain` says.
        find: Returns what it finds in a case, and why it could not look, for all of it or for a form.
        fixes: What its predictions change; empty where no gain is predicted.
    """

    code: str
    title: str
    explanation: Explanation
    find: Callable[[Case], Outcome]
    forms: tuple[str, ...] = ()
    fixes: tuple[Fix, ...] = ()


def op_evidence(case: Case, row: int, what: str) -> Evidence:
    """Return an op as a person finds it in a timeline.

    Args:
        case: Case.
        row: Row in the table of ops.
        what: Its part in the finding, a few words.
    """
    ops = case.ops
    correlation = ops["correlation_id"].iloc[row]
    return {
        "what": what,
        "rank": int(ops["rank"].iloc[row]),
        "stream": int(ops["stream"].iloc[row]),
        "name": str(ops["name"].iloc[row]),
        "start_ns": int(ops["start_ns"].iloc[row]),
        "end_ns": int(ops["end_ns"].iloc[row]),
        "correlation_id": None if pd.isna(correlation) else int(correlation),
    }


def pair_evidence(
    case: Case, delayed: Int64Array, culprit: Int64Array, cost_ns: Int64Array, words: tuple[str, str]
) -> list[Evidence]:
    """Return the costliest pairs of a delayed op and its culprit.

    Args:
        case: Case.
        delayed: Rows of delayed ops, int64 of shape (P,).
        culprit: Row of the op that each waited for, int64 of shape (P,).
        cost_ns: What each pair costs, int64 of shape (P,).
        words: Part of the delayed op and of its culprit, a few words each.
    """
    order = np.lexsort((delayed, -cost_ns))[: MAX_EVIDENCE // 2]
    return [
        op_evidence(case, int(row), what)
        for pair in order.tolist()
        for row, what in ((delayed[pair], words[0]), (culprit[pair], words[1]))
    ]


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks for people: `rank 2`, `ranks 0, 1, 3`, or `12 ranks` where there are many."""
    if len(ranks) > 6:
        return f"{len(ranks)} ranks"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
