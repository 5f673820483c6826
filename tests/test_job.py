"""Several files of one job as one trace: with clocks that differ they say what one file of all ranks says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cptrace
from cptrace import WhatIfOptions, job
from cptrace.errors import TraceError, UsageError
from cptrace.renderers import RenderOptions, html, text
from cptrace.report import Report
from cptrace.requests import AnalyzeOptions, ScopeRequest
from tests.support.diagnosed import not_looked_for
from tests.support.shared_traces import require_trace
from tests.support.simulated_run import Clock, Host, write, write_each
from tests.support.simulated_schemes import KV, Ring, ulysses
from tests.support.tiny_export import edit

MS = 1_000_000
CLOCKS = (Clock(), Clock(5_000 * MS, 3 * MS), Clock(20 * MS, -7 * MS), Clock(1_234_567, 40_001))
ALL_REDUCE_KERNEL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SLOW = (500_000, 500_000, 1_000_000)


def reduced(hosts: list[Host]) -> list[Host]:
    """Return the programs with a sum of gradients at the end of the last step."""
    for host in hosts:
        peers = tuple(other.rank for other in hosts if other is not host)
        label = "all_reduce pass=backward layer=0 hop=0 tensor=grads bytes=64"
        host.transfer(ALL_REDUCE_KERNEL, 50_000, KV, label=label, peers=peers)
    return hosts


def unlabelled(hosts: list[Host]) -> list[Host]:
    """Return the programs without ranges."""
    for host in hosts:
        host.program = [call for call in host.program if call.what not in ("push", "pop")]
    return hosts


PROGRAMS: dict[str, Any] = {
    "ring": lambda: Ring(n_ranks=3).hosts(),
    "single buffer": lambda: Ring(n_ranks=3, n_buffers=1).hosts(),
    "straggler": lambda: Ring(n_ranks=3, attention_ns=SLOW).hosts(),
    "ulysses": lambda: ulysses(n_ranks=4),
    "ring of four with sums": lambda: reduced(Ring(attention_ns=(*SLOW, 500_000)).hosts()),
}


def told(report: Report) -> list[dict[str, Any]]:
    """Return what findings say but for when in the trace, which depends on where its clock begins."""
    rows = [dict(row) for row in report.rows("findings")]
    for row in rows:
        row["evidence"] = [
            {key: value for key, value in entry.items() if not key.startswith(("start", "end", "file"))}
            for entry in row["evidence"]
        ]
    return rows


@pytest.mark.parametrize("program", PROGRAMS)
def test_files_of_each_rank_say_what_one_file_of_all_says(tmp_path: Path, program: str) -> None:
    """
    file 0    [attention][transfer]
    file 1        [attention][transfer]      one step, on clocks that differ by what their wall clocks do not tell
    """
    hosts = PROGRAMS[program]()
    whole = cptrace.analyze(write(hosts, tmp_path / "whole.sqlite"))
    paths = write_each(hosts, tmp_path, CLOCKS[: len(hosts)])
    report = cptrace.analyze(paths)
    assert [row["path"] for row in report.inputs] == [str(path) for path in paths]
    assert told(report) == told(whole)
    for section in ("ranks", "steps", "collectives", "streams", "start_causes", "peer_waits"):
        assert [_untimed(row) for row in report.rows(section)] == [
            _untimed(row) for row in whole.rows(section)
        ]
    assert not_looked_for(report) == not_looked_for(whole)
    assert "joined-clocks" in {note["code"] for note in report.coverage["notes"]}
    moved = zip(report.rows("ranks"), whole.rows("ranks"), strict=True)
    assert len({row["window_start_ns"] - as_whole["window_start_ns"] for row, as_whole in moved}) == 1
    clocks = report.coverage["clocks"]
    assert [row["path"] for row in clocks] == [str(path) for path in paths]
    assert {row["error_ns"] for row in clocks} == {0}
    shift = [row["shift_ns"] + clock.ahead_ns for row, clock in zip(clocks, CLOCKS, strict=False)]
    assert len(set(shift)) == 1
    assert min(row["shift_ns"] for row in clocks) == 0


def _untimed(row: Any) -> dict[str, Any]:
    """Return a row without what depends on where a trace's clock begins, and on what the file calls things."""
    names = ("start_ns", "end_ns", "window_start_ns", "window_end_ns", "path", "pid", "device")
    return {key: value for key, value in row.items() if key not in names}


