"""Causes that hide each other: mending the one that shows is said first, then what that uncovers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cptrace.errors import TraceError
from cptrace.findings import case as cases
from tests.support.diagnosed import findings, lost_time, not_looked_for, report_of, step_before
from tests.support.simulated_run import step_ns
from tests.support.simulated_schemes import COMPUTE, Ring

LATE = ("late-launch", "in-steps")
SOUND = Ring(n_steps=2)
SLOW_HOST = SOUND.but(pause_ns=900_000)
HIDDEN: dict[tuple[str, str | None], dict[str, Any]] = {
    ("shared-stream", None): {"kv_stream": COMPUTE, "dkv_stream": COMPUTE, "attention_first": True},
    ("single-buffer", None): {"n_buffers": 1},
}


@pytest.mark.parametrize("key", HIDDEN)
def test_what_a_slow_host_hides_is_found_behind_it(tmp_path: Path, key: tuple[str, str | None]) -> None:
    """
    host        launch            launch            launch
    stream 7          [attention]       [transfer]        [attention]     nothing waits for its stream
    mended      [attention][transfer][attention]                          now it does
    """
    found = findings(report_of(SLOW_HOST.but(**HIDDEN[key]).hosts(), tmp_path))
    assert [name for name, row in found.items() if row["predicted_step_ns"] is not None] == [LATE, key]
    assert found[LATE]["after"] == []
    assert found[key]["after"] == ["late-launch (in-steps)"]
    assert step_before(found[key]) == found[LATE]["predicted_step_ns"]
    assert found[key]["confidence"] == "medium"


@pytest.mark.parametrize("key", HIDDEN)
def test_alone_it_is_behind_nothing(tmp_path: Path, key: tuple[str, str | None]) -> None:
    found = findings(report_of(SOUND.but(**HIDDEN[key]).hosts(), tmp_path))
    assert found[key]["after"] == []
    assert found[key]["confidence"] == "high"


def test_a_slow_host_hides_nothing_in_a_sound_run(tmp_path: Path) -> None:
    assert lost_time(report_of(SLOW_HOST.hosts(), tmp_path)) == {LATE}


@pytest.mark.parametrize("key", HIDDEN)
def test_all_of_it_mended_is_the_sound_run(tmp_path: Path, key: tuple[str, str | None]) -> None:
    found = findings(report_of(SLOW_HOST.but(n_steps=1, **HIDDEN[key]).hosts(), tmp_path))
    sound = step_ns(SOUND.but(n_steps=1).hosts())
    assert found[key]["predicted_step_ns"] == pytest.approx(sound, rel=0.02)


def test_a_replay_that_fails_costs_one_finding_and_not_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object) -> None:
        raise TraceError("two ops wait for each other")

    monkeypatch.setattr(cases, "replay", fail)
    report = report_of(SOUND.but(n_buffers=1).hosts(), tmp_path)
    assert "two ops wait for each other" in not_looked_for(report)["single-buffer"]
    assert "late-launch" not in not_looked_for(report)  # it has nothing to replay
    assert report.rows("ranks")
