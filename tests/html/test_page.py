"""The page as text: what is in it, what is not, and where plotly.js comes from."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re

import pytest

import cptrace
from cptrace.comparison import compare_reports
from cptrace.errors import UsageError
from cptrace.renderers import RenderOptions, find_comparison_renderer, find_renderer
from cptrace.report import Report
from cptrace.requests import AnalyzeOptions
from tests.support.reports import account, finding, input_row, report_of_steps
from tests.support.shared_traces import ROOT, nsys_traces

TRACES = [*nsys_traces(), *sorted((ROOT / "samples").glob("*.sqlite"))]
CDN = RenderOptions(plotlyjs="cdn")


def page_of(report, options=CDN):
    return find_renderer("html").render(report, options)


def evidence(name="k", **fields):
    row = {
        "what": "waits",
        "name": name,
        "rank": 0,
        "stream": 7,
        "start_ns": 5,
        "end_ns": 9,
        "correlation_id": None,
    }
    return {**row, **fields}


class Outline(html.parser.HTMLParser):
    """Notes tags that are open at the end, and ids that occur twice."""

    VOID = frozenset({"meta", "link", "br", "img", "input"})

    def __init__(self, text):
        super().__init__()
        self.open, self.ids = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.ids += [value for key, value in attrs if key == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def check_outline(text):
    outline = Outline(text)
    assert outline.open == []
    assert len(outline.ids) == len(set(outline.ids))


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_every_trace_makes_a_page(path):
    report = cptrace.analyze(path, AnalyzeOptions(has_timeline=True))
    text = page_of(report)
    check_outline(text)
    assert text == page_of(cptrace.analyze(path, AnalyzeOptions(has_timeline=True))), "the same bytes again"
    assert text.isprintable() or "\x1b" not in text
    for holder in re.findall(r'<script type="application/json" id="([^"]+)">(.*?)</script>', text, re.DOTALL):
        json.loads(holder[1])


def test_an_empty_report_makes_a_page_that_says_why():
    report = Report(
        (input_row("nothing.sqlite"),),
        not_applicable=cptrace.analyze(ROOT / "samples/ring-paced.sqlite").not_applicable,
    )
    text = page_of(report)
    check_outline(text)
    assert "nothing.sqlite" in text
    for absent in ("Findings", "Timeline", "In figures", 'class="cards"'):
        assert absent not in text


def test_the_headline_and_the_top_finding():
    findings = (
        finding("late-launch", recoverable_ns=5, predicted_step_ns=995),
        finding("single-buffer", recoverable_ns=200_000, predicted_step_ns=800_000, severity="warning"),
    )
    text = page_of(report_of_steps([account(1_000_000, 700_000, 400_000, 100_000)] * 3, findings=findings))
    cards = re.search(r'<ul class="cards">(.*?)</ul>', text).group(1)
    assert [re.sub("<[^>]+>", "|", card).strip("|").replace("||", "|") for card in cards.split("</li>")][
        :-1
    ] == [
        "step time|1.00 ms|median of 3 steps, slowest rank",
        "communication share|40.0 %|of a step some communication runs",
        "overlap|25.0 %|of it runs beside compute",
        "exposed communication|30.0 %|300 us, of a step nothing but communication runs: its cost",
        "top finding|single-buffer|Mending it is predicted to save 200 us per step: 1.00 ms to 800 us (-20.0 %)",
    ]
    assert text.index("single-buffer") < text.index("late-launch")


def test_without_steps_nothing_is_of_a_step():
    run = report_of_steps(
        [account(1_000_000, 700_000, 400_000, 100_000)], findings=(finding("single-buffer"),)
    )
    assert "one step, slowest rank" in page_of(run)
    sections = {section: run.rows(section) for section in ("ranks", "findings")}
    whole = Report(run.inputs, sections)
    for name in ("html", "markdown"):
        shown = find_renderer(name).render(whole, CDN)
        words = re.sub("<[^>]+>", " ", shown.split("<main>")[-1].split("Time of each rank")[0])
        assert "step" not in words.replace(whole.rows("findings")[0]["advice"], "")
        assert "of the window" in words


def test_a_finding_that_makes_results_wrong_comes_first():
    findings = (
        finding("single-buffer", recoverable_ns=200_000),
        finding("missing-event", form="race", severity="error", recoverable_ns=None, predicted_step_ns=None),
    )
    text = page_of(report_of_steps([account(1000, 700, 400, 100)], findings=findings))
    assert "Results may be wrong" in text
    assert text.index("missing-event (race)") < text.index("single-buffer")


def test_evidence_has_a_button_only_where_there_is_a_timeline(tmp_path):
    whole = cptrace.analyze(ROOT / "samples/ring-virtual.sqlite", AnalyzeOptions(has_timeline=True))
    sections = {
        **whole.sections,
        "findings": (finding("single-buffer", evidence=[evidence(), evidence(rank=None)]),),
    }
    with_timeline = page_of(Report(whole.inputs, sections, timeline=whole.timeline))
    without = page_of(Report.from_json(Report(whole.inputs, sections).to_json()))
    assert with_timeline.count('<button type="button" data-rank') == 1
    assert "data-start=" not in without
    assert "Evidence" in without


def test_names_are_escaped():
    name = "</script><script>alert(1)</script>\x1b\u202e"
    findings = (finding(name, advice=name, summary=name, evidence=[evidence(name)]),)
    row = {"rank": 0, "role": "comm", "kind": name, "name": name, "count": 1, "total_ns": 5, "longest_ns": 5,
           "busy_ns": 5, "overlapped_ns": 0, "exposed_ns": 5, "bytes": None, "bytes_per_s": None}  # fmt: skip
    causes = ({"rank": 0, "role": name, "cause": name, "count": 1, "exposed_ns": 3},)
    report = report_of_steps(
        [account(1000, 700, 400, 100)], path=name, run={"scheme": name}, findings=findings, kernels=(row,),
        collectives=(row,), start_causes=causes,
    )  # fmt: skip
    for text in (
        page_of(report),
        find_comparison_renderer("html").render(compare_reports([report, report]), CDN),
    ):
        assert "alert(1)</script>" not in text
        assert "\x1b" not in text
        assert "\u202e" not in text
        check_outline(text)


@pytest.mark.parametrize("plotlyjs", ["inline", "directory", "cdn"])
def test_where_plotly_comes_from(plotlyjs):
    report = report_of_steps([account(1000, 700, 400, 100)])
    text = page_of(report, RenderOptions(plotlyjs=plotlyjs))
    sources = re.findall(r'<script src="([^"]+)"', text)
    assert (len(text) > 2_000_000) is (plotlyjs == "inline")
    expected = {"inline": [], "directory": ["plotly.min.js"]}
    if plotlyjs == "cdn":
        assert re.fullmatch(r"https://cdn\.plot\.ly/plotly-[0-9.]+\.min\.js", sources[0])
        assert 'integrity="sha256-' in text
    else:
        assert sources == expected[plotlyjs]
    assert "http" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL).replace(
        "http-equiv", ""
    ).replace(sources[0] if plotlyjs == "cdn" else "\0", "")


def test_only_the_scripts_of_the_page_may_run():
    text = page_of(report_of_steps([account(1000, 700, 400, 100)]), RenderOptions())
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text).group(1)
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(scripts) == 2
    assert all(f"'sha256-{digest}'" in policy for digest in digests)
    assert "script-src" in policy
    assert "'unsafe-inline'" not in policy.split("script-src")[1].split(";")[0]
    assert policy.startswith("default-src 'none'")


def test_an_unknown_place_of_plotly():
    with pytest.raises(UsageError, match="inline, directory, cdn"):
        page_of(report_of_steps([account(1000, 700, 400, 100)]), RenderOptions(plotlyjs="nowhere"))


def test_the_page_of_a_comparison():
    before = report_of_steps(
        [account(1_000_000, 700_000, 400_000, 100_000)] * 4, findings=(finding("single-buffer"),)
    )
    after = report_of_steps([account(800_000, 700_000, 400_000, 300_000)] * 4)
    text = find_comparison_renderer("html").render(
        compare_reports([before, after], names=["old", "new"]), CDN
    )
    check_outline(text)
    assert "new against old: " not in text
    assert "new against old</h2>" in text
    assert "step time 1.00 ms -&gt; 800 us (-20.0 %, better); gone: single-buffer" in text
    assert 'id="compare-ns-data"' in text
    assert 'id="compare-fraction-data"' in text
