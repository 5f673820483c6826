"""The comparison on a screen."""

from __future__ import annotations

import re

import pytest

from cptrace.comparison import compare_reports
from cptrace.renderers import COMPARISON_RENDERERS, RenderOptions, find_comparison_renderer
from cptrace.renderers.comparison_text import render
from tests.support.reports import account, finding, report_of_steps

HOSTILE = "<script>alert('x')</script>\x1b[31m\n| `日本` ‮rtl " + "x" * 300


def example():
    """Return a single-buffer run of four steps, and the mended one."""
    kernel = {
        "rank": 0,
        "role": "comm",
        "kind": "send_recv",
        "name": HOSTILE,
        "total_ns": 4000,
        "exposed_ns": 400,
    }
    before = report_of_steps(
        [account(1_000_000, 700_000, 400_000, 100_000)] * 4,
        findings=(finding("single-buffer", recoverable_ns=200_000, predicted_step_ns=800_000),),
        kernels=(kernel,),
        collectives=(kernel,),
    )
    after = report_of_steps(
        [account(800_000, 700_000, 400_000, 300_000)] * 4,
        kernels=({**kernel, "total_ns": 8000},),
        collectives=({**kernel, "total_ns": 8000},),
        findings=(finding("late-launch", recoverable_ns=None),),
    )
    return compare_reports([before, after], names=["old", "new"])


def test_the_headline_names_the_gain_and_the_fault():
    lines = render(example(), RenderOptions()).splitlines()
    assert lines[3] == (
        "new against old: step time 1.00 ms -> 800 us (-20.0 %, better); new: late-launch; gone: single-buffer"
    )
    assert "  gone  single-buffer: 200 us was recoverable, predicted step 800 us" in lines
    assert any(
        re.fullmatch(r"step time +1\.00 ms +800 us +-20\.0 % +-- +8\.00 us +better", line) for line in lines
    )
    assert any(re.fullmatch(r"overlap +25\.0 % +75\.0 % +\+50\.0 pp .* better", line) for line in lines)


def test_equal_runs_say_so():
    run = report_of_steps([account(1000, 700, 400, 100)] * 4)
    text = render(compare_reports([run, run], names=["a", "b"]), RenderOptions())
    assert "b against a: no difference in step time (+0.0 %; the steps' own spread is larger)" in text
    assert "better" not in text
    assert "worse" not in text


@pytest.mark.parametrize("width", [60, 80, 200])
def test_hostile_names_do_not_steer_the_terminal_and_lines_fit(width):
    text = render(example(), RenderOptions(width=width))
    assert "\x1b" not in text
    assert "‮" not in text
    table = [line for line in text.splitlines() if "send_recv" in line]
    assert table
    assert all(len(line) <= max(width, 80) for line in table)


@pytest.mark.parametrize("renderer", COMPARISON_RENDERERS, ids=lambda renderer: renderer.name)
def test_every_renderer_takes_any_comparison(renderer):
    empty = report_of_steps([account(0, 0, 0, 0)])
    for comparison in (example(), compare_reports([empty, empty, empty])):
        assert find_comparison_renderer(renderer.name).render(comparison, RenderOptions())
