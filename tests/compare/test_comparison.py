"""Runs side by side: what differs, what is noise, and what is not to be compared."""

from __future__ import annotations

import json

import pytest

import cptrace
from cptrace.comparison import KEYS, METRICS, compare_reports
from cptrace.errors import SourceError, TraceError, UsageError
from cptrace.report import Report
from cptrace.requests import ScopeRequest, parse_window
from tests.support.reports import account, finding, input_row, report_of_steps
from tests.support.shared_traces import ROOT

SAMPLES = ROOT / "samples"
RING, SLOW = SAMPLES / "ring-virtual.sqlite", SAMPLES / "ring-slow-link-virtual.sqlite"


def run_of(*windows, comm=40, overlapped=30, **more):
    """Return a report of one step per window, with a compute time that leaves 10 ns idle."""
    steps = [account(w, w - (comm - overlapped) - 10, comm, overlapped) for w in windows]
    return report_of_steps(steps, **more)


def metric(comparison, name, run=1):
    (row,) = (row for row in comparison.of_run("metrics", run) if row["metric"] == name)
    return row


def test_a_faster_run_is_better():
    row = metric(compare_reports([run_of(1000, 1002, 1001), run_of(900, 901, 902)]), "step_ns")
    assert (row["baseline"], row["value"], row["change"], row["verdict"]) == (1001, 901, -100, "better")
    assert row["relative_change"] == pytest.approx(-100 / 1001)
    assert row["noise"] == pytest.approx(9.01), (
        "a hundredth of the shorter step is more than the spread of 2 ns"
    )


def test_a_slower_run_is_worse_and_less_overlap_is_too():
    comparison = compare_reports([run_of(1000, 1000, 1000), run_of(2000, 2000, 2000, comm=40, overlapped=10)])
    assert metric(comparison, "step_ns")["verdict"] == "worse"
    row = metric(comparison, "overlap")
    assert (row["baseline"], row["value"], row["change"], row["verdict"]) == (0.75, 0.25, -0.5, "worse")


def test_the_spread_of_the_steps_covers_a_difference():
    row = metric(compare_reports([run_of(1000, 1200, 1000), run_of(1100, 1100, 1100)]), "step_ns")
    assert (row["change"], row["noise"], row["verdict"]) == (100, 250, "no-difference")


def test_one_step_says_nothing_about_noise():
    row = metric(compare_reports([run_of(1000), run_of(2000)]), "step_ns")
    assert (row["noise"], row["verdict"], row["change"]) == (None, "unknown", 1000)


def test_computed_times_have_no_noise():
    device = {"device_kind": "cpu-emulated", "clock": "virtual"}
    comparison = compare_reports([run_of(1000, device=device), run_of(1001, device=device)])
    assert metric(comparison, "step_ns")["verdict"] == "worse"
    assert metric(comparison, "comm_ns")["verdict"] == "no-difference"


def test_the_slowest_rank_makes_the_step_and_shares_are_of_sums():
    """Two ranks with one step each: windows 100 and 200, communication 10 and 50, exposed 10 and 20."""
    first, second = account(100, 80, 10, 0), account(200, 150, 50, 30)
    both = report_of_steps([first], n_ranks=2)
    rows = tuple({**row, **(second if row["rank"] else {})} for row in both.rows("steps"))
    report = Report(both.inputs, {**both.sections, "steps": rows})
    comparison = compare_reports([report, report])
    values = {row["metric"]: row["value"] for row in comparison.metrics}
    assert values["step_ns"] == 200
    assert values["comm_share"] == 60 / 300
    assert values["exposed_comm_share"] == 30 / 300
    assert values["overlap"] == 30 / 60
    assert values["comm_ns"] == 30


def test_hidden_work_leaves_a_metric_unknown():
    hidden = report_of_steps([account(1000, 900, 40, 30, is_hidden=True)] * 3)
    comparison = compare_reports([run_of(1000, 1000, 1000), hidden])
    row = metric(comparison, "overlap")
    assert (row["value"], row["change"], row["verdict"]) == (None, None, "unknown")
    assert metric(comparison, "step_ns")["verdict"] == "no-difference"
    comparison.to_json()


