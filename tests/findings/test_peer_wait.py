"""Finding `peer-wait`: who is waited for, and why that rank is late."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

import cptrace
from cptrace.report import Report
from cptrace.requests import AnalyzeOptions, ScopeRequest
from tests.support.diagnosed import Row, findings, lost_time, not_looked_for, report_of, step_before
from tests.support.simulated_run import Host, step_ns, write
from tests.support.simulated_schemes import SEND_RECV_KERNEL, Ring
from tests.support.tiny_export import TinyExport

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


CONTIGUOUS = {"device_kind": "cuda", "causal": True, "layout": "contiguous"}


@pytest.mark.parametrize("n_ranks", [2, 3, 4])
def test_a_straggler_among_ranks_of_unequal_work(tmp_path: Path, n_ranks: int) -> None:
    """
    rank 0   [0]                   a causal mask over contiguous chunks: rank r has (2r + 1) units of work in each op,
    rank 1   [ 0      ]            and the last rank takes twice as long as that
    """
    units = [2 * rank + 1 for rank in range(n_ranks)]
    sound = Ring(n_ranks=n_ranks, attention_ns=tuple(unit * 200_000 for unit in units))
    slow = sound.but(attention_ns=(*sound.attention_ns[:-1], 2 * sound.attention_ns[-1]))
    how = {**CONTIGUOUS, "cp_size": n_ranks, "scheme": "all_gather"}
    row = findings(report_of(slow.hosts(), tmp_path, **how))[STRAGGLER]
    assert (row["rank"], row["confidence"]) == (n_ranks - 1, "medium")
    assert row["predicted_step_ns"] == pytest.approx(step_ns(sound.hosts()), rel=0.02)
    assert "2.00 times as long as those elsewhere, each for its share of the causal mask" in row["summary"]
    assert STRAGGLER not in findings(report_of(sound.hosts(), tmp_path, **how))


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_kernels_that_compute_what_the_mask_hides_make_no_straggler(tmp_path: Path, n_ranks: int) -> None:
    """Each rank computes as much, whatever share of it the mask leaves."""
    how = {**CONTIGUOUS, "cp_size": n_ranks, "scheme": "all_gather"}
    assert STRAGGLER not in findings(report_of(Ring(n_ranks=n_ranks).hosts(), tmp_path, **how))


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
    report = report_of(late_start(2, 1), tmp_path)
    assert not lost_time(report)
    row = findings(report)[SKEW]
    assert (row["rank"], row["severity"], row["predicted_step_ns"]) == (1, "info", None)
    assert row["summary"].startswith("rank 0 waits ")


def skew_of(report: Report) -> Row | None:
    return next((row for row in report.rows("findings") if (row["code"], row["form"]) == SKEW), None)


def late_start(n_ranks: int, *late: int, ring: Ring | None = None) -> list[Host]:
    """Return a ring in which the hosts of some ranks do something else before the step."""
    hosts = (ring or Ring()).but(n_ranks=n_ranks).hosts()
    for rank in late:
        program, hosts[rank].program = hosts[rank].program, []
        hosts[rank].pause(2_000_000)
        hosts[rank].program += program
    return hosts


def of_ranks(hosts: Sequence[Host], folder: Path, *ranks: int) -> Report:
    path = write(hosts, folder / f"{len(list(folder.iterdir()))}.sqlite")
    return cptrace.analyze(path, AnalyzeOptions(ScopeRequest(ranks=ranks)))


def two_at_once() -> TinyExport:
    """Two transfers of two ranks, and nothing else: rank 1 comes to both 400 us late."""
    export = TinyExport()
    for rank in (0, 1):
        where = {"pid": 100 + rank, "device": rank}
        export.domain(1, "cptrace", pid=100 + rank)
        for number in range(2):
            text = f"send_recv pass=forward layer=0 hop={number} tensor=kv bytes=64 peers={1 - rank}"
            export.range(text, 10 * number, 10 * number + 5, pid=100 + rank, domain=1)
            place = {"stream": 13 + number, "launch": 10 * number + 1, **where}
            export.kernel(SEND_RECV_KERNEL, 1_000 + 400_000 * rank, 411_000, **place)
    return export.run(ranks=[{"rank": rank, "pid": 100 + rank, "device": rank} for rank in (0, 1)])


def test_what_a_rank_waits_for_at_once_counts_once(tmp_path: Path) -> None:
    """
    rank 0   [ 13: waits 400 us for rank 1 | transfer ]
             [ 14: waits 400 us for rank 1 | transfer ]        400 us of 400 us, not 800 us of 400 us
    """
    row = findings(report_of(two_at_once(), tmp_path))[SKEW]
    assert row["summary"].startswith(
        "rank 0 waits 400 us for rank 1 in communication, 100.0 % of all such waiting;"
    )


@pytest.mark.parametrize("n_ranks", [2, 3, 4, 6])
@pytest.mark.parametrize("late", [(0,), (1,), (0, 1)])
def test_the_share_of_one_rank_is_at_most_all(tmp_path: Path, n_ranks: int, late: tuple[int, ...]) -> None:
    hosts = late_start(n_ranks, *late, ring=Ring(transfer_ns=(800_000,)))
    for ranks in ((), (0,), (n_ranks - 1,)):
        row = skew_of(of_ranks(hosts, tmp_path, *ranks))
        if row is not None:
            share = re.search(r"([0-9.]+) % of all such waiting", row["summary"])
            assert share is not None
            assert 0 < float(share[1]) <= 100


def test_a_rank_is_called_no_slower_where_that_is_measured(tmp_path: Path) -> None:
    row = findings(report_of(late_start(2, 1), tmp_path))[SKEW]
    assert "its kernels (1.00 x the median) and transfers (1.00 x the median) are no slower" in row["summary"]


def test_a_rank_that_is_slower_but_not_the_only_one_is_not_called_as_fast(tmp_path: Path) -> None:
    """The links of ranks 1 and 2 of four take four times as long: neither is the slow link, and neither is as fast."""
    two_slow = Ring(transfer_ns=(400_000, 1_600_000, 1_600_000, 400_000))
    row = skew_of(report_of(late_start(4, 1, ring=two_slow), tmp_path)) or {}
    assert row["rank"] in (1, 2)
    assert "its transfers (4.00 x the median) are slower than others'" in row["summary"]
    assert "its kernels (1.00 x the median) are no slower" in row["summary"]


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    """Two ranks without any compute, and with one kind of transfer on each."""
    row = findings(report_of(two_at_once(), tmp_path))[SKEW]
    assert "its kernels cannot be compared with others'" in row["summary"]
    assert "its transfers (1.00 x the median) are no slower" in row["summary"]


@pytest.mark.parametrize("straggler", range(4))
@pytest.mark.parametrize("looked_at", range(4))
def test_who_is_blamed_is_whom_the_same_report_says_was_waited_for(
    tmp_path: Path, straggler: int, looked_at: int
) -> None:
    """
    rank 0   [ waits for rank 1, which waits for rank 2 ]      with --rank 0 the rest is not looked at
    """
    times = tuple(SLOW if number == straggler else NORMAL for number in range(4))
    report = of_ranks(Ring(attention_ns=times).hosts(), tmp_path, looked_at)
    row = skew_of(report)
    assert (row is None) == (straggler == looked_at)
    if row is None:
        return
    waited = {entry["peer"]: entry["wait_ns"] for entry in report.rows("peer_waits")}
    assert waited[row["rank"]] == max(waited.values())
    assert f"what rank {row['rank']} itself does is not looked at here" in row["summary"]
    assert "no slower" not in row["summary"]
    assert row["advice"].startswith("Analyse all ranks together")
    assert row["confidence"] == "low"
    is_neighbour = (straggler - looked_at) % 2 == 1
    itself = f"rank {row['rank']} itself waits "
    assert (row["rank"] == straggler) == is_neighbour == (itself not in row["summary"])
    if not is_neighbour:
        assert re.search(rf"{itself}[0-9.]+ (us|ms) for rank {straggler}$", row["summary"])


SLOWER = {
    STRAGGLER: Ring(attention_ns=(NORMAL, SLOW, NORMAL, NORMAL)),
    SLOW_LINK: Ring(transfer_ns=(400_000, 1_600_000, 400_000, 400_000)),
}


@pytest.mark.parametrize(("key", "is_predicted"), [(STRAGGLER, False), (SLOW_LINK, True)])
def test_a_slow_rank_is_told_where_no_waits_for_events_are_known(
    tmp_path: Path, key: tuple[str, str], is_predicted: bool
) -> None:
    """
    rank 1   [attention 0            ]  ?  [kv 1]       what transfers and attention wait for is not in the trace
    """
    report = report_of(SLOWER[key].hosts(), tmp_path, has_records=False)
    assert skew_of(report) is None
    row = findings(report)[key]
    assert (row["rank"], row["confidence"]) == (1, "medium")
    assert all((row[name] is not None) == is_predicted for name in ("predicted_step_ns", "recoverable_ns"))
    assert row["summary"].endswith("does not tell what mending that gives") == (not is_predicted)


def test_a_slow_rank_is_told_where_a_rank_is_absent(tmp_path: Path) -> None:
    """
    rank 1   [ waits for rank 2 ]      with rank 0, which is there
    rank 2                             with rank 3, which is not
    """
    report = report_of(Ring(attention_ns=(NORMAL, NORMAL, SLOW, NORMAL)).hosts()[:3], tmp_path)
    assert skew_of(report) is None
    (row,) = [row for row in report.rows("findings") if row["code"] == "peer-wait"]
    assert (row["form"], row["rank"], row["confidence"]) == (
        "straggler",
        2,
        "low",
    )  # perhaps it has more attention


def test_transfers_that_may_be_all_waiting_are_not_compared(tmp_path: Path) -> None:
    """Rank 3 is absent: only rank 1 has all its peers, so no transfer is known on all ranks."""
    hosts = late_start(4, 2)
    summary = (skew_of(report_of(hosts[:3], tmp_path)) or {})["summary"]
    assert "its kernels (1.00 x the median) are no slower" in summary
    assert "its transfers cannot be compared with others'" in summary


@pytest.mark.parametrize("n_ranks", [2, 3, 4, 6])
@pytest.mark.parametrize(
    ("key", "what", "usual_ns"), [(STRAGGLER, "attention_ns", NORMAL), (SLOW_LINK, "transfer_ns", 400_000)]
)
def test_evidence_shows_waits_for_the_rank_that_is_blamed(
    tmp_path: Path, key: tuple[str, str], what: str, usual_ns: int, n_ranks: int
) -> None:
    """
    rank 0   [ waits for rank 1 ]     and not: rank 3 waits for rank 0, which waits for rank 1
    """
    times = tuple(usual_ns * (4 if rank == 1 else 1) for rank in range(n_ranks))
    row = findings(report_of(Ring(n_ranks=n_ranks).but(**{what: times}).hosts(), tmp_path))[key]
    assert {entry["rank"] for entry in row["evidence"] if entry["what"] == "arrives last"} == {1}


def test_ranks_that_are_alike(tmp_path: Path) -> None:
    assert not {code for code, _ in findings(report_of(Ring().hosts(), tmp_path))} & {"peer-wait"}


def test_one_rank_alone_has_nobody_to_wait_for(tmp_path: Path) -> None:
    report = report_of(Ring(n_ranks=2).hosts()[:1], tmp_path)
    assert "at least two ranks" in not_looked_for(report)["peer_wait"]
