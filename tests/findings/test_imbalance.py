"""Finding `imbalance`: ranks that have more attention to compute, by the schedule or by the work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import cptrace
from cptrace.requests import AnalyzeOptions, ScopeRequest
from tests.support.diagnosed import findings, lost_time, not_looked_for, report_of, step_before
from tests.support.simulated_run import Host, step_ns, write
from tests.support.simulated_schemes import BACKWARD_KERNEL, FORWARD_KERNEL, GEMM_KERNEL, Ring

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


def without_attention(hosts: list[Host], rank: int, n_kept: int = 0) -> list[Host]:
    """Take the attention of a rank out of a run, but for its first ops, as where its rows are lost."""
    is_attention = [call.name in (FORWARD_KERNEL, BACKWARD_KERNEL) for call in hosts[rank].program]
    places = [place for place, is_one in enumerate(is_attention) if is_one][n_kept:]
    program = hosts[rank].program
    hosts[rank].program = [call for place, call in enumerate(program) if place not in places]
    return hosts


UNMATCHED = {
    "no labels": lambda hosts, folder, **run: report_of(hosts, folder, has_ranges=False, **run),
    "a rank is absent": lambda hosts, folder, **run: report_of(hosts[:3], folder, **run),
}


@pytest.mark.parametrize(
    ("run", "key", "confidence"),
    # Times of 2 to 8 are no shares of 1 to 7: the schedule alone does not explain them.
    [({}, WORK, "low"), (CAUSAL, SCHEDULE, "low")],
    ids=["work", "schedule"],
)
@pytest.mark.parametrize("lack", UNMATCHED)
def test_what_balance_gives_is_not_told_of_ranks_that_are_not_matched(
    tmp_path: Path, lack: str, run: dict[str, object], key: tuple[str, str], confidence: str
) -> None:
    """
    rank 0   [0] ? [1] ? [2] ? [3]          who waits for rank 3 is not known: alone, each rank is as fast as it is
    """
    report = UNMATCHED[lack](Ring(attention_ns=GRADED).hosts(), tmp_path, **run)
    assert "peer_wait" in not_looked_for(report)
    row = findings(report)[key]
    assert row["rank"] == max(entry["rank"] for entry in report.rows("ranks"))
    assert (row["predicted_step_ns"], row["recoverable_ns"]) == (None, None)
    assert row["confidence"] == confidence
    assert not row["after"]


def test_little_that_cannot_be_predicted_is_not_said(tmp_path: Path) -> None:
    """The rank with most attention has 6 us more than the mean, in a step of more than 1 ms."""
    ring = Ring(attention_ns=(2_000, 2_500, 3_000, 3_500), transfer_ns=(800_000,))
    report = report_of(ring.hosts(), tmp_path, has_ranges=False)
    assert not {code for code, _ in findings(report)} & {"imbalance"}


@pytest.mark.parametrize("run", [{}, CAUSAL], ids=["work", "schedule"])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_without_any_attention_has_nothing_to_compare(
    tmp_path: Path, rank: int, run: dict[str, object]
) -> None:
    """
    rank 3      [kv 0]  [kv 1]        its attention is not in the trace: it is not 0.00 times the mean
    """
    report = report_of(without_attention(Ring(attention_ns=GRADED).hosts(), rank), tmp_path, **run)
    assert not {code for code, _ in findings(report)} & {"imbalance"}


@pytest.mark.parametrize(
    ("rank", "n_kept", "run", "key"),
    [
        (3, 4, {}, WORK),
        (0, 4, {}, WORK),
        (3, 4, CAUSAL, SCHEDULE),
        (0, 4, {**CAUSAL, "layout": "zigzag"}, WORK),
    ],
)
def test_a_rank_with_fewer_ops_than_its_schedule_has_may_lack_some(
    tmp_path: Path, rank: int, n_kept: int, run: dict[str, object], key: tuple[str, str]
) -> None:
    """
    others   [0][1][2][3] [0][1][2][3]
    rank 3   [0][1][2][3]                  where did the rest go? Of contiguous chunks the last has most
    """
    row = findings(report_of(without_attention(Ring().hosts(), rank, n_kept), tmp_path, **run))[key]
    assert row["confidence"] == "medium"
    assert (
        f"8 attention ops and rank {rank} 4, which no schedule that is known here explains" in row["summary"]
    )
    assert "some may be missing in the trace" in row["summary"]


def test_a_schedule_that_skips_what_is_masked_explains_its_counts(tmp_path: Path) -> None:
    """
    rank 0   [0]
    rank 3   [0][1][2][3]       contiguous chunks under a causal mask
    """
    row = findings(report_of(Ring(skips_masked=True).hosts(), tmp_path, **{**CAUSAL, "scheme": "ring"}))[
        SCHEDULE
    ]
    assert row["confidence"] == "high"
    assert "missing" not in row["summary"]


def test_the_mean_is_of_the_ranks_that_are_looked_at(tmp_path: Path) -> None:
    path = write(Ring(attention_ns=GRADED).hosts(), tmp_path / "t.sqlite")
    row = findings(cptrace.analyze(path, AnalyzeOptions(ScopeRequest(ranks=(1, 2, 3)))))[WORK]
    assert row["summary"].startswith(
        "rank 3 computes 1.33 times the mean attention time of the ranks looked at,"
    )


SHARES = tuple(100_000 * share for share in (1, 3, 5, 7))
GEMM_NS = 1_000_000


def scaled(hosts: list[Host], attention: Sequence[float], gemm: Sequence[float]) -> list[Host]:
    """Return programs of models whose kernels take longer on some ranks; gemms are a third of their compute."""
    for host in hosts:
        for call in host.program:
            if call.name in (FORWARD_KERNEL, BACKWARD_KERNEL):
                call.ns = round(call.ns * attention[host.rank])
            if call.name == GEMM_KERNEL:
                call.ns = round(GEMM_NS * gemm[host.rank])
    return hosts


ONE, TWO = (1, 1, 2, 1), (1, 2, 2, 1)


@pytest.mark.parametrize(
    ("attention", "gemm", "told"),
    [
        (ONE, ONE, {("peer-wait", "straggler")}),
        (ONE, (1, 1, 1, 1), {WORK}),  # a device that is slow spares no kernel
        (TWO, TWO, set()),
        (TWO, (1, 1, 1, 1), {WORK}),
    ],
    ids=["slow device", "more attention", "two slow devices", "two with more attention"],
)
def test_more_attention_is_told_from_a_slow_device_by_other_kernels(
    tmp_path: Path, attention: Sequence[float], gemm: Sequence[float], told: set[tuple[str, str]]
) -> None:
    """
    rank 0   [gemm][attention]
    rank 2   [gemm][attention         ]    more of it; or slow:    [gemm    ][attention         ]
    """
    hosts = scaled(Ring(has_gemms=True).hosts(), attention, gemm)
    found = findings(report_of(hosts, tmp_path))
    assert found.keys() & {WORK, SCHEDULE, ("peer-wait", "straggler")} == told
    for key in told:
        assert found[key]["confidence"] == ("medium" if key == WORK else "high")
        assert found[key]["rank"] in (1, 2)
    if not told:
        assert "kernels (2.00 x the median)" in found["peer-wait", "skew"]["summary"]
        assert "throttling" in found["peer-wait", "skew"]["advice"]


@pytest.mark.parametrize("slow", [1, 2, 3])
def test_balance_gives_a_slow_device_as_much_work_as_others(tmp_path: Path, slow: int) -> None:
    """
    rank 1 is slow    [0 0  ]              [mean mean mean      ]     with as much work as others it sets the pace
    rank 3            [0][1][2][3]         [mean     ]
    """
    times = tuple(2 * time if rank == slow else time for rank, time in enumerate(SHARES))
    balanced = tuple(800_000 if rank == slow else 400_000 for rank in range(4))
    rows = findings(report_of(Ring(attention_ns=times).hosts(), tmp_path, **CAUSAL))
    straggler = rows["peer-wait", "straggler"]
    assert straggler["rank"] == slow
    both, alone = step_ns(Ring(attention_ns=(400_000,)).hosts()), step_ns(Ring(attention_ns=balanced).hosts())
    assert rows[SCHEDULE]["rank"] == 3
    assert rows[SCHEDULE]["value"] == pytest.approx(0.75, rel=0.01)
    if rows[SCHEDULE]["after"]:
        assert rows[SCHEDULE]["predicted_step_ns"] == pytest.approx(both, rel=0.01)
        assert straggler["after"] == ["imbalance"]
        assert step_ns(Ring(attention_ns=times).hosts()) < 1.01 * alone  # by itself it gives nothing
    else:
        assert rows[SCHEDULE]["predicted_step_ns"] == pytest.approx(alone, rel=0.01)


def test_times_that_are_not_the_schedules_work_are_said(tmp_path: Path) -> None:
    """Each rank computes as much but the last: kernels that compute what the mask hides, or slow devices."""
    row = findings(
        report_of(Ring(attention_ns=(500_000, 500_000, 500_000, 800_000)).hosts(), tmp_path, **CAUSAL)
    )
    assert row[SCHEDULE]["confidence"] == "low"
    assert "their times are not in proportion to that" in row[SCHEDULE]["summary"]


@pytest.mark.parametrize("with_steps", [(0,), (0, 1, 2)])
def test_ranks_without_steps_are_not_compared(tmp_path: Path, with_steps: Sequence[int]) -> None:
    """
    rank 0   [warm-up] [step][step]
    rank 1   [warm-up   ..   step ]      it has no step ranges: all of it counts
    """
    hosts = Ring(n_steps=3).hosts()
    for host in hosts:
        if host.rank not in with_steps:
            for call in host.program:
                call.name = call.name if call.name != "step" else ""
    report = report_of(hosts, tmp_path)
    assert "imbalance" not in {code for code, _ in findings(report)}
    assert "ranks are compared by the same steps" in not_looked_for(report)["imbalance"]
    (note,) = [note for note in report.coverage["notes"] if note["code"] == "unequal-windows"]
    assert note["count"] == 4 - len(with_steps)


def test_a_step_that_one_rank_lacks_is_not_compared(tmp_path: Path) -> None:
    hosts = Ring(n_steps=3).hosts()
    first = next(call for call in hosts[1].program if call.name == "step")
    first.name = "other"
    assert "imbalance" not in {code for code, _ in findings(report_of(hosts, tmp_path))}
