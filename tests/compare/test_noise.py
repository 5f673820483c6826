"""The rule that tells runs apart: how often it is wrong, and what it sees."""

from __future__ import annotations

import numpy as np
import pytest

from cptrace.noise import HIGHER, LOWER, NO_DIFFERENCE, UNKNOWN, judge, noise, spread

N_PAIRS = 4000
NOISES = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "skewed": lambda rng, shape: rng.exponential(size=shape),
    "heavy-tailed": lambda rng, shape: rng.standard_t(3, size=shape),
}


def rate_of_differences(draw, n_first, n_second, shift=0.0):
    """Return how many of many simulated pairs of runs are said to differ."""
    rng = np.random.default_rng([n_first, n_second])
    first = (100 + draw(rng, (N_PAIRS, n_first))).tolist()
    second = (100 + shift + draw(rng, (N_PAIRS, n_second))).tolist()
    verdicts = [judge(a, b, noise(a, b)) for a, b in zip(first, second, strict=True)]
    return sum(verdict in (LOWER, HIGHER) for verdict in verdicts) / N_PAIRS


@pytest.mark.parametrize("name", NOISES)
@pytest.mark.parametrize(
    ("n_first", "n_second", "most"),
    [(2, 2, 0.03), (3, 3, 0.04), (4, 4, 0.02), (5, 5, 0.01), (8, 8, 0.01), (16, 16, 0.01),
     (3, 10, 0.04), (20, 4, 0.02)],
)  # fmt: skip
def test_equal_runs_are_seldom_said_to_differ(name, n_first, n_second, most):
    assert rate_of_differences(NOISES[name], n_first, n_second) <= most


@pytest.mark.parametrize(
    ("n_steps", "shift", "least"), [(3, 5, 0.9), (5, 4, 0.85), (10, 4, 0.95), (32, 4, 0.99)]
)
def test_large_differences_are_seen(n_steps, shift, least):
    assert rate_of_differences(NOISES["normal"], n_steps, n_steps, shift) >= least


def test_direction():
    assert judge([10, 11, 10, 11], [20, 21, 20, 21], 1) == HIGHER
    assert judge([20, 21, 20, 21], [10, 11, 10, 11], 1) == LOWER
    assert judge([10, 12], [11, 13], 1) == NO_DIFFERENCE, "at the limit itself nothing is said"


def test_one_step_shows_no_spread():
    assert noise([10], [20]) is None
    assert noise([10, 11, 12], [20]) is None
    assert judge([10], [20], None) == UNKNOWN


def test_few_steps_say_little():
    assert noise([10, 11], [10, 10]) == 5
    assert noise([10, 11, 10], [10, 10, 10]) == 1.25
    assert noise([10, 11, 10, 10], [10, 10, 10, 10]) == 1


def test_one_slow_step_of_many_does_not_hide_a_difference():
    first, second = [10, 10, 10, 10, 10, 10, 10, 500], [20] * 8
    assert spread(first) == 0
    assert judge(first, second, noise(first, second)) == HIGHER