def test_no_communication_on_either_side_is_no_overlap():
    runs = [run_of(1000, 1000, comm=0, overlapped=0) for _ in range(2)]
    comparison = compare_reports(runs)
    assert metric(comparison, "overlap")["value"] is None
    assert metric(comparison, "comm_share")["verdict"] == "no-difference"


def test_without_steps_the_window_is_one():
    runs = [
        Report(run.inputs, {"ranks": run.rows("ranks")}) for run in (run_of(1000, 1000), run_of(500, 500))
    ]
    comparison = compare_reports(runs)
    assert comparison.n_steps == (0, 0)
    assert (metric(comparison, "step_ns")["baseline"], metric(comparison, "step_ns")["value"]) == (2000, 1000)


def test_findings_gone_new_and_kept():
    before = run_of(
        1000,
        findings=(finding("single-buffer", recoverable_ns=30), finding("single-buffer", rank=1, recoverable_ns=50),
                  finding("missing-event", form="race"), finding("late-launch", recoverable_ns=None)),
    )  # fmt: skip
    after = run_of(
        1000, findings=(finding("late-launch", recoverable_ns=7), finding("missing-event", form="host-sync"))
    )
    rows = {(row["code"], row["form"]): row for row in compare_reports([before, after]).findings}
    assert {key: row["status"] for key, row in rows.items()} == {
        ("late-launch", None): "kept",
        ("missing-event", "host-sync"): "new",
        ("missing-event", "race"): "gone",
        ("single-buffer", None): "gone",
    }
    assert rows["single-buffer", None]["baseline_recoverable_ns"] == 50
    assert rows["single-buffer", None]["recoverable_ns"] is None
    assert rows["late-launch", None]["recoverable_ns"] == 7


def test_collectives_and_kernels_are_per_step_and_rank():
    """Four steps against two: 800 ns on each of 2 ranks is 200 per step, 600 is 300 per step."""

    def with_work(n_steps, total, name):
        steps = [account(1000, 900, 40, 30)] * n_steps
        rows = tuple(
            {
                "rank": r,
                "kind": "send_recv",
                "role": "comm",
                "name": name,
                "total_ns": total,
                "exposed_ns": total // 2,
            }
            for r in (0, 1)
        )
        return report_of_steps(steps, n_ranks=2, collectives=rows, kernels=rows)

    comparison = compare_reports([with_work(4, 800, "void f<1>(int)"), with_work(2, 600, "void f<2>(int)")])
    (kernel,) = comparison.kernels
    assert kernel["name"] == "f"
    assert (kernel["baseline_total_ns"], kernel["total_ns"], kernel["total_change_ns"]) == (200, 300, 100)
    gone, new = sorted(comparison.collectives, key=lambda row: row["name"])
    assert (gone["baseline_total_ns"], gone["total_ns"], gone["total_change_ns"]) == (200, None, -200)
    assert (new["baseline_exposed_ns"], new["exposed_ns"], new["exposed_change_ns"]) == (None, 150, 150)


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("seq_len", {"run": {"seq_len": 2048}}),
        ("cp_size", {"run": {"cp_size": 8}}), ("dtype", {"run": {"dtype": "bf16"}}),
        ("scheme", {"run": {"scheme": "te"}}), ("passes", {"run": {"passes": ["forward"]}}), ("ranks", {"n_ranks": 2}),
        ("device_kind", {"device": {"device_kind": "cpu-emulated", "clock": "paced"}}),
        ("comm", {"comm": 0, "overlapped": 0}),
    ],
)  # fmt: skip
def test_runs_that_were_not_run_alike_are_refused(key, change):
    base = {
        "seq_len": 1024,
        "cp_size": 4,
        "dtype": "fp32",
        "scheme": "ring",
        "passes": ["forward", "backward"],
    }
    change = {**change, "run": {**base, **change.get("run", {})}}
    runs = [run_of(1000, run=base), run_of(1000, **change)]
    with pytest.raises(UsageError, match=rf"not run alike \({key}: .* and .*\).*--allow-different {key}"):
        compare_reports(runs)
    comparison = compare_reports(runs, allow_different=[key])
    assert [row["key"] for row in comparison.different] == [key]


