"""Finding `queue-order`: nothing held it back, and it did not start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.diagnosed import findings, lost_time, not_looked_for, report_of, step_before
from tests.support.simulated_run import step_ns
from tests.support.simulated_schemes import Ring

KEY = ("queue-order", None)


def test_attention_that_starts_late_for_no_reason_in_the_trace(tmp_path: Path) -> None:
    """
    stream 7         held [attention 0]  held [attention 1]
    stream 13   [kv 0     ]
    """
    ring = Ring(held_ns=200_000)
    report = report_of(ring.hosts(), tmp_path)
    assert lost_time(report) == {KEY}
    row = findings(report)[KEY]
    assert row["confidence"] == "medium"
    assert step_before(row) == step_ns(ring.hosts())
    assert row["predicted_step_ns"] == pytest.approx(step_ns(ring.but(held_ns=0).hosts()), abs=10_000)


def test_the_usual_delay_is_none(tmp_path: Path) -> None:
    assert not lost_time(report_of(Ring(held_ns=15_000).hosts(), tmp_path))


@pytest.mark.parametrize("clock", ["paced", "real"])
def test_threads_of_a_busy_machine_say_nothing_about_queues(tmp_path: Path, clock: str) -> None:
    how = {"device_kind": "cpu-emulated", "clock": clock}
    report = report_of(Ring(held_ns=200_000).hosts(), tmp_path, **how)
    assert KEY not in findings(report)
    assert "thread is woken up" in not_looked_for(report)["queue-order"]


def test_where_events_have_no_records_it_cannot_be_told(tmp_path: Path) -> None:
    """What looks like a delay may be the wait for an event of which only one side was recorded."""
    report = report_of(Ring(held_ns=200_000).hosts(), tmp_path, has_records=False)
    assert KEY not in findings(report)
    assert "no record in the trace" in not_looked_for(report)["queue-order"]
