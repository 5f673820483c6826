"""What of a communication op is transfer and what is waiting for peers: drawn timelines, generated ones, real ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cptrace
from cptrace.analyses import make_scope
from cptrace.labels import LOCAL_D2D
from cptrace.peers import Arrivals
from cptrace.requests import AnalyzeOptions, ScopeRequest, WindowRequest
from tests.support.diagnosed import findings, not_looked_for
from tests.support.shared_traces import ROOT, require_trace
from tests.support.simulated_run import Host, write
from tests.support.simulated_schemes import COMPUTE, Ring, ulysses
from tests.support.tiny_export import KERNEL, NVTX, RUNTIME, SYNCHRONIZATION, TinyExport, edit, global_pid

SEND = "ncclDevKernel_SendRecv()"
ALL = AnalyzeOptions(scope=ScopeRequest(window=WindowRequest(is_all=True)))


def split(export: TinyExport, path: Path) -> list[tuple[int | None, int | None]]:
    """Return (transfer, waiting) of each rank."""
    report = cptrace.analyze(export.write(path), ALL)
    return [(row["transfer_ns"], row["peer_wait_ns"]) for row in report.rows("ranks")]


def ranks(export: TinyExport, n_ranks: int) -> TinyExport:
    """Say that process 100 + r on device r is rank r, and name the label domain."""
    for rank in range(n_ranks):
        export.domain(1, "cptrace", pid=100 + rank)
    return export.run(ranks=[{"rank": r, "pid": 100 + r, "device": r} for r in range(n_ranks)])


def hop(export: TinyExport, rank: int, peers: str, start: int, end: int, launch: int) -> TinyExport:
    label = f"send_recv pass=forward layer=0 hop=0 bytes=8 peers={peers}"
    export.range(label, launch, launch + 3, pid=100 + rank, domain=1)
    return export.kernel(SEND, start, end, pid=100 + rank, device=rank, launch=launch + 1)


def test_only_named_peers_count(tmp_path: Path) -> None:
    """
    rank 0 (peers 1)   [10 ------ 30)        waits for rank 1 until 20
    rank 1 (peers 0)        [20 - 30)
    rank 2 (peers 1)   [10 ------ 30)        names rank 1, which does not name it
    """
    export = ranks(TinyExport(), 3)
    hop(export, 0, "1", 10, 30, 0)
    hop(export, 1, "0", 20, 30, 0)
    hop(export, 2, "1", 10, 30, 0)
    assert split(export, tmp_path / "t.sqlite") == [(10, 10), (10, 0), (10, 10)]


def pairs_of(export: TinyExport, path: Path) -> set[tuple[int, int]]:
    """Return which rows meet which, as they were found."""
    scope = make_scope(cptrace.open_trace(export.write(path)), ScopeRequest())
    assert isinstance(scope.arrivals, Arrivals)
    return set(zip(scope.arrivals.partner_op.tolist(), scope.arrivals.partner.tolist(), strict=True))


def test_pairs_by_label_are_those_that_the_label_names(tmp_path: Path) -> None:
    """
    rank 0 (peers 1), rank 1 (peers 0), rank 2 (peers 1): rows 0, 2 and 1, for they start at 10, 20 and 10
    """
    export = ranks(TinyExport(), 3)
    hop(export, 0, "1", 10, 30, 0)
    hop(export, 1, "0", 20, 30, 0)
    hop(export, 2, "1", 10, 30, 0)
    assert pairs_of(export, tmp_path / "t.sqlite") == {(0, 2), (2, 0), (1, 2)}


def test_a_transfer_that_lacks_a_peer_has_no_pairs(tmp_path: Path) -> None:
    export = ranks(TinyExport(), 2)
    hop(export, 0, "1,3", 10, 30, 0)
    hop(export, 1, "0", 20, 30, 0)
    assert pairs_of(export, tmp_path / "t.sqlite") == {(1, 0)}


def test_pairs_by_order_are_all_of_one_turn(tmp_path: Path) -> None:
    """
    each of three ranks    [10 + rank ... 30) [40 + rank ... 60)      rows 0, 1, 2 and 3, 4, 5
    """
    export = TinyExport()
    for rank in range(3):
        for start in (10, 40):
            export.kernel(SEND, start + rank, start + 20, pid=100 + rank, device=rank)
    turns = ((0, 1, 2), (3, 4, 5))
    expected = {(one, other) for turn in turns for one in turn for other in turn if one != other}
    assert pairs_of(export, tmp_path / "t.sqlite") == expected


def test_while_one_transfer_waits_another_may_run(tmp_path: Path) -> None:
    """
    rank 0, stream 7    [0 ---- waiting ---- 30 - 40)
    rank 0, stream 8           [10 ---- 20)              a transfer of its own
    rank 1, stream 7                        [30 - 40)
    rank 1, stream 8           [10 ---- 20)
    """
    export = TinyExport()
    for rank, start in ((0, 0), (1, 30)):
        where = {"pid": 100 + rank, "device": rank}
        export.kernel(SEND, start, 40, **where).kernel("ncclDevKernel_AllReduce()", 10, 20, stream=8, **where)
    assert split(export, tmp_path / "t.sqlite") == [(20, 20), (20, 0)]


def test_ranks_with_different_numbers_of_ops_are_not_matched(tmp_path: Path) -> None:
    export = TinyExport().kernel(SEND, 0, 10).kernel(SEND, 10, 20).kernel(SEND, 0, 20, pid=101, device=1)
    report = cptrace.analyze(export.write(tmp_path / "t.sqlite"), ALL)
    assert [row["peer_wait_ns"] for row in report.rows("ranks")] == [None, None]
    assert next(e.reason for e in report.not_applicable if e.analysis == "peer_wait").startswith(
        "ranks do not have"
    )


def test_ops_that_do_not_end_together_are_not_matched(tmp_path: Path) -> None:
    export = TinyExport().kernel(SEND, 0, 10).kernel(SEND, 500_000, 900_000, pid=101, device=1)
    report = cptrace.analyze(export.write(tmp_path / "t.sqlite"), ALL)
    assert any("end 899990 ns apart" in entry.reason for entry in report.not_applicable)


def on_other_clocks(
    hosts: list[Host], shift_ns: dict[int, int], path: Path, *, has_ranges: bool = True
) -> Path:
    """Write a run whose ranks' clocks are some time ahead; host, ranges and device of a rank keep together."""
    write(hosts, path, has_ranges=has_ranges)
    moves = []
    for rank, ns in shift_ns.items():
        first, last = global_pid(100 + rank), global_pid(101 + rank) - 1
        for table, column in (
            (KERNEL, "globalPid"),
            (RUNTIME, "globalTid"),
            (NVTX, "globalTid"),
            (SYNCHRONIZATION, "globalPid"),
        ):
            where = f'WHERE "{column}" BETWEEN {first} AND {last}'
            moves.append(f'UPDATE {table} SET start = start + {ns}, "end" = "end" + {ns} {where}')
    return edit(path, *moves)


