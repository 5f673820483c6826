"""Finding `imbalance`: ranks that have more attention to compute, by the schedule or by the work."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.diagnosed import findings, lost_time, report_of, step_before
from tests.support.simulated_run import step_ns
from tests.support.simulated_schemes import Ring

SCHEDULE, WORK = ("imbalance", "schedule"), ("imbalance", "work")
GRADED = (200_000, 400_000, 600_000, 800_000)
CAUSAL = {
    "device_kind": "cuda",
    "scheme": "zigzag_ring",
    "cp_size": 4,
    "causal": True,
    "layout": "contiguous",
}


@pytest.mark.parametrize(
    ("run", "key", "severity"),
    [
        ({}, WORK, "warning"),
        (CAUSAL, SCHEDULE, "warning"),
        ({**CAUSAL, "scheme": "ring"}, SCHEDULE, "info"),  # chosen with the scheme, no mistake
        ({**CAUSAL, "layout": "zigzag"}, WORK, "warning"),
        ({**CAUSAL, "causal": False}, WORK, "warning"),
    ],
)
def test_attention_times_that_are_graded_over_the_ranks(
    tmp_path: Path, run: dict[str, object], key: tuple[str, str], severity: str
) -> None:
    """
    rank 0   [0]   [1]   [2]   [3]          the mean of all ranks is 500 us
    rank 3   [ 0      ][ 1      ][ 2      ][ 3      ]
    """
    ring = Ring(attention_ns=GRADED)
    report = report_of(ring.hosts(), tmp_path, **run)
    row = findings(report)[key]
    assert (row["rank"], row["severity"]) == (3, severity)
    assert lost_time(report) == ({key} if severity == "warning" else set())
    assert row["value"] == pytest.approx(0.6)
    assert step_before(row) == step_ns(ring.hosts())
    assert row["predicted_step_ns"] == step_ns(Ring(attention_ns=(500_000,)).hosts())
    assert "zigzag" in row["advice"]
    assert [entry["rank"] for entry in row["evidence"]] == [3, 3, 3, 0, 0, 0]


def test_balanced_work_in_any_layout(tmp_path: Path) -> None:
    assert not lost_time(report_of(Ring().hosts(), tmp_path, **CAUSAL))


def test_one_rank_that_is_slower_at_everything_is_a_straggler(tmp_path: Path) -> None:
    report = report_of(Ring(attention_ns=(500_000, 500_000, 500_000, 900_000)).hosts(), tmp_path)
    assert lost_time(report) == {("peer-wait", "straggler")}
