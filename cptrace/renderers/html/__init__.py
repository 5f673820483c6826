"""Renderer `html`: one page that explains a trace, works offline and lets nothing of a trace run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pandas as pd

from cptrace import __version__, figures, tidy
from cptrace.comparison import Comparison
from cptrace.renderers.base import RenderOptions
from cptrace.renderers.html import comparison_sections, sections
from cptrace.renderers.html.charts import CHARTS, Chart
from cptrace.renderers.html.markup import section, table, text
from cptrace.renderers.html.page import Data, dump, escape_json, make_page
from cptrace.renderers.html.timeline_data import timeline_data
from cptrace.report import Report

_MAX_TABLE_ROWS: Final = 60


def render(report: Report, options: RenderOptions) -> str:
    """Return the page of a report.

    Args:
        report: Report to show; with a timeline where it has one.
        options: Where plotly.js comes from.
    """
    charts = {chart.identifier: _chart(chart, report) for chart in CHARTS}
    drawn = {key: part for key, part in charts.items() if part is not None}
    body = {key: part[0] for key, part in drawn.items()}
    data = [part[1] for part in drawn.values()]
    has_timeline = report.timeline is not None and bool(report.timeline.lanes)
    if report.timeline is not None and has_timeline:
        data.append(Data("timeline-data", dump(timeline_data(report.timeline))))
    small = "".join(body[key] for key in body if key != "rank-bars")
    content = [
        sections.header(report),
        sections.headline(report),
        section("findings", "Findings", sections.findings(report)),
        _timeline_section(report) if has_timeline else "",
        section("ranks", "Time of each rank", body.get("rank-bars", ""), sections.ranks(report)),
        section("figures", "In figures", f'<div class="grid">{small}</div>' if small else ""),
        section("collectives", "Collectives, all ranks", sections.collectives(report)),
        section("kernels", "Longest device work, all ranks", sections.kernels(report)),
        section("doubts", "What could not be told, and what to mind", sections.doubts(report)),
    ]
    scripts = [*(["timeline.js"] if has_timeline else []), *(["figures.js"] if drawn else [])]
    return make_page(
        _title(report), _body(content), data, scripts, has_figures=bool(drawn), plotlyjs=options.plotlyjs
    )


def render_comparison(comparison: Comparison, options: RenderOptions) -> str:
    """Return the page of a comparison.

    Args:
        comparison: Runs side by side.
        options: Where plotly.js comes from.
    """
    frame = tidy.comparison_metrics(comparison)
    charts = [
        _figure(f"compare-{unit}", title, "", figures.comparison(frame, unit), frame[frame["unit"] == unit])
        for unit, title in (("ns", "Times"), ("fraction", "Shares"))
        if (frame["unit"] == unit).any()
    ]
    content = [
        comparison_sections.header(comparison),
        *comparison_sections.runs(comparison),
        section(
            "figures", "Side by side", f'<div class="grid">{"".join(chart[0] for chart in charts)}</div>'
        ),
    ]
    return make_page(
        f"cptrace: {', '.join(comparison.names)}",
        _body(content),
        [chart[1] for chart in charts],
        ["figures.js"],
        has_figures=bool(charts),
        plotlyjs=options.plotlyjs,
    )


def summary(report: Report) -> str:
    """Return the headline, findings and account of each rank as HTML of no script, for notebooks.

    Args:
        report: Report to show.
    """
    content = [
        sections.header(report),
        sections.headline(report),
        sections.findings(replace(report, timeline=None)),
        sections.ranks(report),
    ]
    return f'<div class="cptrace">{"".join(content)}</div>'


def _title(report: Report) -> str:
    return "cptrace: " + ", ".join(str(row["path"]).rsplit("/", 1)[-1] for row in report.inputs)


def _body(content: list[str]) -> str:
    return (
        "<main>" + "".join(content) + "</main>\n"
        f"<footer>Made by cptrace {text(__version__)}. Times are exact; shares are of unions, so nothing is counted"
        " twice.</footer>"
    )


def _chart(chart: Chart, report: Report) -> tuple[str, Data] | None:
    frame = chart.frame(report)
    if frame.empty:
        return None
    title = "" if chart.identifier == "rank-bars" else chart.title
    return _figure(chart.identifier, title, chart.caption, chart.draw(frame), frame)


def _figure(identifier: str, title: str, caption: str, drawn: Any, frame: pd.DataFrame) -> tuple[str, Data]:
    """Return a figure with its numbers as a table, and its data."""
    rows = frame.head(_MAX_TABLE_ROWS)
    lines = [[text(value) for value in row] for row in rows.to_numpy(dtype=object).tolist()]
    rest = len(frame) - len(rows)
    more = f'<p class="muted">and {rest} more rows; --format json has all</p>' if rest > 0 else ""
    heading = f"<h3>{text(title)}</h3>" if title else ""
    height = drawn.layout.height or 360
    return (
        f"<div>{heading}<figure><div class='figure' id='{identifier}' role='img' aria-label='{text(title or caption)}'"
        f" style='height:{int(height)}px'></div><figcaption>{text(caption)}</figcaption></figure>"
        f"<details><summary>the numbers</summary>{table([str(c) for c in frame.columns], lines)}{more}</details></div>",
        Data(f"{identifier}-data", escape_json(drawn.to_json())),
    )


def _timeline_section(report: Report) -> str:
    lanes = report.timeline.lanes if report.timeline is not None else ()
    ranks = "".join(
        f'<option value="{rank}">rank {rank}</option>' for rank in sorted({lane.rank for lane in lanes})
    )
    buttons = "".join(
        f'<button type="button" id="{key}">{label}</button>'
        for key, label in (
            ("zoom-in", "zoom in"), ("zoom-out", "zoom out"), ("zoom-all", "all"),
            ("pan-left", "← earlier"), ("pan-right", "later →"),
        )
    )  # fmt: skip
    legend = "".join(
        f'<li><span class="swatch {role}"></span>{role}</li>' for role in ("compute", "comm", "copy", "other")
    )
    if report.timeline is not None and report.timeline.steps:
        legend += '<li class="muted">dotted lines: steps</li>'
    return (
        '<section id="timeline-section" aria-labelledby="timeline-title"><h2 id="timeline-title">Timeline</h2>'
        f'<div class="toolbar"><label>show <select id="timeline-rank"><option value="all">all ranks</option>{ranks}'
        f"</select></label>{buttons}</div>"
        f'<ul class="legend">{legend}</ul>'
        '<div id="lanes"><div class="canvas-holder"><canvas id="timeline" tabindex="0" role="application"'
        ' aria-label="Timeline of streams" aria-describedby="timeline-keys timeline-status"></canvas></div>'
        '<div id="lanes-spacer"></div></div>'
        '<p class="hint" id="timeline-status" role="status"></p>'
        '<p class="hint" id="timeline-keys">Drag or ← → to move, + and - (or Ctrl and wheel, or double click) to zoom,'
        " Home for all; ↑ ↓ choose a stream, n and p the next and previous operation, Enter zooms to it.</p>"
        '<p id="timeline-selected" aria-live="polite"></p><div id="tip" hidden></div></section>\n'
    )
