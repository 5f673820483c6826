"""Pictures: drawn where a browser is, refused in one line where none is."""

from __future__ import annotations

import html
import json

import pytest

from cptrace import figures, tidy
from cptrace.comparison import compare_reports
from cptrace.errors import RenderError
from cptrace.renderers import COMPARISON_RENDERERS, RENDERERS, images
from cptrace.report import Report
from tests.support.browser import find_browser
from tests.support.command_line import check_refused, cptrace
from tests.support.reports import account, finding, input_row, report_of_steps
from tests.support.shared_traces import ROOT

RING = ROOT / "samples/ring-virtual.sqlite"
needs_browser = pytest.mark.skipif(
    find_browser() is None, reason="needs Chromium (apt-get install chromium-headless-shell)"
)
MAGIC = {"png": b"\x89PNG\r\n\x1a\n", "svg": b"<svg"}


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("image_format", ["png", "svg"])
def test_a_picture_of_a_report(image_format, tmp_path):
    pytest.importorskip("kaleido", reason="needs kaleido (in the extra dev)")
    target = tmp_path / f"r.{image_format}"
    done = cptrace("analyze", RING, "--format", image_format, "-o", target)
    assert (done.exit_code, done.out) == (0, ""), done.err
    data = target.read_bytes()
    assert data.startswith(MAGIC[image_format])
    assert len(data) > 5_000


@pytest.mark.slow
@needs_browser
def test_a_picture_of_a_comparison_shows_names_as_names(tmp_path):
    pytest.importorskip("kaleido", reason="needs kaleido (in the extra dev)")
    name = "<script>alert(1)</script>"
    runs = [report_of_steps([account(w, w - 20, 40, 30)] * 3) for w in (1000, 900)]
    svg = images.render_comparison(compare_reports(runs, names=[name, "b"]), "svg").decode()
    assert "<script" not in svg
    assert name in html.unescape(svg)


def test_without_a_browser(monkeypatch, tmp_path):
    pytest.importorskip("kaleido", reason="needs kaleido (in the extra dev)")
    monkeypatch.delenv("BROWSER_PATH", raising=False)
    monkeypatch.setattr(images.shutil, "which", lambda _name: None)
    done = cptrace("analyze", RING, "--format", "png", "-o", tmp_path / "r.png")
    check_refused(done, 5, "Chromium or Chrome, which was not found", "BROWSER_PATH")
    assert not (tmp_path / "r.png").exists()


@pytest.mark.parametrize("path", ["/nowhere/chrome", "/bin/true", "/etc/passwd"])
def test_what_is_no_browser_is_refused(path, monkeypatch, tmp_path):
    pytest.importorskip("kaleido", reason="needs kaleido (in the extra dev)")
    monkeypatch.setenv("BROWSER_PATH", path)
    done = cptrace("analyze", RING, "--format", "png", "-o", tmp_path / "r.png")
    check_refused(done, 5, "cannot draw a picture", path, "BROWSER_PATH")


def test_a_picture_says_that_it_is_no_gpus():
    drawn = [
        (
            "a",
            figures.findings(
                tidy.findings(report_of_steps([account(10, 10, 0, 0)], findings=(finding("x"),)))
            ),
        )
    ]
    assert "no figure is a GPU" in str(
        figures.overview(drawn, "CPU emulation: no figure is a GPU's").layout.title.text
    )
    assert figures.overview(drawn).layout.title.text is None


def test_without_the_package(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "kaleido", None)
    done = cptrace("analyze", RING, "--format", "svg", "-o", tmp_path / "r.svg")
    check_refused(done, 5, "kaleido", "pip install 'cptrace[images]'")


def test_a_picture_needs_a_file():
    check_refused(cptrace("analyze", RING, "--format", "png"), 2, "-o")
    check_refused(cptrace("compare", RING, RING, "--format", "svg"), 2, "-o")


def test_nothing_to_draw():
    with pytest.raises(RenderError, match="nothing to draw"):
        images.render(Report((input_row(),)), "png")


def test_figures_below_each_other_keep_their_legends():
    report = report_of_steps([account(100, 80, 40, 30)], n_ranks=2, findings=(finding("single-buffer"),))
    parts = [
        ("a", figures.rank_bars(tidy.rank_parts(report))),
        ("b", figures.findings(tidy.findings(report))),
    ]
    layout = json.loads(figures.overview(parts).to_json())
    assert {trace.get("legend", "legend") for trace in layout["data"]} == {"legend", "legend2"}
    assert layout["layout"]["barmode"] == "stack"
    assert [note["text"] for note in layout["layout"]["annotations"]] == ["a", "b"]


def test_pictures_are_for_files():
    from cptrace.cli.pages import PICTURES

    for registry in (RENDERERS, COMPARISON_RENDERERS):
        assert tuple(renderer.name for renderer in registry if renderer.is_binary) == PICTURES