def test_one_rank_is_asked_for_and_its_peers_are_in_other_files(tmp_path: Path) -> None:
    paths = write_each(Ring(n_ranks=3, attention_ns=SLOW).hosts(), tmp_path, CLOCKS[:3])
    report = cptrace.analyze(paths, AnalyzeOptions(scope=ScopeRequest(ranks=(1,))))
    (row,) = report.rows("ranks")
    assert row["rank"] == 1
    assert row["peer_wait_ns"] > 0


@pytest.mark.parametrize(
    ("hosts", "clocks", "reason"),
    [
        (
            Ring(n_ranks=2).hosts(),
            (Clock(), Clock(wall_error_ns=60 * MS)),
            "no numbers of steps tell that the files hold the same ones",
        ),
        (Ring(n_ranks=2).hosts(), (Clock(), Clock(wall_error_ns=None)), "when its recording began"),
        (Ring().hosts(), CLOCKS, "no collective is known to end on the ranks of all files at once"),
        (
            [unlabelled(Ring(n_ranks=2, n_steps=1 + rank).hosts())[rank] for rank in (0, 1)],
            CLOCKS[:2],
            "do not have the same number of each communication op",
        ),
    ],
    ids=["wall clocks far apart", "no wall clock", "ring of four alone", "other steps"],
)
def test_files_that_cannot_be_put_on_one_clock_are_analysed_one_by_one(
    tmp_path: Path, hosts: list[Host], clocks: Sequence[Clock], reason: str
) -> None:
    paths = write_each(hosts, tmp_path, clocks)
    report = cptrace.analyze(paths)
    assert reason in not_looked_for(report)["peer_wait"]
    assert "so each file was analysed by itself" in not_looked_for(report)["peer_wait"]
    alone = [cptrace.analyze(path).rows("ranks")[0] for path in paths]
    assert [{**row, "rank": 0} for row in report.rows("ranks")] == [{**row, "rank": 0} for row in alone]
    assert report.coverage["clocks"] == []
    with pytest.raises(TraceError, match="cannot be taken together"):
        cptrace.whatif(paths, WhatIfOptions(fixes=("single-buffer",)))


def test_unlabelled_ranks_are_matched_by_order(tmp_path: Path) -> None:
    hosts = unlabelled(ulysses(n_ranks=2))
    whole = cptrace.analyze(write(hosts, tmp_path / "whole.sqlite"))
    report = cptrace.analyze(write_each(hosts, tmp_path, CLOCKS[:2]))
    assert [row["peer_wait_ns"] for row in report.rows("ranks")] == [
        row["peer_wait_ns"] for row in whole.rows("ranks")
    ]


def test_unlabelled_messages_of_four_ranks_may_be_hops_of_a_ring(tmp_path: Path) -> None:
    """A rank that is always late would look like a clock that is."""
    report = cptrace.analyze(write_each(unlabelled(ulysses(n_ranks=4)), tmp_path, CLOCKS))
    assert "no collective is known to end" in not_looked_for(report)["peer_wait"]


