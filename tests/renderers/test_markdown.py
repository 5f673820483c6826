"""Reports and comparisons as Markdown, for pull requests."""

from __future__ import annotations

import pytest

import cptrace
from cptrace.comparison import compare_reports
from cptrace.outcome import NotApplicable
from cptrace.renderers import RenderOptions, find_comparison_renderer, find_renderer
from cptrace.renderers.markdown import text
from cptrace.report import Report
from tests.support.reports import account, finding, input_row, report_of_steps
from tests.support.shared_traces import ROOT


def markdown(report):
    return find_renderer("markdown").render(report, RenderOptions())


def test_a_report():
    findings = (
        finding("late-launch", recoverable_ns=None, predicted_step_ns=None, summary="hosts are late"),
        finding("single-buffer", recoverable_ns=200, predicted_step_ns=800, summary="one buffer."),
    )
    report = report_of_steps([account(1000, 700, 400, 100)], n_ranks=10, findings=findings)
    assert markdown(report).splitlines()[:16] == [
        "## Where the time goes",
        "",
        "- a.sqlite",
        "",
        "**1.00 us step (median of 1, slowest rank)**: mean of 10 ranks: comm 40.0 %, overlap 25.0 % of it, exposed"
        " 30.0 % (300 ns)",
        "",
        "### Findings",
        "",
        "- **single-buffer**. one buffer. Mending it is predicted to save 200 ns per step: 1.00 us to 800 ns (-20.0 %)."
        " 0.9 confidence. mend it.",
        "- **late-launch**. hosts are late. 0.9 confidence. mend it.",
        "",
        "### Time of each rank",
        "",
        "| rank | window | compute | comm | overlap | exposed comm | share | idle |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        "| 0 | 1.00 us | 700 ns | 400 ns | 25.0 % | 300 ns | 30.0 % | 0 ns |",
    ]
    assert markdown(report).endswith("\nand 2 more ranks\n")


def test_a_reason_is_said_once():
    report = Report(
        (input_row(),),
        not_applicable=tuple(NotApplicable(name, "no device work", ()) for name in ("steps", "streams")),
    )
    assert markdown(report).endswith("### Could not tell\n\n- steps, streams: no device work\n")


def test_an_emulated_run_says_so():
    assert "CPU emulation, virtual clock: no figure is a GPU's" in markdown(
        cptrace.analyze(ROOT / "samples/ring-virtual.sqlite")
    )


def test_a_comparison_has_its_verdict_first():
    before = report_of_steps([account(1000, 700, 400, 100)] * 4, findings=(finding("single-buffer"),))
    after = report_of_steps([account(800, 700, 400, 300)] * 4)
    shown = find_comparison_renderer("markdown").render(
        compare_reports([before, after], names=["old", "new"]), RenderOptions()
    )
    lines = shown.splitlines()
    assert (
        lines[2]
        == "**new against old**: step time 1.00 us -&gt; 800 ns (-20.0 %, better); gone: single-buffer"
    )
    assert "| metric | old | new | change | noise | verdict |" in lines
    assert "| step time | 1.00 us | 800 ns | -20.0 % | 8 ns | better |" in lines


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a|b", r"a\|b"), ("<img src=x>", "&lt;img src=x&gt;"), ("[x](y)", r"\[x\](y)"), ("`rm`", r"\`rm\`"),
        ("*b* _i_ ~s~ #1", r"\*b\* \_i\_ \~s\~ \#1"), ("a\nb", "a\N{REPLACEMENT CHARACTER}b"), ("&amp;", "&amp;amp;"),
        ("@team", "@&#8205;team"), ("https://x.y www.z", "https:&#8205;//x.y w&#8205;ww.z"), ("日本 😀", "日本 😀"),
    ],
)  # fmt: skip
def test_names_are_only_text(value, shown):
    assert text(value) == shown


def test_an_empty_report_is_short():
    assert markdown(Report((input_row("nothing.sqlite"),))) == "## Where the time goes\n\n- nothing.sqlite\n"
