"""Which communication ops meet: by process groups, and without them by all ranks of the job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import cptrace
from cptrace.exports import find_export
from cptrace.exports.parts import of_rank
from cptrace.process_groups import group_text, parse_group
from tests.support.diagnosed import not_looked_for
from tests.support.shared_traces import require_trace
from tests.support.simulated_run import write
from tests.support.simulated_schemes import ulysses
from tests.support.synthetic_kineto import TinyTrace

GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
MESH = {"tp": ([0, 1], [2, 3]), "cp": ([0, 2], [1, 3])}
AHEAD_NS = (0, 3_000_000, -2_000_000, 700_000)
"""By how much the clock of each rank's file is ahead, though all say that they began at the same instant."""
LATE = 3


def mesh(folder: Path, *, has_groups: bool = True, ranks: Sequence[int] = range(4)) -> list[Path]:
    """Write the files of four ranks, each in two groups, of which the last is late for every gather.

    tp    {0, 1} {2, 3}    rank 0  [gather tp]        [gather cp, with 2]
    cp    {0, 2} {1, 3}    rank 3      [gather tp]        [gather cp, with 1]  [gather cp, with 1]
    """
    paths = []
    for rank in ranks:
        trace = TinyTrace()
        for number, axis in enumerate(("tp", "cp", "cp")):
            (members,) = [group for group in MESH[axis] if rank in group]
            starts = [10_000 * number + 1000 * (member == LATE) + 100 * member for member in members]
            ours = starts[members.index(rank)]
            args = {
                "Process Group Name": f"{axis}{MESH[axis].index(members)}",
                "Process Group Ranks": str(members),
                "Group size": len(members),
            }
            start, end = ((1_000_000 + time) * 1000 + AHEAD_NS[rank] for time in (ours, max(starts) + 500))
            trace.kernel(GATHER, start, end, stream=20, **(args if has_groups else {}))
        trace.top |= {"distributedInfo": {"rank": rank, "world_size": 4}, "baseTimeNanoseconds": 10**18}
        paths.append(trace.write(folder / f"rank{rank}.json"))
    return paths


def test_groups_tell_who_meets_whom(tmp_path: Path) -> None:
    report = cptrace.analyze(mesh(tmp_path))
    assert "peer_wait" not in not_looked_for(report)
    shift = [row["shift_ns"] + ahead for row, ahead in zip(report.coverage["clocks"], AHEAD_NS, strict=True)]
    assert len(set(shift)) == 1
    (peers,) = report.coverage["peers"]
    assert (peers["basis"], peers["n_matched"], peers["end_spread_ns"]) == ("order", 12, 0)
    waits_us = {row["rank"]: row["peer_wait_ns"] / 1000 for row in report.rows("ranks")}
    assert waits_us == {0: 100 + 2 * 200, 1: 2 * 1200, 2: 1100, 3: 0}
    pairs = {(row["rank"], row["peer"]) for row in report.rows("peer_waits") if row["wait_ns"]}
    assert pairs == {(0, 1), (0, 2), (1, 3), (2, 3)}


def test_without_groups_ranks_of_several_are_not_taken_for_one(tmp_path: Path) -> None:
    """The k-th gather of each rank ends at other times: what belongs together is not known."""
    report = cptrace.analyze(mesh(tmp_path, has_groups=False))
    assert "peer_wait" in not_looked_for(report)
    assert {row["peer_wait_ns"] for row in report.rows("ranks")} == {None}


def test_a_group_that_is_here_is_matched_though_the_job_is_larger(tmp_path: Path) -> None:
    """Of ranks 1 and 3 all is here that they share; each has a gather with a rank that is not."""
    report = cptrace.analyze(mesh(tmp_path, ranks=(1, 3)))
    assert (
        "2 of 6 communication ops have peers that were not found on ranks 0, 2"
        in not_looked_for(report)["peer_wait"]
    )
    (peers,) = report.coverage["peers"]
    assert (peers["n_ops"], peers["n_matched"]) == (6, 4)
    assert {(row["rank"], row["peer"]) for row in report.rows("peer_waits") if row["wait_ns"]} == {(1, 3)}


def test_ranks_that_share_no_group_have_no_common_clock(tmp_path: Path) -> None:
    report = cptrace.analyze(mesh(tmp_path, ranks=(0, 3)))
    assert "do not have the same number" in not_looked_for(report)["peer_wait"]


def test_a_group_is_told_as_far_as_the_trace_tells_it() -> None:
    assert group_text("3", 2, "[0, 2]") == "3 of 2 ranks [0, 2]"
    assert group_text("3", 0, "[0, 2]") == "3 of 2 ranks [0, 2]"
    assert group_text("0", 64, "[0, 1, 2, ...]") == "0 of 64 ranks"
    assert group_text("0", 3, "[0, 1]") == "0 of 3 ranks"
    assert group_text("odd of 2 ranks", 0, "") == "odd of 2 ranks"


@pytest.mark.parametrize("name", ["3", "", "a of 5 ranks [1, 2]", "x\ny"])
@pytest.mark.parametrize(("n_ranks", "ranks"), [(2, "[4, 7]"), (2, ""), (64, "[0, ...]")])
def test_the_text_of_a_group_is_read_again(name: str, n_ranks: int, ranks: str) -> None:
    group = parse_group(group_text(name, n_ranks, ranks))
    assert (group.name, group.n_ranks) == (name, n_ranks)
    assert group.ranks == ((4, 7) if ranks == "[4, 7]" else None)


def test_groups_survive_the_export_to_kineto(tmp_path: Path) -> None:
    (path,) = mesh(tmp_path, ranks=(2,))
    trace = cptrace.open_trace(path)
    assert trace.ops["group"].tolist() == ["tp1 of 2 ranks [2, 3]", *["cp0 of 2 ranks [0, 2]"] * 2]
    find_export("kineto").write(trace, tmp_path / "again.json")
    again = cptrace.open_trace(tmp_path / "again.json")
    assert again.ops["group"].tolist() == trace.ops["group"].tolist()
    assert again.meta.n_job_ranks == 4


def test_reports_of_nsight_systems_tell_no_groups() -> None:
    assert cptrace.open_trace(require_trace("nsys/nsys-2026.2-ulysses-2gpu.sqlite")).ops["group"].isna().all()


def test_a_group_without_a_name_is_known_by_its_ranks(tmp_path: Path) -> None:
    trace = TinyTrace().kernel(GATHER, 0, 10, **{"Process Group Ranks": "[0, 2]", "Group size": 2})
    assert cptrace.open_trace(trace.write(tmp_path / "t.json")).ops["group"].tolist() == [
        " of 2 ranks [0, 2]"
    ]


def test_one_rank_cut_out_of_a_report_knows_the_size_of_its_job(tmp_path: Path) -> None:
    hosts = ulysses(n_ranks=3)
    trace = of_rank(cptrace.open_trace(write(hosts, tmp_path / "r.sqlite")), 1)
    find_export("kineto").write(trace, tmp_path / "k.json")
    again = cptrace.open_trace(tmp_path / "k.json")
    assert again.meta.n_job_ranks == 3
    assert again.ranks["rank"].tolist() == [1]