def test_a_fault_is_what_a_comparison_is_about():
    runs = [run_of(1000, run={"scheme": "ring", "faults": faults}) for faults in ([], ["single-buffer"])]
    assert compare_reports(runs).different == ()


def test_other_refusals():
    with pytest.raises(UsageError, match="at least two runs, found 1"):
        compare_reports([run_of(1000)])
    with pytest.raises(UsageError, match="not compared by 'colour'"):
        compare_reports([run_of(1), run_of(1)], allow_different=["colour"])
    with pytest.raises(SourceError, match=r"compare empty, which has no account of any rank: .*analyze"):
        compare_reports([run_of(1000), Report((input_row("empty.sqlite"),))])


def damaged(report, section, number, **change):
    """Return a report with a row changed, as a saved one may be."""
    rows = list(report.rows(section))
    rows[number] = {**rows[number], **change}
    return Report(report.inputs, {**report.sections, section: tuple(rows)})


def whole_run():
    work = {
        "rank": 1,
        "kind": "send_recv",
        "role": "comm",
        "name": "ncclSendRecv",
        "total_ns": 9,
        "exposed_ns": 1,
    }
    return run_of(
        1000, 1100, n_ranks=2, collectives=(work,), kernels=(work,), findings=(finding("late-launch"),)
    )


TIMES = [
    (section, name)
    for section in ("ranks", "steps", "collectives", "kernels", "findings")
    for name in whole_run().rows(section)[0]
    if name.endswith("_ns") and not name.endswith(("start_ns", "end_ns", "recoverable_ns"))
]


@pytest.mark.parametrize(("section", "name"), TIMES)
@pytest.mark.parametrize("value", [-5, float("inf"), 10**400], ids=["negative", "infinite", "huge"])
def test_times_that_no_run_has_are_refused_with_their_row(section, name, value):
    sound = whole_run()
    number = len(sound.rows(section)) - 1
    broken = damaged(sound, section, number, **{name: value})
    for runs in ([sound, broken], [broken, sound]):
        with pytest.raises(
            TraceError, match=rf"contradicts itself, row {number + 1} of {section} .*{name} .*analyze"
        ):
            compare_reports(runs)


@pytest.mark.parametrize("section", ["ranks", "steps"])
@pytest.mark.parametrize("name", ["comm_share", "exposed_comm_share", "overlap"])
@pytest.mark.parametrize("value", [-0.25, 1.5, "half"])
def test_shares_are_between_0_and_1(section, name, value):
    sound = whole_run()
    with pytest.raises(TraceError, match=rf"row 1 of {section} .* has {name} {value}"):
        compare_reports([sound, damaged(sound, section, 0, **{name: value})])


SUMMED = ("window_ns", "compute_ns", "comm_ns", "overlapped_comm_ns", "exposed_comm_ns", "exposed_copy_ns", "idle_ns",
          "transfer_ns", "peer_wait_ns")  # fmt: skip


@pytest.mark.parametrize("section", ["ranks", "steps"])
@pytest.mark.parametrize("name", SUMMED)
def test_parts_that_do_not_sum_are_refused_with_their_row(section, name):
    sound = whole_run()
    more = sound.rows(section)[-1][name] + 1
    where = r"\(rank 1\)" if section == "ranks" else r"\(rank 1, step 1, name step 1\)"
    with pytest.raises(TraceError, match=rf"row . of {section} {where} has"):
        compare_reports([sound, damaged(sound, section, -1, **{name: more})])


@pytest.mark.parametrize(
    "name", ["comm_share", "exposed_comm_share", "overlap", "peer_wait_ns", "exposed_copy_ns"]
)
def test_what_could_not_be_told_contradicts_nothing(name):
    sound = whole_run()
    assert compare_reports([sound, damaged(sound, "steps", 0, **{name: None})]).metrics


def test_a_trace_may_begin_before_its_zero_and_a_gain_be_a_loss():
    sound = whole_run()
    early = damaged(sound, "ranks", 0, window_start_ns=-9, window_end_ns=-1)
    assert compare_reports([sound, damaged(early, "findings", 0, recoverable_ns=-3)]).metrics


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*.sqlite")), ids=lambda path: path.stem)
def test_no_sample_contradicts_itself(path):
    assert cptrace.compare([cptrace.analyze(path)] * 2).metrics


