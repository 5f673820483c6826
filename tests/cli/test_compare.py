"""`cptrace compare` and the gates of CI."""

from __future__ import annotations

import json
from unittest import mock

import pytest

from cptrace import api
from tests.support.command_line import check_refused, cptrace
from tests.support.reports import account, finding, report_of_steps
from tests.support.shared_traces import ROOT
from tests.support.tiny_export import TinyExport

RING = ROOT / "samples/ring-virtual.sqlite"
SLOW = ROOT / "samples/ring-slow-link-virtual.sqlite"


def test_text_json_and_files(tmp_path):
    done = cptrace("compare", RING, RING)
    assert done.exit_code == 0
    assert "no difference in step time" in done.out
    target = tmp_path / "c.json"
    done = cptrace("compare", RING, SLOW, "--allow-different", "link_gbps", "--format", "json", "-o", target)
    assert (done.exit_code, done.out) == (0, "")
    assert json.loads(target.read_text())["different"] == [{"key": "link_gbps", "values": [0.4, 0.1]}]
    check_refused(cptrace("compare", RING, RING, "-o", target), 5, "--force")
    check_refused(cptrace("compare", RING, RING, "-o", RING, "--force"), 5, "input")


def test_refusals():
    check_refused(cptrace("compare", RING), 2, "at least two runs")
    check_refused(cptrace("compare"), 2, "PATH")
    check_refused(cptrace("compare", RING, SLOW), 2, "link_gbps: 0.4 and 0.1", "--allow-different link_gbps")
    check_refused(cptrace("compare", RING, RING, "--allow-different", "nose"), 2, "nose")
    check_refused(cptrace("compare", RING, "missing.sqlite"), 3, "missing.sqlite")
    check_refused(cptrace("compare", RING, RING, "--step-range", "("), 2, "regular expression")


def test_a_saved_report_that_contradicts_itself_is_refused_in_one_line(tmp_path):
    saved = json.loads(cptrace("analyze", RING, "--format", "json").out)
    saved["ranks"][2]["window_ns"] = -5
    (tmp_path / "saved.json").write_text(json.dumps(saved))
    words = ("contradicts itself", "row 3 of ranks (rank 2)", "window_ns -5", "analyze --format json")
    check_refused(cptrace("compare", RING, tmp_path / "saved.json"), 4, *words)
    check_refused(cptrace("compare", tmp_path / "saved.json", RING), 4, *words)


@pytest.mark.parametrize("is_saved", [False, True])
def test_without_device_work_whatif_and_compare_say_what_analyze_says(is_saved, tmp_path):
    """A host with ranges and no kernel, as where the GPU's counters are not accessible: the trace itself is sound."""
    path = TinyExport().range("step 0", 0, 500).write(tmp_path / "host.sqlite")
    document = json.loads(cptrace("analyze", path, "--format", "json").out)
    reason = next(row["reason"] for row in document["not_applicable"] if row["analysis"] == "account")
    (tmp_path / "host.json").write_text(json.dumps(document))
    compared = tmp_path / "host.json" if is_saved else path
    check_refused(cptrace("compare", RING, compared), 3, "cannot compare host", reason)
    check_refused(cptrace("compare", compared, RING), 3, "cannot compare host", reason)
    for change in (("--fix", "single-buffer"), ("--scale-compute", 2)):
        check_refused(cptrace("whatif", path, *change), 3, "cannot predict step times", reason)


def test_a_condition_that_holds_stops_after_the_output():
    arguments = ("compare", RING, SLOW, "--allow-different", "link_gbps")
    done = cptrace(*arguments, "--fail-if", "exposed_comm_share > +5%", "--fail-if", "compute_ns > +5%")
    assert done.exit_code == 10
    assert "worse" in done.out
    assert done.err == (
        "cptrace: ring-slow-link-virtual: exposed_comm_share is 44.6 %, was 5.3 %; 'exposed_comm_share > +5%' holds\n"
    )
    assert cptrace(*arguments, "--fail-if", "compute_ns > +5%").exit_code == 0


