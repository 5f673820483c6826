"""The comparison on a screen."""

from __future__ import annotations

import html
import re

import pytest

from cptrace.comparison import compare_reports
from cptrace.errors import RenderError
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
    lines = render(example(), RenderOptions(width=200)).splitlines()
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
    text = render(compare_reports([run, run], names=["a", "b"]), RenderOptions(width=200))
    assert "b against a: no difference in step time (+0.0 %; the steps' own spread is larger)" in text
    assert "better" not in text
    assert "worse" not in text


@pytest.mark.parametrize("width", [60, 80, 200])
def test_hostile_names_do_not_steer_the_terminal_and_lines_fit(width):
    text = render(example(), RenderOptions(width=width))
    assert "\x1b" not in text
    assert "‮" not in text
    lines = text.splitlines()
    assert [line for line in lines if "send_recv" in line]
    assert all(len(line) <= max(width, 80) for line in lines)


def test_a_long_headline_and_many_runs_fit():
    run = report_of_steps([account(1000, 700, 400, 100)] * 4)
    found = [
        finding(code) for code in ("single-buffer", "missing-event", "late-launch", "imbalance", "peer-wait")
    ]
    worse = report_of_steps([account(2000, 700, 400, 100)], findings=tuple(found))
    comparison = compare_reports([run, worse, worse], names=["b", *("a run with a name " + c for c in "xy")])
    lines = render(comparison, RenderOptions(width=80)).splitlines()
    assert max(map(len, lines)) <= 80
    assert "new: imbalance, late-launch, missing-event, peer-wait, single-buffer" in re.sub(
        r"\s+", " ", " ".join(lines)
    )
    assert "1 step)" in lines[1]


@pytest.mark.parametrize("renderer", COMPARISON_RENDERERS, ids=lambda renderer: renderer.name)
@pytest.mark.parametrize("emulated", [(True, True), (True, False), (False, False)])
def test_every_form_says_which_figures_are_no_gpus(renderer, emulated):
    """JSON has it as a field of each input, a picture as its title."""
    runs = [
        report_of_steps(
            [account(1000, 700, 400, 100)] * 2,
            device={"device_kind": "cpu-emulated", "clock": "virtual"} if is_emulated else {},
        )
        for is_emulated in emulated
    ]
    comparison = compare_reports(runs, ["one", "two"], allow_different=("device_kind",))
    options = RenderOptions(width=200, plotlyjs="cdn")
    try:
        shown = renderer.render(comparison, options)
    except RenderError as error:
        pytest.skip(str(error))
    if renderer.name == "png":
        return
    said = html.unescape(shown if isinstance(shown, str) else shown.decode())
    if renderer.name == "json":
        assert ("cpu-emulated" in said) == any(emulated)
        return
    assert ("CPU emulation, virtual clock: no figure is a GPU's" in said) == any(emulated)
    assert ("ne: CPU emulation" in said) == (emulated == (True, False)), "it says of which run"


@pytest.mark.parametrize("renderer", COMPARISON_RENDERERS, ids=lambda renderer: renderer.name)
def test_every_renderer_takes_any_comparison(renderer):
    empty = report_of_steps([account(0, 0, 0, 0)])
    for comparison in (example(), compare_reports([empty, empty, empty])):
        assert find_comparison_renderer(renderer.name).render(comparison, RenderOptions())
