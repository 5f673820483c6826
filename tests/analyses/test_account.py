"""Accounts against a second, plain-Python account; and the exact figures of real traces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cptrace
from cptrace.errors import UsageError
from cptrace.renderers import RenderOptions, find_renderer
from cptrace.report import Report
from cptrace.requests import AnalyzeOptions, ScopeRequest, WindowRequest, parse_window
from cptrace.sources import read_trace
from tests.support import plain_account
from tests.support.plain_account import DEVICE_WORK, WITH_GRAPHS, Rank
from tests.support.shared_traces import nsys_traces, require_trace
from tests.support.tiny_export import TinyExport

ALL = ScopeRequest(window=WindowRequest(is_all=True))
FIELDS = (
    "window_ns",
    "compute_ns",
    "comm_ns",
    "overlapped_comm_ns",
    "exposed_comm_ns",
    "exposed_copy_ns",
    "idle_ns",
)
SHARES = ("comm_share", "exposed_comm_share", "overlap")


def analyze(path: Path, scope: ScopeRequest | None = None) -> Report:
    return cptrace.analyze(path, AnalyzeOptions(scope=scope or ScopeRequest()))


def check_row(row, plain, *, has_graphs: bool = False) -> None:
    assert {name: row[name] for name in FIELDS} == {name: getattr(plain, name) for name in FIELDS}
    assert row["window_ns"] == sum(
        row[n] for n in ("compute_ns", "exposed_comm_ns", "exposed_copy_ns", "idle_ns")
    )
    assert row["comm_ns"] == row["overlapped_comm_ns"] + row["exposed_comm_ns"]
    assert row["overlapped_comm_ns"] <= min(row["comm_ns"], row["compute_ns"])
    assert min(row[name] for name in FIELDS) >= 0
    if has_graphs:
        assert [row[name] for name in SHARES] == [None] * 3
    else:
        assert [row[name] for name in SHARES] == [getattr(plain, name) for name in SHARES]


def check_against_plain(
    path: Path, windows: Sequence[tuple[int, int]] | None, rows, hidden: frozenset[Rank] = frozenset()
) -> None:
    plain = plain_account.accounts(path, windows, WITH_GRAPHS if has_graph_table(path) else DEVICE_WORK)
    assert {(row["pid"], row["device"]) for row in rows} == set(plain)
    for row in rows:
        rank = Rank(row["pid"], row["device"])
        check_row(row, plain[rank], has_graphs=rank in hidden)


def has_graph_table(path: Path) -> bool:
    return not (read_trace(path).ops["kind"] != "graph").all()


KERNELS = ("flash_fwd_kernel", "nvjet_hsh", "mystery", "ncclDevKernel_SendRecv()", "ncclDevKernel_AllGather_RING_LL()",
           "void deep_ep::intranode::dispatch<int>(int)")  # fmt: skip

times = st.tuples(st.integers(0, 60), st.integers(0, 25)).map(lambda pair: (pair[0], pair[0] + pair[1]))
places = st.fixed_dictionaries(
    {"pid": st.sampled_from([100, 200]), "device": st.integers(0, 1), "stream": st.sampled_from([7, 13]),
     "context": st.integers(1, 2)}
)  # fmt: skip
ops = st.lists(
    st.tuples(
        st.sampled_from([*KERNELS, "DtoD", "HtoD", "peer", "between", "memset", "graph"]), times, places
    ),
    min_size=1,
    max_size=14,
)


def build(rows, *, with_graphs: bool) -> TinyExport:
    export = TinyExport()
    for name, (start, end), where in rows:
        if name in KERNELS:
            export.kernel(name, start, end, **where)
        elif name == "memset":
            export.memset(start, end, **where)
        elif name == "graph":
            if with_graphs:
                export.graph(start, end, **where)
            else:
                export.memset(start, end, **where)
        else:
            kind, src, dst = COPIES[name]
            export.copy(start, end, kind=kind, src=src, dst=dst, **where)
    return export


COPIES = {"DtoD": (8, 0, 0), "HtoD": (1, None, 0), "peer": (10, None, None), "between": (8, 0, 1)}
"""Kind, source and destination device of copies."""

SETTINGS = settings(
    max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)


@SETTINGS
@given(rows=ops)
def test_any_trace_from_first_to_last_op(rows, tmp_path):
    path = tmp_path / "t.sqlite"
    path.unlink(missing_ok=True)
    check_against_plain(build(rows, with_graphs=False).write(path), None, analyze(path).rows("ranks"))


@SETTINGS
@given(rows=ops, edges=st.tuples(st.integers(0, 90), st.integers(1, 90)))
def test_any_window_clips_what_straddles_it(rows, edges, tmp_path):
    path = tmp_path / "t.sqlite"
    path.unlink(missing_ok=True)
    build(rows, with_graphs=False).write(path)
    first = min(start for _, (start, _), _ in rows)
    last = max(end for _, (_, end), _ in rows)
    start, end = edges[0], edges[0] + edges[1]
    scope = ScopeRequest(window=WindowRequest(start_ns=start, end_ns=end))
    if end <= first or start >= last:
        with pytest.raises(UsageError, match="outside the trace"):
            analyze(path, scope)
    else:
        check_against_plain(path, [(start, end)], analyze(path, scope).rows("ranks"))


@SETTINGS
@given(rows=ops)
def test_any_trace_with_whole_graphs(rows, tmp_path):
    """Shares of a rank whose work hides in graphs cannot be told; its times still balance."""
    path = tmp_path / "t.sqlite"
    path.unlink(missing_ok=True)
    build(rows, with_graphs=True).write(path)
    hidden = frozenset(
        Rank(where["pid"], where["device"]) for name, (s, e), where in rows if name == "graph" and e > s
    )
    report = analyze(path)
    check_against_plain(path, None, report.rows("ranks"), hidden)
    assert any(entry.analysis == "overlap" for entry in report.not_applicable) == bool(hidden)


@SETTINGS
@given(rows=ops)
def test_breakdowns_add_up_to_what_they_break_down(rows, tmp_path):
    path = tmp_path / "t.sqlite"
    path.unlink(missing_ok=True)
    report = analyze(build(rows, with_graphs=False).write(path))
    durations: dict[int, int] = {}
    for row in report.rows("kernels"):
        durations[row["rank"]] = durations.get(row["rank"], 0) + row["total_ns"]
    assert sum(durations.values()) == sum(end - start for _, (start, end), _ in rows)
    assert sum(row["count"] for row in report.rows("kernels")) == len(rows)
    assert sum(row["n_ops"] for row in report.rows("streams")) == len(rows)
    for row in report.rows("streams"):
        parts = [row[f"{role}_ns"] for role in ("comm", "compute", "copy", "other")]
        assert max(parts) <= row["busy_ns"] <= sum(parts)
    by_rank = {row["rank"]: row for row in report.rows("ranks")}
    for row in report.rows("collectives"):
        assert row["busy_ns"] == row["overlapped_ns"] + row["exposed_ns"]
        assert row["busy_ns"] <= min(row["total_ns"], by_rank[row["rank"]]["comm_ns"])
        assert (row["overlap"] is None) == (row["busy_ns"] == 0)
    for rank, row in by_rank.items():
        mine = [r for r in report.rows("collectives") if r["rank"] == rank]
        assert sum(r["busy_ns"] for r in mine) >= row["comm_ns"]
        if len(mine) == 1:
            assert (mine[0]["busy_ns"], mine[0]["exposed_ns"]) == (row["comm_ns"], row["exposed_comm_ns"])


def test_by_hand(tmp_path):
    """
              0    10   20   30   40   50   60   70   80   90  100
    compute        [=========)         [====)
    comm                [=========)              [====)
    copy      [====)              [===)     [=======)
    """
    export = TinyExport().kernel("flash", 10, 30).kernel("nvjet", 50, 60)
    export.kernel("ncclDevKernel_SendRecv()", 20, 40, stream=13).kernel(
        "ncclDevKernel_SendRecv()", 70, 80, stream=13
    )
    export.copy(0, 10, kind=1).copy(40, 48).copy(58, 76)
    (row,) = analyze(export.write(tmp_path / "t.sqlite")).rows("ranks")
    expected = {
        "window_basis": "all", "window_start_ns": 0, "window_end_ns": 80, "window_ns": 80, "compute_ns": 30,
        "comm_ns": 30,
        "overlapped_comm_ns": 10, "exposed_comm_ns": 20, "exposed_copy_ns": 28, "idle_ns": 2, "unclassified_ns": 0,
        "comm_share": 0.375, "exposed_comm_share": 0.25, "overlap": 10 / 30,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == expected


def test_without_communication_overlap_is_missing_and_not_zero(tmp_path):
    (row,) = analyze(TinyExport().kernel("nvjet", 0, 10).write(tmp_path / "t.sqlite")).rows("ranks")
    assert (row["overlap"], row["comm_share"], row["exposed_comm_share"]) == (None, 0.0, 0.0)


def test_a_window_of_no_length(tmp_path):
    report = analyze(TinyExport().kernel("ncclDevKernel_SendRecv()", 5, 5).write(tmp_path / "t.sqlite"))
    (row,) = report.rows("ranks")
    assert (row["window_ns"], row["comm_share"], row["overlap"]) == (0, None, None)
    assert [(r["count"], r["total_ns"]) for r in report.rows("kernels")] == [(1, 0)]


def test_unclassified_time_is_united_and_cut_to_the_window(tmp_path):
    """
    mystery   [0 ======= 20)
    enigma         [10 ======= 30)      window [15, 25)
    """
    export = (
        TinyExport()
        .kernel("mystery", 0, 20)
        .kernel("enigma", 10, 30, stream=9)
        .kernel("nvjet", 0, 30, stream=10)
    )
    path = export.write(tmp_path / "t.sqlite")
    report = analyze(path, ScopeRequest(window=parse_window("15ns:25ns")))
    assert report.rows("ranks")[0]["unclassified_ns"] == report.coverage["unclassified_ns"] == 10
    assert {entry["name"] for entry in report.coverage["unclassified"]} == {"mystery", "enigma"}
    assert analyze(path).coverage["unclassified_ns"] == 30


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ("10ns:", (10, 40)),
        (":15ns", (5, 15)),
        ("0ns:100ns", (0, 100)),
        ("all", (5, 40)),
        (" 6ns : 7ns ", (6, 7)),
    ],
)
def test_windows_of_the_option(window, expected, tmp_path):
    path = TinyExport().kernel("nvjet", 5, 20).kernel("nvjet", 30, 40).write(tmp_path / "t.sqlite")
    (row,) = analyze(path, ScopeRequest(window=parse_window(window))).rows("ranks")
    assert (row["window_start_ns"], row["window_end_ns"]) == expected
    assert row["window_basis"] == ("all" if window == "all" else "option")
    check_against_plain(path, [expected], [row])


def test_a_rank_without_steps_is_accounted_for_as_a_whole(tmp_path):
    """Rank 0 marks its step, rank 1 does not."""
    export = (
        TinyExport().kernel("nvjet", 10, 20, launch=2).kernel("nvjet", 50, 60, launch=40).range("step", 0, 5)
    )
    export.kernel("nvjet", 0, 100, pid=200, device=1, launch=1)
    rows = analyze(export.write(tmp_path / "t.sqlite")).rows("ranks")
    assert [(row["window_basis"], row["window_ns"]) for row in rows] == [("steps", 10), ("all", 100)]


@pytest.mark.parametrize("path", nsys_traces(), ids=lambda path: path.name)
def test_shared_traces_agree_with_the_plain_account(path):
    report = analyze(path, ALL)
    tables = WITH_GRAPHS if "graph" in path.name else DEVICE_WORK
    plain = plain_account.accounts(path, None, tables)
    assert len(report.rows("ranks")) == len(plain)
    for row in report.rows("ranks"):
        check_row(row, plain[Rank(row["pid"], row["device"])], has_graphs="graph" in path.name)


def test_ulysses_to_the_nanosecond():
    report = analyze(require_trace("nsys/nsys-2026.2-ulysses-2gpu.sqlite"), ALL)
    figures = [
        (row["device"], row["window_ns"], row["compute_ns"], row["comm_ns"], row["overlapped_comm_ns"], row["overlap"],
         row["idle_ns"])
        for row in report.rows("ranks")
    ]  # fmt: skip
    assert figures == [
        (0, 299_848_812, 253_690_832, 17_172_652, 0, 0.0, 26_031_025),
        (1, 298_661_551, 256_095_624, 8_229_100, 0, 0.0, 31_385_635),
    ]
    send_recv = report.rows("collectives")
    # One of each rank was launched before the capture began, so what it was for is not known.
    assert [(row["rank"], row["kind"], row["count"]) for row in send_recv] == [
        (0, "all_to_all", 32), (0, "send_recv", 1), (1, "all_to_all", 32), (1, "send_recv", 1),
    ]  # fmt: skip
    assert all(row["name"].startswith("ncclDevKernel_SendRecv") for row in send_recv)
    assert sum(row["total_ns"] for row in send_recv) == 25_401_752
    assert {(row["rank"], row["stream"]) for row in report.rows("streams") if row["comm_ns"]} == {
        (0, 7),
        (1, 15),
    }
    assert sum(row["count"] for row in report.rows("kernels") if row["kind"] == "kernel") == 4010


def test_graph_trace_hides_its_kernels():
    report = analyze(require_trace("nsys/nsys-2024.6-graph-trace.sqlite"))
    by_kind: dict[str, int] = {}
    for row in report.rows("kernels"):
        by_kind[row["kind"]] = by_kind.get(row["kind"], 0) + row["total_ns"]
    assert round(by_kind["kernel"] / 1e6, 3) == 0.078
    assert round(by_kind["graph"] / 1e6) == 7811
    assert all(row[name] is None for row in report.rows("ranks") for name in SHARES)
    (entry,) = [entry for entry in report.not_applicable if entry.analysis == "overlap"]
    assert "--cuda-graph-trace=node" in entry.reason


def test_a_trace_without_kernels_says_so_for_every_analysis():
    report = analyze(require_trace("nsys/nsys-no-kernels.sqlite"))
    document = json.loads(report.to_json())
    reasons = {entry["analysis"]: entry for entry in document["not_applicable"]}
    assert {"account", "steps", "collectives", "streams", "kernels"} <= reasons.keys()
    for entry in reasons.values():
        assert "--trace=cuda" in entry["reason"]
        assert "CUPTI_ACTIVITY_KIND_KERNEL" in entry["missing"]
    assert document["ranks"] == document["steps"] == document["collectives"] == []


@pytest.mark.parametrize(
    ("recorded", "shown"),
    [([300, 200], [300, 200]), ([300, None], [300, None]), (None, [None, None]), ([True, -1], [None, None])],
)
def test_peak_memory_is_what_the_run_recorded(
    tmp_path: Path, recorded: list[object] | None, shown: list[int | None]
) -> None:
    ranks = [{"rank": rank, "pid": rank + 1, "device": 0} for rank in range(2)]
    export = TinyExport().run(ranks=ranks, **({} if recorded is None else {"peak_memory_bytes": recorded}))
    for pid in (1, 2):
        export.kernel("gemm", 0, 10, pid=pid)
    report = cptrace.analyze(export.write(tmp_path / "run.sqlite"))
    assert [row["peak_memory_bytes"] for row in report.rows("ranks")] == shown
    text = find_renderer("text").render(report, RenderOptions())
    assert ("peak memory: 300 B on rank 0" in text) == (shown[0] == 300)
