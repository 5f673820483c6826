"""Text by default: one screen, the headline first, with nothing left out that a reader must know."""

from __future__ import annotations

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
    assert lines[4] == "comm 40.0 % of it, overlap 25.0 % of comm, exposed comm 30.0 % (300 ns)"
    places = [
        next(n for n, line in enumerate(lines) if word in line) for word in ("step (", "single-buffer", "█")
    ]
    assert places == sorted(places)
    assert "correlation id" not in "\n".join(lines)


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
