"""Who waited for whom, how fast messages went, and when everything ran."""

from __future__ import annotations

import numpy as np
import pytest

import cptrace
from cptrace import intervals
from cptrace.analyses import make_scope
from cptrace.analyses.timeline import make_timeline
from cptrace.intervals import Intervals
from cptrace.requests import AnalyzeOptions, ScopeRequest, WindowRequest
from cptrace.timeline import join
from tests.support.shared_traces import ROOT
from tests.support.tiny_export import TinyExport

SEND = "ncclDevKernel_SendRecv()"
ALL = AnalyzeOptions(scope=ScopeRequest(window=WindowRequest(is_all=True)), has_timeline=True)


def three_ranks():
    """Return an export of two rounds of three ranks; the last to arrive is rank 2, then rank 0.

    rank 0  |--------|        ...      |----|
    rank 1     |-----|        ... |---------|
    rank 2        |--|        ... |---------|
            0  3  6  9            100  105  110
    """
    export = TinyExport()
    for base, starts, end in ((0, (0, 3, 6), 9), (100, (5, 0, 0), 10)):
        for rank, start in enumerate(starts):
            export.kernel(SEND, base + start, base + end, pid=100 + rank, device=rank)
    return export


def test_each_rank_waits_for_the_last_to_arrive(tmp_path):
    report = cptrace.analyze(three_ranks().write(tmp_path / "t.sqlite"), ALL)
    rows = [(row["rank"], row["peer"], row["count"], row["wait_ns"]) for row in report.rows("peer_waits")]
    assert rows == [(0, 2, 1, 6), (1, 0, 1, 5), (1, 2, 1, 3), (2, 0, 1, 5)]
    waits = {row["rank"]: row["peer_wait_ns"] for row in report.rows("ranks")}
    assert waits == {0: 6, 1: 8, 2: 5}, "no ops of a rank run at once here, so the sums are the account's"


def test_of_several_that_come_last_the_lowest_rank_is_named(tmp_path):
    export = TinyExport()
    for rank, start in enumerate((0, 4, 4)):
        export.kernel(SEND, start, 9, pid=100 + rank, device=rank)
    report = cptrace.analyze(export.write(tmp_path / "t.sqlite"), ALL)
    assert [(row["rank"], row["peer"]) for row in report.rows("peer_waits")] == [(0, 1)]


def test_one_rank_waits_for_nobody(tmp_path):
    report = cptrace.analyze(TinyExport().kernel(SEND, 0, 9).write(tmp_path / "t.sqlite"), ALL)
    assert report.rows("peer_waits") == ()
    assert [entry.analysis for entry in report.not_applicable].count("peer_wait") == 1
    assert "peer_waits" not in [entry.analysis for entry in report.not_applicable]


def test_messages_by_size_without_known_peers(tmp_path):
    """Two sends of 100 bytes in 10 and 30 ns, one of 50 in 10; one without a size is left out."""
    export = TinyExport().domain(1, "cptrace")
    for number, (size, duration) in enumerate(((100, 10), (100, 30), (50, 10), (None, 10))):
        text = "send_recv pass=forward layer=0" + (f" bytes={size}" if size else "")
        export.range(text, 10 * number, 10 * number + 5, domain=1)
        export.kernel(SEND, 1_000 + 50 * number, 1_000 + 50 * number + duration, launch=10 * number + 1)
    rows = cptrace.analyze(export.write(tmp_path / "t.sqlite"), ALL).rows("messages")
    assert [(row["bytes"], row["count"], row["median_ns"], row["transfer_ns"]) for row in rows] == [
        (50, 1, 10, None),
        (100, 2, 20, None),
    ]
    assert [row["bytes_per_s"] for row in rows] == [pytest.approx(5e9), pytest.approx(5e9)]


def test_messages_of_matched_ranks_do_not_count_waiting():
    rows = cptrace.analyze(ROOT / "samples/ring-causal-virtual.sqlite").rows("messages")
    assert {(row["bytes"], row["transfer_ns"]) for row in rows} == {(524_288, 10_505_760)}
    assert len({row["median_ns"] for row in rows}) > 1
    assert all(row["bytes_per_s"] == pytest.approx(524_288e9 / 10_505_760) for row in rows)