def test_files_of_different_runs_are_not_joined(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    first = write_each(Ring(n_ranks=2).hosts(), tmp_path, CLOCKS[:2], scheme="ring", cp_size=2)
    other = write_each(Ring(n_ranks=2).hosts(), tmp_path / "b", CLOCKS[:2], scheme="ring", cp_size=4)
    report = cptrace.analyze([first[0], other[1]])
    assert "the files are of different runs" in not_looked_for(report)["peer_wait"]


def test_too_many_ops_are_not_held_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_each(Ring(n_ranks=3).hosts(), tmp_path, CLOCKS[:3])
    n_ops = cptrace.analyze(paths[:1]).coverage["n_ops"]
    monkeypatch.setattr(job, "MAX_JOINED_OPS", 2 * n_ops)
    report = cptrace.analyze(paths)
    assert "are not held in memory at once" in not_looked_for(report)["peer_wait"]
    assert [row["rank"] for row in report.rows("ranks")] == [0, 1, 2]
    assert "are not held" not in json.dumps(cptrace.analyze(paths[:2]).to_json())
    monkeypatch.setattr(job, "MAX_JOINED_OPS", n_ops - 1)
    assert "are not held" not in cptrace.analyze(paths[0]).to_json()


@pytest.mark.parametrize("program", ["single buffer", "straggler"])
def test_predictions_are_those_of_one_file(tmp_path: Path, program: str) -> None:
    hosts = PROGRAMS[program]()
    fix = {"single buffer": "single-buffer", "straggler": "peer-wait:straggler"}[program]
    options = WhatIfOptions(fixes=(fix,))
    whole = cptrace.whatif(write(hosts, tmp_path / "whole.sqlite"), options)
    apart = cptrace.whatif(write_each(hosts, tmp_path, CLOCKS[:3]), options)
    assert (
        apart.predicted_step_ns == whole.predicted_step_ns < apart.recorded_step_ns == whole.recorded_step_ns
    )
    assert apart.ranks == whole.ranks
    assert "and 2 more files" in apart.path


def test_the_ranks_of_a_pytorch_job_tell_who_was_late() -> None:
    """Facts: ends agree within 1 to 7 us; the last to start is rank 7 in the first five, then 5, 5 and 4."""
    paths = [require_trace(f"kineto/dlrm_8rank/worker{rank}.json.gz") for rank in range(8)]
    report = cptrace.analyze(paths)
    assert {row["shift_ns"] for row in report.coverage["clocks"]} == {0}
    (peers,) = report.coverage["peers"]
    assert (peers["n_ops"], peers["n_matched"]) == (64, 64)
    assert 1_000 <= peers["end_spread_ns"] <= 7_000
    ranks = report.rows("ranks")
    facts_us = [5798, 11336, 3492, 9774, 6587, 6251, 3558, 1746]
    assert [round(row["comm_ns"] / 1000) for row in ranks] == facts_us
    assert min(ranks, key=lambda row: row["peer_wait_ns"])["rank"] == 7
    assert all(row["transfer_ns"] + row["peer_wait_ns"] == row["comm_ns"] for row in ranks)
    late = {row["peer"] for row in report.rows("peer_waits") if row["wait_ns"]}
    assert late == {4, 5, 7}
    (skew,) = [row for row in report.rows("findings") if row["code"] == "peer-wait"]
    assert skew["rank"] == 7


@pytest.mark.parametrize("wall_error_ns", [0, 8 * MS])
def test_a_report_of_two_gpus_cut_in_two_says_what_it_said(tmp_path: Path, wall_error_ns: int) -> None:
    path = require_trace("nsys/nsys-2026.2-ulysses-2gpu.sqlite")
    whole = cptrace.analyze(path)
    halves = [_half(path, tmp_path / f"{number}.sqlite", number, number * wall_error_ns) for number in (0, 1)]
    report = cptrace.analyze(halves)
    for row, as_whole in zip(report.rows("ranks"), whole.rows("ranks"), strict=True):
        for name in ("window_ns", "compute_ns", "comm_ns", "overlapped_comm_ns", "idle_ns"):
            assert row[name] == as_whole[name]
        assert row["peer_wait_ns"] == pytest.approx(as_whole["peer_wait_ns"], abs=33 * 22_214)
    codes = [[(row["code"], row["form"]) for row in r.rows("findings")] for r in (report, whole)]
    assert codes[0] == codes[1]


def _half(source: Path, target: Path, number: int, wall_error_ns: int) -> Path:
    """Write a copy of a report with one of its processes alone."""
    target.write_bytes(source.read_bytes())
    target.chmod(0o644)
    pids = "(SELECT DISTINCT globalPid FROM CUPTI_ACTIVITY_KIND_KERNEL ORDER BY globalPid LIMIT 1)"
    which = "=" if number else "<>"
    kinds = ("KERNEL", "MEMCPY", "MEMSET", "SYNCHRONIZATION")
    edit(
        target,
        *(f"DELETE FROM CUPTI_ACTIVITY_KIND_{kind} WHERE globalPid {which} {pids}" for kind in kinds[1:]),
        f"DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE globalPid {which} {pids}",
        f"UPDATE TARGET_INFO_SESSION_START_TIME SET utcEpochNs = utcEpochNs + {wall_error_ns}",
    )
    return target


@pytest.mark.parametrize(
    ("names", "is_said"),
    [
        (("rank0", "rank1"), False),
        (("rank10", "rank2"), True),
        (("node1", "node0"), True),
        (("b", "c"), False),
    ],
)
def test_ranks_are_counted_in_the_order_of_files(tmp_path: Path, names: Sequence[str], is_said: bool) -> None:
    """A shell gives rank10 before rank2."""
    paths = write_each(Ring(n_ranks=2).hosts(), tmp_path, CLOCKS[:2])
    renamed = [path.rename(tmp_path / f"{name}.sqlite") for path, name in zip(paths, names, strict=True)]
    notes = {note["code"]: note["text"] for note in cptrace.analyze(renamed).coverage["notes"]}
    assert ("in the order of their ranks" in notes["counted-ranks"]) == is_said
    alone = cptrace.analyze(renamed[0]).coverage["notes"]
    assert "counted-ranks" not in {note["code"] for note in alone}


def test_recorded_ranks_need_no_order(tmp_path: Path) -> None:
    run = {"scheme": "ring", "cp_size": 2}
    paths = write_each(Ring(n_ranks=2).hosts(), tmp_path, CLOCKS[:2], **run)
    one, other = (cptrace.analyze(order) for order in (paths, paths[::-1]))
    assert one.rows("ranks") == other.rows("ranks")
    assert "counted-ranks" not in {note["code"] for note in one.coverage["notes"]}


def test_evidence_is_found_in_its_own_file_at_that_files_time(tmp_path: Path) -> None:
    """What is a second on the joined clock may be a minute in the file that a person looks into."""
    paths = write_each(Ring(n_ranks=3, n_buffers=1).hosts(), tmp_path, CLOCKS[:3])
    report = cptrace.analyze(paths)
    entries = [entry for row in report.rows("findings") for entry in row["evidence"]]
    assert {entry["rank"] for entry in entries} == {0, 1, 2}
    for entry in entries:
        assert entry["file"] == str(paths[entry["rank"]])
        alone = cptrace.open_trace(entry["file"]).ops
        (row,) = np.flatnonzero(alone["correlation_id"] == entry["correlation_id"])
        assert (alone["name"][row], alone["start_ns"][row]) == (entry["name"], entry["file_start_ns"])
    shown = text.render(report, RenderOptions(width=200, has_details=True))
    assert f" of rank{entries[0]['rank']}.sqlite for " in shown
    page = html.render(report, RenderOptions())
    assert f"{entries[0]['file_start_ns']:,} ns in rank{entries[0]['rank']}.sqlite" in page


@pytest.mark.parametrize("is_linked", [False, True])
def test_a_file_that_is_named_twice_is_refused(tmp_path: Path, is_linked: bool) -> None:
    first, second = write_each(Ring(n_ranks=2).hosts(), tmp_path, CLOCKS[:2])
    again = tmp_path / "link.sqlite" if is_linked else first
    if is_linked:
        again.symlink_to(first)
    with pytest.raises(UsageError, match="are one file" if is_linked else "is named twice"):
        cptrace.analyze([first, second, again])


def numbered(hosts: list[Host], first: Sequence[int]) -> list[Host]:
    """Return the programs with their steps numbered from a first number on."""
    for host, number in zip(hosts, first, strict=True):
        steps = [call for call in host.program if call.what == "push" and call.name == "step"]
        for place, call in enumerate(steps):
            call.name = f"ProfilerStep#{number + place}"
    return hosts


def test_steps_of_other_numbers_are_not_put_on_each_other(tmp_path: Path) -> None:
    """
    file 0    [step 4][step 5]
    file 1            [step 5][step 6]      as many collectives on each, a step apart
    """
    hosts = numbered(ulysses_steps(2), (4, 5))
    report = cptrace.analyze(write_each(hosts, tmp_path, CLOCKS[:2]))
    reason = not_looked_for(report)["peer_wait"]
    assert "2 steps from 4 to 5" in reason
    assert "2 steps from 5 to 6" in reason


def ulysses_steps(n_steps: int) -> list[Host]:
    hosts = ulysses(n_ranks=2)
    for host in hosts:
        host.program = [replace(call) for call in host.program * n_steps]
    return hosts


def test_numbered_steps_tell_more_than_clocks(tmp_path: Path) -> None:
    """Clocks that are minutes apart: the same steps are the same steps."""
    hosts = numbered(ulysses_steps(2), (4, 4))
    report = cptrace.analyze(write_each(hosts, tmp_path, (Clock(), Clock(wall_error_ns=120_000 * MS))))
    assert "joined-clocks" in {note["code"] for note in report.coverage["notes"]}
    assert {row["peer_wait_ns"] is None for row in report.rows("ranks")} == {False}


def test_what_cannot_have_happened_is_not_joined(tmp_path: Path) -> None:
    """One collective of rank 1 begins after that of rank 0 has ended, whatever the clocks: all others agree."""
    hosts = ulysses_steps(1)
    paths = write_each(hosts, tmp_path, (Clock(), Clock()))
    late = "(SELECT id FROM StringIds WHERE value LIKE 'nccl%')"
    last = f"(SELECT MAX(start) FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE shortName IN {late})"
    edit(paths[1], f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = start + 5000000, end = end + 5000000"
                   f" WHERE shortName IN {late} AND start >= {last}")  # fmt: skip
    report = cptrace.analyze(paths)
    assert report.coverage["clocks"] == []
    assert "which cannot be" in not_looked_for(report)["peer_wait"]


def test_a_prediction_says_that_ranks_are_missing(tmp_path: Path) -> None:
    paths = write_each(ulysses(n_ranks=3), tmp_path, CLOCKS[:3])
    found = cptrace.whatif(paths[:2], WhatIfOptions(compute_scale=0.5, ranks=(1,)))
    assert any("have peers that were not found on rank 2" in text for text in found.assumptions)
    whole = cptrace.whatif(paths, WhatIfOptions(compute_scale=0.5, ranks=(1,)))
    assert not any("were not found" in text for text in whole.assumptions)


def test_transfers_of_which_some_ranks_have_fewer_are_no_slow_link(tmp_path: Path) -> None:
    """Rank 2 meets rank 1 alone: rank 3, its other neighbour, is in a file that is not here."""
    hosts = Ring(transfer_ns=(400_000, 400_000, 400_000, 400_000)).hosts()
    for host in hosts:
        for call in host.program:
            if call.peers and "tensor=dkv" in call.name:
                call.ns = 1_600_000  # other messages under the same name
    report = cptrace.analyze(write(unlabelled(hosts[:3]), tmp_path / "a.sqlite"))
    assert ("peer-wait", "slow-link") not in {(row["code"], row["form"]) for row in report.rows("findings")}
