"""Which pairs of ops show a finding: those in which the one is what the other waited for last."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cptrace.analyses.start_causes import CLOCK_TOLERANCE_NS
from cptrace.findings.case import Case
from cptrace.findings.finding import Evidence, pair_evidence
from cptrace.intervals import BoolArray, Int64Array


class HeldUp(NamedTuple):
    """P pairs of an op that is behind another one and of that one, as rows of ops.

    Attributes:
        delayed: The op that is late, int64 of shape (P,).
        first: The first of those right before it in its stream that go with it, such as the copy of what it sends, or
            itself, int64 of shape (P,).
        culprit: The op that both are behind, int64 of shape (P,).
    """

    delayed: Int64Array
    first: Int64Array
    culprit: Int64Array

    def where(self, chosen: BoolArray | Int64Array) -> HeldUp:
        """Return some of the pairs."""
        return HeldUp(*(rows[chosen] for rows in self))


def waited_last(case: Case, pairs: HeldUp) -> BoolArray:
    """Return in which pairs the culprit is what the delayed op waited for last, bool of shape (P,).

    Nothing else that it is known to wait for ended later, it started right then, and what goes with it did not wait for
    anything in between.

    Args:
        case: Case.
        pairs: Pairs.
    """
    ended_ns, causes = case.end_ns[pairs.culprit], case.causes
    late_ns = case.start_ns[pairs.first] - ended_ns
    is_last = causes.ready_ns[pairs.first] <= ended_ns + CLOCK_TOLERANCE_NS
    is_last &= (late_ns >= -CLOCK_TOLERANCE_NS) & (late_ns <= causes.large_residual_ns)
    return np.asarray(is_last & (_idle_ns(case, pairs) <= causes.large_residual_ns), bool)


def _idle_ns(case: Case, pairs: HeldUp) -> Int64Array:
    """Return for how long a stream is empty from the first op of each pair to the delayed one, in ns."""
    order = np.argsort(case.dependencies.queue, kind="stable")  # rows are ordered by start
    duration = (case.end_ns - case.start_ns)[order]
    busy_before_ns = np.empty(len(order), np.int64)
    busy_before_ns[order] = np.cumsum(duration) - duration
    busy_ns = busy_before_ns[pairs.delayed] - busy_before_ns[pairs.first]
    return np.asarray(case.start_ns[pairs.delayed] - case.start_ns[pairs.first] - busy_ns, np.int64)


def once_each(case: Case, pairs: HeldUp) -> HeldUp:
    """Return one pair for each delayed op: what it waited for last, else the one of which the culprit ended last.

    Args:
        case: Case.
        pairs: Pairs.
    """
    order = np.lexsort((case.end_ns[pairs.culprit], waited_last(case, pairs), pairs.delayed))
    pairs = pairs.where(order)
    return pairs.where(np.append(pairs.delayed[1:] != pairs.delayed[:-1], True)[: len(order)])


def waiting_evidence(
    case: Case, pairs: HeldUp, cost_ns: Int64Array, waits: tuple[str, str], is_behind: tuple[str, str]
) -> list[Evidence]:
    """Return the costliest pairs in which one op waits for the other; where there are none, those that would.

    Args:
        case: Case.
        pairs: Pairs.
        cost_ns: What each costs, int64 of shape (P,).
        waits: Part of the delayed op and of its culprit where it is what that waited for last, a few words each.
        is_behind: The same where something else held the delayed op up for longer.
    """
    chosen, words = waited_last(case, pairs), waits
    if not chosen.any():
        chosen, words = np.ones(len(chosen), bool), is_behind
    shown = pairs.where(chosen)
    return pair_evidence(case, shown.delayed, shown.culprit, cost_ns[chosen], words)