def test_names_are_short_and_distinct():
    runs = [run_of(1000, path=path) for path in ("x/a.sqlite", "y/a.sqlite", "b.json.gz")]
    assert compare_reports(runs).names == ("a#1", "a#2", "b")
    runs = [run_of(1000, path=path) for path in ("nsys-2026.2.sqlite", "w0.17.pt.trace.json.gz", ".sqlite")]
    assert compare_reports(runs).names == ("nsys-2026.2", "w0.17", ".sqlite")
    assert compare_reports(runs, names=["old", "new", "newer"]).names == ("old", "new", "newer")


def test_json_is_strict_and_has_all_of_it():
    comparison = compare_reports([run_of(1000, 1000), run_of(900, 900), run_of(800, 800)])
    document = json.loads(comparison.to_json(), parse_constant=pytest.fail)
    assert document["schema"] == "cptrace.comparison/1"
    assert [run["n_steps"] for run in document["runs"]] == [2, 2, 2]
    assert [row["run"] for row in document["metrics"]] == [1] * len(METRICS) + [2] * len(METRICS)
    assert (
        comparison.to_json()
        == compare_reports([run_of(1000, 1000), run_of(900, 900), run_of(800, 800)]).to_json()
    )


def test_paths_reports_and_saved_reports_are_runs(tmp_path):
    saved = tmp_path / "base.json"
    report = cptrace.analyze(RING)
    saved.write_text(report.to_json())
    expected = cptrace.compare([report, RING]).to_json()
    assert cptrace.compare([saved, str(RING)]).metrics == cptrace.compare([RING, report]).metrics
    assert json.loads(expected)["metrics"][0]["verdict"] == "no-difference"
    with pytest.raises(SourceError, match=r"missing\.sqlite"):
        cptrace.compare([RING, tmp_path / "missing.sqlite"])
    saved.write_text('{"schema": "cptrace.report/1", "inp')
    with pytest.raises(SourceError, match=r"base\.json: not a report.*no JSON"):
        cptrace.compare([saved, RING])
    for other in ("cptrace.report/2", "cptrace.comparison/1"):
        saved.write_text(f'{{\n "schema": "{other}"}}')
        with pytest.raises(SourceError, match=rf"base\.json: not a report.*{other}"):
            cptrace.compare([RING, saved])


def test_how_to_analyse_is_not_ignored(tmp_path):
    saved = tmp_path / "base.json"
    saved.write_text(cptrace.analyze(RING).to_json())
    options = cptrace.CompareOptions(cptrace.AnalyzeOptions(scope=ScopeRequest(window=parse_window("all"))))
    with pytest.raises(UsageError, match="all these runs are reports already"):
        cptrace.compare([saved, saved], options)
    assert cptrace.compare([RING, RING], options).metrics


def test_samples_of_different_links_need_to_be_meant():
    with pytest.raises(UsageError, match=r"link_gbps: 0\.4 and 0\.1"):
        cptrace.compare([RING, SLOW])
    options = cptrace.CompareOptions(allow_different=("link_gbps",))
    comparison = cptrace.compare([RING, SLOW], options)
    assert metric(comparison, "step_ns")["verdict"] == "worse"
    assert metric(comparison, "comm_ns")["verdict"] == "higher", "more of it is not bad where it hides"
    assert metric(comparison, "compute_ns")["verdict"] == "no-difference"
    assert set(KEYS) >= {"link_gbps"}


def test_a_mended_fault_is_named_with_its_gain_and_the_prediction_holds():
    comparison = cptrace.compare([SAMPLES / "ring-single-buffer-virtual.sqlite", RING])
    (gone,) = (row for row in comparison.findings if row["status"] == "gone")
    step = metric(comparison, "step_ns")
    assert gone["code"] == "single-buffer"
    assert step["verdict"] == "better"
    assert gone["predicted_step_ns"] == pytest.approx(step["value"], rel=0.05)
    assert gone["baseline_recoverable_ns"] == pytest.approx(-step["change"], rel=0.05)
