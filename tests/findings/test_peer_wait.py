"""Finding `peer-wait`: who is waited for, and why that rank is late."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.diagnosed import findings, lost_time, not_looked_for, report_of, step_before
from tests.support.simulated_run import step_ns
from tests.support.simulated_schemes import Ring

STRAGGLER = ("peer-wait", "straggler")
SLOW_LINK = ("peer-wait", "slow-link")
SKEW = ("peer-wait", "skew")
NORMAL, SLOW = 500_000, 1_000_000


@pytest.mark.parametrize("rank", [0, 2])
def test_a_straggler(tmp_path: Path, rank: int) -> None:
    """
    rank 0      [attention 0][attention 1]      [attention 2]
                [kv 0    ][kv 1 waits for rank 2   ]
    rank 2      [attention 0            ][attention 1            ]
    """
    times = tuple(SLOW if number == rank else NORMAL for number in range(4))
    ring = Ring(attention_ns=times)
    report = report_of(ring.hosts(), tmp_path)
    assert lost_time(report) == {STRAGGLER}
    row = findings(report)[STRAGGLER]
    assert (row["rank"], step_before(row)) == (rank, step_ns(ring.hosts()))
    assert row["predicted_step_ns"] == pytest.approx(step_ns(Ring().hosts()), rel=0.001)
    assert f"for rank {rank}" in row["summary"]
    waiting, late = row["evidence"][:2]
    assert late["rank"] == rank != waiting["rank"]
    assert waiting["start_ns"] < late["start_ns"]


def test_two_slow_ranks_of_four_are_no_straggler(tmp_path: Path) -> None:
    report = report_of(Ring(attention_ns=(NORMAL, SLOW, SLOW, NORMAL)).hosts(), tmp_path)
    assert STRAGGLER not in findings(report)


def test_work_that_is_graded_over_the_ranks_is_no_straggler(tmp_path: Path) -> None:
    report = report_of(Ring(attention_ns=(200_000, 400_000, 600_000, 800_000)).hosts(), tmp_path)
    assert not findings(report).keys() & {STRAGGLER, SKEW}


def test_a_slow_link(tmp_path: Path) -> None:
    """One rank's transfers take four times as long, from when all that take part are there."""
    ring = Ring(transfer_ns=(400_000, 1_600_000, 400_000, 400_000))
    report = report_of(ring.hosts(), tmp_path)
    assert lost_time(report) == {SLOW_LINK}
    row = findings(report)[SLOW_LINK]
    assert (row["rank"], step_before(row)) == (1, step_ns(ring.hosts()))
    assert row["predicted_step_ns"] == pytest.approx(step_ns(Ring().hosts()), rel=0.001)


def test_slow_transfers_of_all_are_no_slow_link(tmp_path: Path) -> None:
    assert not lost_time(report_of(Ring(transfer_ns=(1_600_000,)).hosts(), tmp_path))


def test_a_rank_that_starts_late(tmp_path: Path) -> None:
    """
    rank 0    [kv 0 waits      ] ...
    rank 1    its host does something else before the step; its kernels are as fast as any
    """
    hosts = Ring(n_ranks=2).hosts()
    late = hosts[1].program
    hosts[1].program = []
    hosts[1].pause(2_000_000)
    hosts[1].program += late
    report = report_of(hosts, tmp_path)
    assert not lost_time(report)
    row = findings(report)[SKEW]
    assert (row["rank"], row["severity"], row["predicted_step_ns"]) == (1, "info", None)
    assert row["summary"].startswith("rank 0 waits ")


def test_ranks_that_are_alike(tmp_path: Path) -> None:
    assert not {code for code, _ in findings(report_of(Ring().hosts(), tmp_path))} & {"peer-wait"}


def test_one_rank_alone_has_nobody_to_wait_for(tmp_path: Path) -> None:
    report = report_of(Ring(n_ranks=2).hosts()[:1], tmp_path)
    assert "at least two ranks" in not_looked_for(report)["peer_wait"]
