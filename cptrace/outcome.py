"""The third outcome of an analysis: neither rows nor no rows, but *could not tell, and why*."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NotApplicable:
    """An analysis that could not be made.

    Attributes:
        analysis: Name of the analysis.
        reason: One sentence: what it needs, what was found, and what to record next time.
        missing: What it lacks, such as names of source tables.
    """

    analysis: str
    reason: str
    missing: tuple[str, ...] = ()