def test_messages_need_device_work_and_sizes(tmp_path):
    report = cptrace.analyze(TinyExport().kernel(SEND, 0, 9).write(tmp_path / "t.sqlite"), ALL)
    assert report.rows("messages") == ()
    report = cptrace.analyze(TinyExport().call("cudaFree", 0, 1).write(tmp_path / "e.sqlite"), ALL)
    assert "messages" in [entry.analysis for entry in report.not_applicable]


def test_a_timeline_has_every_operation_of_each_stream(tmp_path):
    export = three_ranks().kernel("flash_fwd_kernel", 2, 8, stream=9).copy(200, 210)
    timeline = cptrace.analyze(export.write(tmp_path / "t.sqlite"), ALL).timeline
    assert [(lane.rank, lane.stream) for lane in timeline.lanes] == [(0, 7), (0, 9), (1, 7), (2, 7)]
    names = [[timeline.names[place] for place in lane.name] for lane in timeline.lanes]
    assert names[1] == ["flash_fwd_kernel"]
    assert names[0][:2] == [SEND, SEND]
    assert (timeline.lanes[1].start_ns.tolist(), timeline.lanes[1].end_ns.tolist()) == ([2], [8])
    assert [timeline.roles[role] for role in timeline.lanes[0].role] == ["comm", "comm", "copy"]
    assert timeline.merged_below_ns == 0
    assert sum(int(lane.n_ops.sum()) for lane in timeline.lanes) == 8


def test_no_timeline_unless_it_is_asked_for(tmp_path):
    path = three_ranks().write(tmp_path / "t.sqlite")
    report = cptrace.analyze(path)
    assert report.timeline is None
    assert report == cptrace.analyze(path, AnalyzeOptions(has_timeline=True))
    assert '"timeline"' not in report.to_json()


@pytest.mark.parametrize("max_entries", [10, 100])
def test_merging_keeps_counts_long_operations_and_what_is_busy(max_entries, tmp_path):
    """A thousand operations of 1 ns and a few of 100,000 ns: the short ones are merged, the long ones are not."""
    rng = np.random.default_rng(5)
    export, at = TinyExport(), 0
    for number in range(1000):
        duration = 100_000 if number % 100 == 0 else 1
        export.kernel(("flash_fwd_kernel", SEND)[number % 2], at, at + duration, launch=number + 1)
        at += duration + int(rng.integers(0, 5))
    trace = cptrace.open_trace(export.write(tmp_path / "t.sqlite"))
    scope = make_scope(trace, ScopeRequest())
    whole, merged = make_timeline(scope), make_timeline(scope, max_entries)
    (lane,), (full,) = merged.lanes, whole.lanes
    assert len(full.start_ns) == 1000 == int(full.n_ops.sum())
    assert len(lane.start_ns) < 500
    assert int(lane.n_ops.sum()) == 1000
    assert merged.merged_below_ns == at // (1 << 14) or merged.merged_below_ns > 0
    is_long = full.end_ns - full.start_ns >= merged.merged_below_ns
    assert is_long.sum() == 10
    kept = set(zip(lane.start_ns.tolist(), lane.end_ns.tolist(), lane.name.tolist(), strict=True))
    for start, end, name in zip(
        full.start_ns[is_long], full.end_ns[is_long], full.name[is_long], strict=True
    ):
        assert (start, end, name) in kept
    everything = intervals.union(Intervals(full.start_ns, full.end_ns))
    shown = intervals.union(Intervals(lane.start_ns, lane.end_ns))
    assert intervals.total_ns(intervals.subtract(everything, shown)) == 0
    assert set(lane.name[lane.n_ops > 1].tolist()) == {-1}


def test_timelines_of_several_files_are_joined(tmp_path):
    one = cptrace.analyze(TinyExport().kernel("a", 0, 5).write(tmp_path / "a.sqlite"), ALL).timeline
    two = cptrace.analyze(TinyExport().kernel("b", 0, 5).write(tmp_path / "b.sqlite"), ALL).timeline
    both = join((one, two))
    assert [both.names[lane.name[0]] for lane in both.lanes] == ["a", "b"]
    assert join(()) is None
