"""Whether two runs differ by more than their own steps do.

The rule: the medians of the steps differ, and by more than the spread of the steps of either run. The spread is the
highest minus the lowest step, with an eighth of the steps left out at each end, which needs eight steps; two steps say
little about their spread and three a little more, so theirs is taken larger. Steps of one run do not show what differs
from run to run (placement, clock speed), so nothing below a hundredth of the step counts either.

Two runs of equal normal noise are said to differ in at most 3 of 100 comparisons (2 or 3 steps), 2 of 100 (4 steps)
and 1 of 100 (5 or more); tests/compare/test_noise.py measures that, with skewed and heavy-tailed noise too. One step
shows no spread: then nothing is said.

Source: a range in place of a standard deviation follows E. Lord, "The use of range in place of standard deviation in
the t-test", Biometrika 34 (1947).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Final

NO_DIFFERENCE: Final = "no-difference"
UNKNOWN: Final = "unknown"
LOWER: Final = "lower"
HIGHER: Final = "higher"

FLOOR: Final = 0.01
"""Part of a step below which runs are not told apart."""

_FEW_STEPS: Final = {2: 5.0, 3: 1.25}
_TRIMMED: Final = 8


def spread(values: Sequence[float]) -> float:
    """Return the highest minus the lowest value, an eighth of them left out at each end.

    Args:
        values: At least one value.
    """
    ordered = sorted(values)
    n_left_out = len(ordered) // _TRIMMED
    return ordered[len(ordered) - 1 - n_left_out] - ordered[n_left_out]


def noise(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return by how much the medians of two runs may differ without meaning anything, None where that is not known.

    Args:
        first: One value per step of a run.
        second: One value per step of the other run.
    """
    n_steps = min(len(first), len(second))
    if n_steps < 2:
        return None
    return _FEW_STEPS.get(n_steps, 1.0) * max(spread(first), spread(second))


def judge(first: Sequence[float], second: Sequence[float], limit: float | None) -> str:
    """Return whether the second run is lower or higher than the first, or not to be told apart from it.

    Args:
        first: One value per step of a run.
        second: One value per step of the other run.
        limit: Differences of the medians up to here mean nothing; None where that is not known.
    """
    difference = median(second) - median(first)
    if limit is None:
        return UNKNOWN
    if abs(difference) <= limit:
        return NO_DIFFERENCE
    return HIGHER if difference > 0 else LOWER
