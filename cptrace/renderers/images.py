"""Renderers `png` and `svg`: the figures of a report as one picture, where a browser can draw it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from cptrace import figures, tidy
from cptrace.comparison import Comparison
from cptrace.errors import RenderError
from cptrace.renderers import comparison_text as words
from cptrace.renderers.drawing import BrowserError, draw
from cptrace.report import Report, emulation

if TYPE_CHECKING:
    import pandas as pd

BROWSERS: Final = (
    "chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable",
)  # fmt: skip
_WIDTH_PX: Final = 1100
_SCALE: Final = {"png": 2, "svg": 1}
_HOW: Final = "install one (apt-get install chromium-headless-shell) or name its path in BROWSER_PATH"


def render(report: Report, image_format: str) -> bytes:
    """Return the figures of a report as a picture: each rank's time, overlap per step, start causes, findings.

    Args:
        report: Report to show.
        image_format: `png` or `svg`.

    Raises:
        RenderError: There is nothing to draw, or nothing to draw it with.
    """
    charts = (
        ("Time of each rank", tidy.rank_parts(report), figures.rank_bars),
        ("What mending a finding saves per step", tidy.findings(report), figures.findings),
        ("Why operations started when they did", tidy.start_causes(report), figures.start_causes),
        ("Overlap per step", tidy.step_overlap(report), figures.step_overlap),
    )
    return _draw(charts, image_format, emulation(report.inputs))


def render_comparison(comparison: Comparison, image_format: str) -> bytes:
    """Return the metrics of runs side by side as a picture.

    Args:
        comparison: Runs side by side.
        image_format: `png` or `svg`.

    Raises:
        RenderError: There is nothing to draw, or nothing to draw it with.
    """
    frame = tidy.comparison_metrics(comparison)
    charts = [
        (title, frame[frame["unit"] == unit], lambda rows, unit=unit: figures.comparison(rows, unit))
        for unit, title in (("ns", "Times per step"), ("fraction", "Shares"))
    ]
    return _draw(charts, image_format, "; ".join(words.emulated(comparison)))


def _draw(charts: Sequence[tuple[str, pd.DataFrame, Any]], image_format: str, note: str) -> bytes:
    drawn = [(title, make(frame)) for title, frame, make in charts if not frame.empty]
    if not drawn:
        raise RenderError("there is nothing to draw: no rank did any device work; --format text says why")
    figure = figures.overview(drawn, note)
    options = {
        "format": image_format, "width": _WIDTH_PX, "height": int(figure.layout.height), "scale": _SCALE[image_format]
    }  # fmt: skip
    return _with_browser(figure, options)


def _with_browser(figure: Any, options: dict[str, Any]) -> bytes:
    """Return the picture that a browser draws of a figure."""
    if find_spec("kaleido") is None:
        raise RenderError(
            "cannot draw a picture: it needs the package kaleido; pip install 'cptrace[images]'"
        )
    path = find_browser()
    if path is None:
        raise RenderError(f"cannot draw a picture: it needs Chromium or Chrome, which was not found; {_HOW}")
    if shutil.which(path) is None:
        raise RenderError(f"cannot draw a picture: BROWSER_PATH names {path}, which is no program; {_HOW}")
    try:
        return draw(figure.to_json(), options, path)
    except BrowserError as error:
        raise RenderError(
            f"cannot draw a picture: the browser {path} does not run ({error}); {_HOW}"
        ) from error


def find_browser() -> str | None:
    """Return the path of a browser that can draw, None where there is none."""
    asked = os.environ.get("BROWSER_PATH")
    return asked or next((path for name in BROWSERS if (path := shutil.which(name))), None)
