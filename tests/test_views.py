"""Figures and views: every tidy frame has a figure, a choice changes it, and what cannot be shown says why."""

from __future__ import annotations

import json

import pytest

import cptrace
from cptrace import figures, tidy, views
from cptrace.comparison import compare_reports
from cptrace.errors import UsageError
from cptrace.figure_texts import plain
from cptrace.report import Report
from cptrace.requests import AnalyzeOptions
from tests.support.reports import account, finding, report_of_steps
from tests.support.shared_traces import ROOT

SAMPLES = ROOT / "samples"


@pytest.fixture(scope="module")
def report():
    return cptrace.analyze(SAMPLES / "ring-causal-virtual.sqlite", AnalyzeOptions(has_timeline=True))


@pytest.mark.parametrize(("name", "frame"), tidy.FRAMES, ids=[name for name, _ in tidy.FRAMES])
def test_every_tidy_frame_has_a_figure_and_may_be_empty(name, frame, report):
    draw = figures.rank_bars if name == "rank_parts" else getattr(figures, name)
    full, empty = frame(report), frame(Report(()))
    assert list(full.columns) == list(empty.columns)
    assert empty.empty
    if not full.empty:
        document = json.loads(draw(full).to_json())
        assert document["data"]
        assert document["layout"]["paper_bgcolor"] == "rgba(0,0,0,0)"


def test_rank_parts_sum_to_the_window(report):
    sums = tidy.rank_parts(report).groupby("rank")["duration_ns"].sum().to_dict()
    assert sums == {row["rank"]: row["window_ns"] for row in report.rows("ranks")}
    drawn = json.loads(figures.rank_bars(tidy.rank_parts(report)).to_json())
    assert [trace["name"] for trace in drawn["data"]] == list(tidy.PARTS)


def test_parts_have_patterns_of_their_own(report):
    drawn = json.loads(figures.rank_bars(tidy.rank_parts(report)).to_json())
    shapes = [trace["marker"]["pattern"]["shape"] for trace in drawn["data"]]
    assert len(set(shapes)) == len(shapes)


def test_many_ranks_are_a_range():
    steps = [account(100, 90, 40, 30), account(100, 90, 40, 20)]
    drawn = json.loads(figures.step_overlap(tidy.step_overlap(report_of_steps(steps, n_ranks=20))).to_json())
    assert [trace["name"] for trace in drawn["data"]] == [
        "min of 20 ranks",
        "median of 20 ranks",
        "max of 20 ranks",
    ]


def test_peer_waits_have_every_pair():
    waits = ({"rank": 0, "peer": 2, "count": 1, "wait_ns": 7},)
    frame = tidy.peer_waits(report_of_steps([account(10, 10, 0, 0)], n_ranks=3, peer_waits=waits))
    assert len(frame) == 9
    assert frame["wait_ns"].sum() == 7


def test_a_timeline_of_a_step_has_its_operations_only(report):
    n_all, n_step = (
        sum(len(trace.x) for trace in views.rank_timeline(report, 0, step).data) for step in (None, 1)
    )
    assert 0 < n_step < n_all


def test_what_cannot_be_shown_says_why(report):
    with pytest.raises(UsageError, match="rank 0 has no step 9; the steps are 0, 1, 2"):
        views.rank_timeline(report, 0, 9)
    with pytest.raises(UsageError, match="has_timeline=True"):
        views.rank_timeline(cptrace.analyze(SAMPLES / "ring-virtual.sqlite"), 0)


def test_controls(report):
    assert views.ranks(report) == [0, 1, 2, 3]
    assert views.steps(report) == [0, 1, 2]
    assert views.fixes(report)[0] == "imbalance:schedule"


def test_findings_and_evidence():
    rows = (
        finding("late-launch", recoverable_ns=5),
        finding("single-buffer", recoverable_ns=50, evidence=[{"name": "k"}]),
    )
    made = report_of_steps([account(10, 10, 0, 0)], findings=rows)
    assert views.findings(made)["code"].tolist() == ["single-buffer", "late-launch"]
    assert views.evidence(made, "single-buffer")["name"].tolist() == ["k"]
    assert views.evidence(made)["name"].tolist() == ["k"], "of the first that is shown"
    assert views.evidence(made, "padding").empty
    assert views.evidence(report_of_steps([account(10, 10, 0, 0)])).empty


def test_a_comparison_as_frame_and_figure():
    runs = [report_of_steps([account(w, w - 20, 40, 30)] * 3) for w in (1000, 900)]
    compared = compare_reports(runs, names=["<b>old</b>", "new"])
    frame = tidy.comparison_metrics(compared)
    assert set(frame["run"]) == {"<b>old</b>", "new"}
    drawn = json.loads(figures.comparison(frame).to_json())
    assert [trace["name"] for trace in drawn["data"]] == ["&lt;b&gt;old&lt;/b&gt;", "new"]
    assert views.metrics(compared)["verdict"].iloc[0] == "better"


def test_a_prediction_draws_recorded_beside_predicted():
    trace = cptrace.open_trace(SAMPLES / "ring-single-buffer-virtual.sqlite")
    recorded, predicted = views.prediction(trace, "single-buffer").data
    assert (recorded.name, predicted.name) == ("recorded", "predicted")
    assert all(after < before for before, after in zip(recorded.x, predicted.x, strict=True))


@pytest.mark.parametrize("name", ["x" * 10_000, "<b>&", "a\x00\x1b\u202e", "%{y}"])
def test_names_are_shown_as_they_are(name):
    shown = plain(name)
    assert len(shown) < 500
    assert "<" not in shown
    assert shown.isprintable()


def test_findings_are_listed_by_what_to_mend_first() -> None:
    """Wrong results, then what pays, then what pays behind that, then what has no prediction."""
    rows = [
        finding("required-order", recoverable_ns=None, predicted_step_ns=None),
        finding("shared-stream", recoverable_ns=90, after=["late-launch", "peer-wait (straggler)"]),
        finding("late-launch", recoverable_ns=20),
        finding("peer-wait", form="straggler", recoverable_ns=30),
        finding("missing-event", form="race", severity="error", recoverable_ns=None, predicted_step_ns=None),
    ]
    ordered = tidy.by_gain(rows)
    assert [row["code"] for row in ordered] == [
        "missing-event", "peer-wait", "late-launch", "shared-stream", "required-order"
    ]  # fmt: skip
    assert tidy.gain(ordered[3]).startswith(
        "Mending it, once late-launch and peer-wait (straggler) are mended too, is predicted to save 90 ns per step"
    )
    assert tidy.gain(ordered[1]).startswith("Mending it is predicted")
    report = report_of_steps([account(10, 10, 0, 0)], findings=rows)
    names = tidy.findings(report)["finding"].tolist()
    assert names[0] == "shared-stream, after late-launch and peer-wait (straggler)"