RUNS = {
    "ring": Ring().hosts,
    "ring of two": Ring(n_ranks=2).hosts,
    "straggler": Ring(attention_ns=(500_000, 500_000, 1_000_000, 500_000)).hosts,
    "exchanges": lambda: ulysses(COMPUTE, n_ranks=4),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("late", [(1,), (0,), (0, 1)], ids=["one rank", "another rank", "a node"])
@pytest.mark.parametrize("has_ranges", [True, False], ids=["by label", "by order"])
def test_ranks_on_clocks_that_differ_are_not_matched(
    tmp_path: Path, run: str, late: tuple[int, ...], has_ranges: bool
) -> None:
    """
    rank 0   [kv 0]                  nothing that meets ends before the other has started,
    rank 1             [kv 0]        so this is no waiting
    """
    hosts = RUNS[run]()
    shift = dict.fromkeys(late if len(late) < len(hosts) else late[:1], 300_000_000)
    report = cptrace.analyze(on_other_clocks(hosts, shift, tmp_path / "t.sqlite", has_ranges=has_ranges))
    reason = not_looked_for(report)["peer_wait"]
    assert "the clocks of the ranks differ" in reason
    assert not any(code == "peer-wait" for code, _ in findings(report))
    assert all(row["peer_wait_ns"] is None for row in report.rows("ranks"))


def test_how_far_clocks_differ_is_said(tmp_path: Path) -> None:
    path = on_other_clocks(Ring(n_ranks=2).hosts(), {1: 300_000_000}, tmp_path / "t.sqlite")
    reason = not_looked_for(cptrace.analyze(path))["peer_wait"]
    assert reason.startswith("4 of 8 communication ops end before")
    assert "300 ms before it (median)" in reason


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("error_ns", [-10_000, 0, 10_000])
def test_clocks_that_are_as_good_as_a_report_has_them_are_believed(
    tmp_path: Path, run: str, error_ns: int
) -> None:
    path = on_other_clocks(RUNS[run](), {1: 20_000 + error_ns, 0: 20_000}, tmp_path / "t.sqlite")
    assert "peer_wait" not in not_looked_for(cptrace.analyze(path))


@pytest.mark.parametrize(("error_ns", "is_believed"), [(10_000, True), (10_001, False)])
@pytest.mark.parametrize("is_labelled", [True, False])
def test_how_much_earlier_than_possible_is_too_much(
    tmp_path: Path, error_ns: int, is_believed: bool, is_labelled: bool
) -> None:
    """
    rank 0    [1000 - 2000)
    rank 1                  [2000 + error - 3000 + error)     one exchange
    """
    export = ranks(TinyExport(), 2)
    for rank, start in ((0, 1_000), (1, 2_000 + error_ns)):
        if is_labelled:
            hop(export, rank, str(1 - rank), start, start + 1_000, 0)
        else:
            export.kernel(SEND, start, start + 1_000, pid=100 + rank, device=rank)
    report = cptrace.analyze(export.write(tmp_path / "t.sqlite"), ALL)
    assert (report.rows("ranks")[0]["peer_wait_ns"] is not None) == is_believed


@pytest.mark.parametrize(("one_way", "is_believed"), [(True, True), (False, False)])
def test_a_sender_may_be_done_before_its_receiver_comes(
    tmp_path: Path, one_way: bool, is_believed: bool
) -> None:
    """
    rank 0 (to 1)    [0 ----- 50 us)             received from rank 2, and what it sent lies in a buffer
    rank 1 (to 2)                     [90 - 140)
    rank 2 (to 0)    [0 -- 20 us)  or   [0 ----------- 140)   the former cannot be: it receives from rank 1
    """
    export = ranks(TinyExport(), 3)
    hop(export, 0, "1,2", 0, 50_000, 0)
    hop(export, 1, "0,2", 90_000, 140_000, 0)
    hop(export, 2, "0,1", 0, 140_000 if one_way else 20_000, 0)
    report = cptrace.analyze(export.write(tmp_path / "t.sqlite"), ALL)
    assert ("peer_wait" not in not_looked_for(report)) == is_believed


def test_copies_within_one_gpu_need_no_peer_that_copies_too(tmp_path: Path) -> None:
    """
    rank 0   [copy from 1)                        rank 1's data are ready, and its clock is the same
    rank 1                  [copy from 0)
    """
    export = TinyExport()
    for rank, start in ((0, 1_000), (1, 900_000)):
        export.domain(1, "cptrace", pid=100 + rank)
        hop(export, rank, str(1 - rank), start, start + 1_000, 0)
    pids = [{"rank": rank, "pid": 100 + rank, "device": rank} for rank in (0, 1)]
    export.run(ranks=pids, transport=LOCAL_D2D)
    assert "peer_wait" not in not_looked_for(cptrace.analyze(export.write(tmp_path / "t.sqlite"), ALL))


def test_a_trace_of_the_pytorch_profiler_is_told_what_records_all_ranks() -> None:
    (entry,) = [
        entry
        for entry in cptrace.analyze(require_trace("kineto/nccl-4-streams.json.gz"), ALL).not_applicable
        if entry.analysis == "peer_wait"
    ]
    assert "one file per rank; analyze those of all ranks together" in entry.reason


def test_a_trace_without_communication_waits_for_nobody(tmp_path: Path) -> None:
    report = cptrace.analyze(TinyExport().kernel("k", 0, 10).write(tmp_path / "t.sqlite"), ALL)
    assert (report.rows("ranks")[0]["transfer_ns"], report.rows("ranks")[0]["peer_wait_ns"]) == (0, 0)
    assert not any(entry.analysis == "peer_wait" for entry in report.not_applicable)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 90), min_size=3, max_size=3), min_size=1, max_size=6))
