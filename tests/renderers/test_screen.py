"""Text by default: one screen, the headline first, with nothing left out that a reader must know."""

from __future__ import annotations

from dataclasses import replace

import pytest

import cptrace
from cptrace.renderers import RenderOptions, find_renderer
from cptrace.report import Report
from tests.support.command_line import cptrace as command
from tests.support.reports import account, finding, input_row, report_of_steps
from tests.support.shared_traces import ROOT, nsys_traces

SAMPLES = sorted((ROOT / "samples").glob("*.sqlite"))
MAX_LINES = 60


def screen(report, width=80):
    return find_renderer("text").render(report, RenderOptions(width=width, has_details=False))


@pytest.mark.parametrize("path", [*SAMPLES, *nsys_traces()], ids=lambda path: path.name)
def test_a_screen_is_shorter_and_says_what_could_not_be_told(path):
    report = cptrace.analyze(path)
    text = screen(report)
    whole = find_renderer("text").render(report, RenderOptions())
    assert len(text.splitlines()) <= MAX_LINES
    assert max(map(len, text.splitlines())) <= 80
    for entry in report.not_applicable:
        assert entry.reason.split()[0] in text
    assert ("Could not tell" in text) is ("Could not tell" in whole)
    assert ("Mind" in text) is ("Mind" in whole)


def test_the_headline_comes_first_then_findings_then_bars():
    findings = (
        finding("single-buffer", recoverable_ns=200, predicted_step_ns=800, confidence="high", summary="one"),
    )
    report = report_of_steps([account(1000, 700, 400, 100)] * 3, n_ranks=2, findings=findings)
    lines = screen(report).splitlines()
    assert lines[3] == "1.00 us step (median of 3, slowest rank)"
    assert lines[4] == "mean of 2 ranks: comm 40.0 %, overlap 25.0 % of it, exposed 30.0 % (300 ns)"
    places = [
        next(n for n, line in enumerate(lines) if word in line) for word in ("step (", "single-buffer", "█")
    ]
    assert places == sorted(places)
    assert "correlation id" not in "\n".join(lines)


def test_shares_are_of_the_time_beside_them_only_where_one_rank_has_both():
    """Ranks of 1000 and 500 ns, of which 300 and 0 are exposed: a fifth of both, three tenths of the slowest."""
    one = report_of_steps([account(1000, 700, 400, 100)])
    assert "comm 40.0 % of it, overlap" in screen(one)
    fast = {**one.rows("ranks")[0], "rank": 1, **account(500, 500, 0, 0)}
    two = replace(one, sections={**one.sections, "ranks": (*one.rows("ranks"), fast), "steps": ()})
    text = screen(two)
    assert "1.00 us window (slowest rank)" in text
    assert "mean of 2 ranks: comm 26.7 %, overlap 25.0 % of it, exposed 20.0 % (150 ns)" in text
    assert "comm 40.0 %" not in text


@pytest.mark.parametrize("has_details", [True, False])
def test_the_headline_is_there_and_has_no_time_where_no_share_can_be_told(has_details):
    report = report_of_steps([account(1000, 0, 0, 0, is_hidden=True)])
    lines = find_renderer("text").render(report, RenderOptions(has_details=has_details)).splitlines()
    assert lines[4] == "comm n/a of it, overlap n/a of comm, exposed comm n/a"


def test_without_device_work_there_is_no_headline():
    text = screen(Report((input_row("nothing.sqlite"),)))
    assert text.splitlines() == ["nothing.sqlite", "  nsys_sqlite, 2026.2, schema 3.25"]


def test_details_are_asked_for():
    path = ROOT / "samples/ring-virtual.sqlite"
    short, full = command("analyze", path).out, command("analyze", path, "--details").out
    assert "Collectives" not in short
    assert "--details" in short
    assert "Collectives" in full
    assert len(full.splitlines()) > len(short.splitlines())
