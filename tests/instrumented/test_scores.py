"""When keys and values may travel as fp8."""

from __future__ import annotations

import math

import pytest

from instrumented.checks import fp8_json
from instrumented.schemes import Monitors
from instrumented.scores import ScoreMonitor


@pytest.mark.parametrize(
    ("largest", "is_allowed"), [(None, False), (49.0, True), (50.0, True), (50.5, False), (math.nan, False)]
)
def test_fp8_needs_a_measured_score_within_the_limit(largest: float | None, is_allowed: bool) -> None:
    monitor = ScoreMonitor(50.0)
    assert monitor.decide(3, largest) is is_allowed
    assert monitor.uses_fp8 == {3: is_allowed}
    assert Monitors(fp8=monitor).sends_fp8(3) is is_allowed
    assert not Monitors(fp8=monitor).sends_fp8(0)


def test_the_latest_step_decides() -> None:
    monitor = ScoreMonitor(50.0)
    assert [monitor.decide(0, largest) for largest in (None, 10.0, 60.0, 20.0)] == [False, True, False, True]
    assert monitor.largest == {0: 20.0}


def test_the_record_names_the_layers() -> None:
    monitor = ScoreMonitor(50.0)
    for layer, largest in enumerate((10.0, 60.0, math.nan)):
        monitor.decide(layer, largest)
    assert fp8_json(monitor) == {
        "score_limit": 50.0,
        "largest_score": 60.0,
        "fp8_layers": [0],
        "fallback_layers": [1, 2],
    }
    assert fp8_json(None) is None
    assert fp8_json(ScoreMonitor(1.0))["largest_score"] is None


def test_a_scheme_without_fp8_sends_none() -> None:
    assert not Monitors().sends_fp8(0)
