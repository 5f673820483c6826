"""What the steps leave out is said: the window of a rank is the union of its steps, and hosts stall between them."""

from __future__ import annotations

from pathlib import Path

import cptrace
from cptrace.renderers import RenderOptions, find_renderer
from cptrace.requests import AnalyzeOptions, ScopeRequest, WindowRequest
from tests.support.tiny_export import TinyExport


def stalled(path: Path) -> Path:
    """
    host       [step 0)                       [step 1)
    stream 7       [k 100 - 300)                    [k 900 - 1000)
    """
    export = TinyExport().range("step 0", 0, 50).kernel("flash", 100, 300, launch=10)
    return export.range("step 1", 800, 850).kernel("flash", 900, 1000, launch=810).write(path)


def test_time_between_steps_is_reported_and_not_idle(tmp_path: Path) -> None:
    report = cptrace.analyze(stalled(tmp_path / "t.sqlite"))
    (row,) = report.rows("ranks")
    assert (row["window_ns"], row["idle_ns"], row["between_steps_ns"]) == (300, 0, 600)
    text = find_renderer("text").render(report, RenderOptions())
    assert "not in it: 600 ns between the steps of rank 0" in text


def test_the_whole_trace_leaves_nothing_out(tmp_path: Path) -> None:
    options = AnalyzeOptions(scope=ScopeRequest(window=WindowRequest(is_all=True)))
    report = cptrace.analyze(stalled(tmp_path / "t.sqlite"), options)
    (row,) = report.rows("ranks")
    assert (row["window_ns"], row["idle_ns"], row["between_steps_ns"]) == (900, 600, 0)
    assert "not in it" not in find_renderer("text").render(report, RenderOptions())