def test_parts_sum_and_the_last_to_arrive_never_waits(
    tmp_path_factory: pytest.TempPathFactory, arrivals: list[list[int]]
) -> None:
    """Each round of three ranks ends at 100 for all; transfer is what is left behind the last arrival."""
    export = TinyExport()
    for number, starts in enumerate(arrivals):
        for rank, start in enumerate(starts):
            base = 100 * number
            export.kernel(SEND, base + start, base + 100, pid=100 + rank, device=rank)
    transfer = sum(100 - max(starts) for starts in arrivals)
    found = split(export, tmp_path_factory.mktemp("peers") / "t.sqlite")
    waits = np.array(arrivals).max(axis=1)[:, None] - np.array(arrivals)
    assert found == [(transfer, wait) for wait in waits.sum(axis=0).tolist()]


def test_two_gpus_wait_for_each_other() -> None:
    report = cptrace.analyze(require_trace("nsys/nsys-2026.2-ulysses-2gpu.sqlite"), ALL)
    found = [(row["transfer_ns"], row["peer_wait_ns"]) for row in report.rows("ranks")]
    assert found == [(6_274_316, 10_898_336), (5_751_620, 2_477_480)]
    assert report.coverage["peers"] == [
        {"basis": "order", "n_ops": 66, "n_matched": 66, "end_spread_ns": 22_214}
    ]


@pytest.mark.parametrize("path", sorted((ROOT / "samples").glob("ring*.sqlite")), ids=lambda path: path.stem)
def test_samples_are_matched_by_label_and_balance(path: Path) -> None:
    report = cptrace.analyze(path)
    (peers,) = report.coverage["peers"]
    assert peers["basis"] == "label"
    assert peers["n_matched"] == peers["n_ops"] > 0
    for row in (*report.rows("ranks"), *report.rows("steps")):
        assert row["transfer_ns"] + row["peer_wait_ns"] == row["comm_ns"]
        assert row["transfer_ns"] >= 0 <= row["peer_wait_ns"]


def test_the_rank_with_most_work_of_a_causal_ring_waits_for_nobody() -> None:
    report = cptrace.analyze(ROOT / "samples" / "ring-causal-virtual.sqlite")
    waits = [row["peer_wait_ns"] for row in report.rows("ranks")]
    assert waits == sorted(waits, reverse=True)
    assert waits[-1] == 0 < waits[-2]
