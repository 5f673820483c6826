"""The page in a real browser: what it shows, what it asks for, and that the timeline can be moved about in."""

from __future__ import annotations

import pytest

import cptrace
from cptrace.renderers import RenderOptions, find_comparison_renderer, find_renderer
from cptrace.requests import AnalyzeOptions
from tests.support.browser import browsing
from tests.support.shared_traces import ROOT
from tests.support.synthetic_nsys import write_synthetic
from tests.support.tiny_export import TinyExport

pytestmark = pytest.mark.slow
SAMPLES = ROOT / "samples"
HOSTILE = (
    "<script>window.hacked=1;alert('hacked')</script>",
    '</script><img src=x onerror="window.hacked=1">\'"`${1}',
    "x" * 10_000,
    "\U0001f600 日本語 ‮ltr‬ שלום عربى",
    "<b>&amp;</b> <a href='https://example.com'>%{y}</a> a\nb\x00\x1b[31m",
    "-->]]> </style> </title> \\u003cscript\\u003e {{7*7}}",
)


def write_page(traces, path):
    report = cptrace.analyze(traces, AnalyzeOptions(has_timeline=True))
    path.write_text(find_renderer("html").render(report, RenderOptions()), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def visit():
    with browsing() as open_page:
        yield open_page


@pytest.fixture(scope="module")
def sample_page(tmp_path_factory):
    return write_page(SAMPLES / "ring-causal-virtual.sqlite", tmp_path_factory.mktemp("page") / "sample.html")


@pytest.fixture(scope="module")
def one_rank_page(tmp_path_factory):
    """The fewest bars that there can be: all that a legend of four lines has for room."""
    folder = tmp_path_factory.mktemp("one")
    write_synthetic(folder / "one.sqlite", 400, 420, 80, n_processes=1)
    return write_page(folder / "one.sqlite", folder / "one.html")


@pytest.fixture(scope="module")
def large_page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    write_synthetic(folder / "large.sqlite", 100_000, 105_000, 20_000, n_processes=4)
    return write_page(folder / "large.sqlite", folder / "large.html")


def first_paint_ms(seen):
    return seen.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", ["sample_page", "large_page"])
def test_it_opens_quietly_offline_and_fits(page, scheme, width, visit, request):
    seen = visit(request.getfixturevalue(page), width, color_scheme=scheme, offline=True)
    seen.draw_all()
    assert seen.errors == []
    assert seen.requests == []
    assert seen.evaluate("document.documentElement.scrollWidth") <= width
    assert seen.evaluate("document.querySelectorAll('.figure svg.main-svg').length") > 3
    assert first_paint_ms(seen) < 2000, "the promise is two seconds; it takes a tenth of that"
    background = seen.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") is (scheme == "light")


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_of_a_comparison(width, visit, tmp_path):
    runs = [SAMPLES / "ring-single-buffer-virtual.sqlite", SAMPLES / "ring-virtual.sqlite"]
    page = tmp_path / "compare.html"
    page.write_text(
        find_comparison_renderer("html").render(cptrace.compare(runs), RenderOptions()), encoding="utf-8"
    )
    seen = visit(page, width)
    seen.draw_all()
    assert (seen.errors, seen.requests) == ([], [])
    assert seen.evaluate("document.documentElement.scrollWidth") <= width
    heights = "[...document.querySelectorAll('section > .scroll td')].map(e => e.offsetHeight)"
    assert max(seen.evaluate(heights)) < 80, "no word is broken letter by letter"


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("page", ["sample_page", "one_rank_page"])
def test_no_label_is_cut_or_lies_on_another(page, width, visit, request):
    """Boxes of labels and legend entries of each figure lie within it, do not overlap, and lie on no bar."""
    seen = visit(request.getfixturevalue(page), width)
    seen.draw_all()
    problems = seen.evaluate(
        """(() => {
          const found = [];
          for (const figure of document.querySelectorAll('.figure')) {
            const outer = figure.getBoundingClientRect();
            const bars = [...figure.querySelectorAll('.bars .point path')].map((e) => e.getBoundingClientRect());
            for (const words of figure.querySelectorAll('.legendtext, .bartext')) {
              const a = words.getBoundingClientRect();
              if (bars.some((b) => b.width > 1 && a.left < b.right - 1 && b.left < a.right - 1
                                   && a.top < b.bottom - 1 && b.top < a.bottom - 1))
                found.push(figure.id + ' has words on a bar: ' + words.textContent);
            }
            for (const group of ['.xtick text', '.ytick text', '.legendtext', '.bartext']) {
              const boxes = [...figure.querySelectorAll(group)].map((e) => e.getBoundingClientRect());
              boxes.forEach((a, i) => {
                if (a.left < outer.left - 1 || a.right > outer.right + 1 || a.bottom > outer.bottom + 1)
                  found.push(figure.id + ' cuts ' + group);
                boxes.slice(i + 1).forEach((b) => {
                  if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1)
                    found.push(figure.id + ' overlaps ' + group);
                });
              });
            }
          }
          return found;
        })()"""
    )
    assert problems == []


def test_zoom_pan_and_hover(visit, large_page):
    seen = visit(large_page)
    whole = seen.timeline()
    assert whole["inView"] == whole["all"] > 100_000
    assert whole["merged"] > 90_000
    assert "drawn together" in seen.page.inner_text("#timeline-status")
    for _ in range(9):
        seen.page.click("#zoom-in")
    zoomed = seen.timeline()
    assert zoomed["to"] - zoomed["from"] == pytest.approx((whole["to"] - whole["from"]) / 2**9)
    assert zoomed["inView"] < 2_000
    assert "off screen" in seen.page.inner_text("#timeline-status")
    seen.page.locator("#timeline").hover(position={"x": 640, "y": 36})
    box = seen.page.locator("#timeline").bounding_box()
    x, y = box["x"] + 640, box["y"] + 36
    assert "compute" in seen.page.inner_text("#tip")
    assert "rank 0, stream 7" in seen.page.inner_text("#tip")
    seen.page.mouse.down()
    seen.page.mouse.move(x - 100, y, steps=4)
    seen.page.mouse.up()
    panned = seen.timeline()
    assert panned["from"] > zoomed["from"]
    assert panned["to"] - panned["from"] == pytest.approx(zoomed["to"] - zoomed["from"])
    seen.page.keyboard.down("Control")
    seen.page.mouse.wheel(0, -100)
    seen.page.keyboard.up("Control")
    assert seen.timeline()["to"] - seen.timeline()["from"] < panned["to"] - panned["from"]
    seen.page.select_option("#timeline-rank", "2")
    assert seen.timeline()["all"] == pytest.approx(whole["all"] / 4)
    assert seen.errors == []


def test_the_timeline_by_keyboard(visit, sample_page):
    seen = visit(sample_page)
    whole = seen.timeline()
    seen.page.focus("#timeline")
    for key in ("ArrowDown", "n", "n", "Enter"):
        seen.page.keyboard.press(key)
    chosen = seen.timeline()
    assert chosen["to"] - chosen["from"] < (whole["to"] - whole["from"]) / 4
    assert "rank 0, stream 7" in seen.page.inner_text("#timeline-selected")
    for key in ("-", "ArrowRight", "+", "ArrowLeft", "Home"):
        seen.page.keyboard.press(key)
    assert seen.timeline() == pytest.approx(whole)
    seen.page.keyboard.press("Escape")
    assert seen.page.inner_text("#timeline-selected") == ""


def test_everything_can_be_reached_by_keyboard(visit, sample_page):
    seen = visit(sample_page)
    reached = set()
    for _ in range(200):
        seen.page.keyboard.press("Tab")
        reached.add(seen.evaluate("document.activeElement.id || document.activeElement.tagName"))
        if "timeline" in reached and "SUMMARY" in reached:
            break
    assert {"timeline", "timeline-rank", "zoom-in", "SUMMARY", "BUTTON"} <= reached


def test_evidence_jumps_to_the_timeline(visit, sample_page):
    seen = visit(sample_page)
    button = seen.page.locator("button[data-start]").first
    start = int(button.get_attribute("data-start"))
    button.click()
    shown = seen.timeline()
    origin = int(seen.evaluate("JSON.parse(document.getElementById('timeline-data').textContent).origin"))
    assert shown["from"] <= start - origin <= shown["to"]
    said = seen.page.inner_text("#timeline-selected")
    assert f"rank {button.get_attribute('data-rank')}, stream {button.get_attribute('data-stream')}" in said
    assert f"{start:,} ns of the trace" in said


def test_hostile_names_are_only_names(visit, tmp_path):
    export = TinyExport()
    for number, name in enumerate(HOSTILE):
        export.kernel(name, 100 * number, 100 * number + 90, launch=100 * number + 1)
        export.kernel("ncclDevKernel_SendRecv" + name, 100 * number, 100 * number + 95, stream=9)
    seen = visit(write_page(export.write(tmp_path / "<b onload=1>.sqlite"), tmp_path / "hostile.html"), 390)
    seen.draw_all()
    for _ in HOSTILE:
        seen.page.locator("#timeline").hover(position={"x": 200, "y": 36})
        seen.page.click("#zoom-in")
    assert seen.evaluate("window.hacked") is None
    assert seen.evaluate("document.querySelectorAll('img, iframe, a[href^=http]').length") == 0
    assert seen.evaluate("document.querySelectorAll('script:not([type]), script[src]').length") == 3
    assert seen.errors == []
    assert seen.requests == []
    assert seen.evaluate("document.documentElement.scrollWidth") <= 390


def test_in_grey_parts_differ_in_lightness(visit, sample_page):
    """The colours of roles, as grey, are at least a tenth of the scale apart."""
    from cptrace.figures import COLOURS

    greys = {
        name: sum(w * int(colour[i : i + 2], 16) for w, i in ((0.299, 1), (0.587, 3), (0.114, 5)))
        for name, colour in COLOURS.items()
    }
    assert greys["idle"] - greys["comm"] > 25
    assert greys["comm"] - greys["compute"] > 25