def test_a_condition_is_read_before_any_file():
    check_refused(cptrace("compare", "a", "b", "--fail-if", "speed > 5"), 2, "speed")


@pytest.mark.parametrize(
    ("codes", "exit_code"), [("single-buffer", 10), ("peer-wait,single-buffer", 10), ("padding", 0)]
)
def test_fail_on_stops_after_the_report(codes, exit_code):
    report = report_of_steps([account(10, 10, 0, 0)], findings=(finding("single-buffer"),))
    with mock.patch.object(api, "analyze_readings", return_value=report):
        done = cptrace("analyze", RING, "--format", "json", "--fail-on", codes)
    assert done.exit_code == exit_code
    assert json.loads(done.out)["findings"][0]["code"] == "single-buffer"
    if exit_code:
        assert done.err.startswith("cptrace: found single-buffer in ")
        assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("asked", "exit_code"),
    [("missing-event:race", 10), ("missing-event", 10), ("missing-event:host-sync", 0), ("padding", 0)],
)
def test_fail_on_a_form_stops_at_it_alone(asked, exit_code):
    report = report_of_steps([account(10, 10, 0, 0)], findings=(finding("missing-event", form="race"),))
    with mock.patch.object(api, "analyze_readings", return_value=report):
        done = cptrace("analyze", RING, "--format", "json", "--fail-on", asked)
    assert done.exit_code == exit_code
    assert done.err.startswith(f"cptrace: found {asked} in " if exit_code else "")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("typo", ("'typo'", "shared-stream")),
        ("", ("names no code", "shared-stream")),
        ("missing-event:typo", ("--fail-on missing-event:typo", "host-sync, race")),
    ],
)
def test_fail_on_knows_codes_and_forms_before_any_file(asked, words):
    check_refused(cptrace("analyze", "missing.sqlite", "--fail-on", asked), 2, *words)


def test_a_gate_that_could_never_stop_is_refused():
    done = cptrace("analyze", RING, "--no-findings", "--fail-on", "single-buffer")
    check_refused(done, 2, "--fail-on", "--no-findings")


@pytest.mark.parametrize("verb", ["analyze", "compare"])
def test_pages_and_what_lies_beside_them(verb, tmp_path):
    files = (RING,) if verb == "analyze" else (RING, RING)
    target = tmp_path / "p.html"
    done = cptrace(verb, *files, "--format", "html", "-o", target, "--plotlyjs", "directory")
    assert (done.exit_code, done.out) == (0, ""), done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.html", "plotly.min.js"]
    assert '<script src="plotly.min.js"' in target.read_text()
    again = cptrace(verb, *files, "--format", "html", "-o", tmp_path / "q.html", "--plotlyjs", "directory")
    assert again.exit_code == 0, "the same file may be there already"
    (tmp_path / "plotly.min.js").write_text("mine")
    check_refused(
        cptrace(verb, *files, "--format", "html", "-o", tmp_path / "z.html", "--plotlyjs", "directory"),
        5,
        "plotly.min.js",
    )
    assert (tmp_path / "plotly.min.js").read_text() == "mine"
    check_refused(cptrace(verb, *files, "--format", "html", "--plotlyjs", "directory"), 2, "-o")
    check_refused(cptrace(verb, *files, "--open"), 2, "--format html")
    check_refused(cptrace(verb, *files, "--plotlyjs", "cdn"), 2, "--plotlyjs", "--format html")


def test_open_shows_the_page(tmp_path):
    target = tmp_path / "p.html"
    with mock.patch("webbrowser.open", return_value=True) as shown:
        assert cptrace("analyze", RING, "--format", "html", "-o", target, "--open").exit_code == 0
    shown.assert_called_once_with(target.resolve().as_uri())
    with mock.patch("webbrowser.open", return_value=False):
        done = cptrace("analyze", RING, "--format", "html", "-o", target, "--open", "--force")
    assert done.exit_code == 5
    assert "no browser was found" in done.err
