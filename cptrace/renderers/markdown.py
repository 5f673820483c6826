"""Renderer `markdown`: a summary for a pull request."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from cptrace.comparison import Comparison
from cptrace.labels import CPU_EMULATED
from cptrace.names import finding_name, function_name
from cptrace.renderers import comparison_text as words
from cptrace.renderers.base import RenderOptions
from cptrace.renderers.headline_text import headline
from cptrace.report import Report, Row
from cptrace.tidy import by_gain, gain
from cptrace.units import format_fraction, format_ns

_MAX_ROWS: Final = 8
_MAX_NAME: Final = 80


def render(report: Report, _options: RenderOptions) -> str:
    """Return the report as Markdown: files, findings, the account of each rank.

    Args:
        report: Report to show.
    """
    lines = ["## Where the time goes", "", *_inputs(report)]
    if said := [text(line.plain.strip()) for line in headline(report)]:
        lines += ["", f"**{said[0]}**: {'; '.join(said[1:])}"]
    if findings := by_gain(report.rows("findings")):
        has_steps = bool(report.rows("steps"))
        lines += [
            "",
            "### Findings",
            "",
            *(_finding(row, gain(row, has_steps=has_steps)) for row in findings),
        ]
    if ranks := report.rows("ranks"):
        columns = ("rank", "window", "compute", "comm", "overlap", "exposed comm", "share", "idle")
        lines += [
            "",
            "### Time of each rank",
            "",
            *_table(columns, [_rank(row) for row in ranks[:_MAX_ROWS]]),
        ]
        lines += _rest(len(ranks), "ranks")
    if entries := report.not_applicable:
        lines += ["", "### Could not tell", ""]
        by_reason: dict[str, list[str]] = {}
        for entry in entries:
            by_reason.setdefault(entry.reason, []).append(entry.analysis)
        lines += [f"- {text(', '.join(names))}: {text(reason)}" for reason, names in by_reason.items()]
    return "\n".join(lines) + "\n"


def render_comparison(comparison: Comparison, _options: RenderOptions) -> str:
    """Return the comparison as Markdown, its verdict first.

    Args:
        comparison: Runs side by side.
    """
    lines = ["## What differs between runs", ""]
    for run in range(1, len(comparison.names)):
        names = f"{text(comparison.names[run])} against {text(comparison.names[0])}"
        lines.append(f"**{names}**: {text(words.headline(comparison, run))}")
        lines.append("")
    for said in words.emulated(comparison):
        lines += [f"**{text(said)}**", ""]
    for row in comparison.different:
        lines += [
            f"Deliberately different: {text(row['key'])} = {text(', '.join(map(str, row['values'])))}",
            "",
        ]
    for run in range(1, len(comparison.names)):
        lines += _run(comparison, run)
    return "\n".join(lines).rstrip() + "\n"


def _run(comparison: Comparison, run: int) -> Iterable[str]:
    cells = [words.metric_cells(row, comparison) for row in comparison.of_run("metrics", run)]
    rows = [[text(row[place]) for place in (0, 1, 2, 3, 5, 6)] for row in cells]
    columns = ("metric", comparison.names[0], comparison.names[run], "change", "noise", "verdict")
    yield from _table(columns, rows)
    yield ""
    for row in comparison.of_run("findings", run):
        yield f"- {text(words.finding_line(row))}"
    changed = [row for row in comparison.of_run("collectives", run) if row["total_change_ns"]]
    if changed:
        lines = [
            [_name(row["name"]), text(row["kind"]), *words.work_cells(row, ("kind", "name"))[2:]]
            for row in changed
        ]
        yield ""
        yield from _table(
            ("collective, per step and rank", "kind", "baseline", "this", "change"), lines[:_MAX_ROWS]
        )
        yield from _rest(len(lines), "collectives")
    yield ""


def _inputs(report: Report) -> Iterable[str]:
    for row in report.inputs:
        run = row["run"] or {}
        what = ", ".join(
            f"{key} {run[key]}"
            for key in ("scheme", "cp_size", "seq_len", "dtype")
            if run.get(key) is not None
        )
        emulated = f", **CPU emulation, {text(row['clock'])} clock: no figure is a GPU's**"
        is_emulated = row["device_kind"] == CPU_EMULATED
        yield f"- {text(row['path'])}{f': {text(what)}' if what else ''}{emulated if is_emulated else ''}"


def _finding(row: Row, gained: str) -> str:
    summary = row.get("summary") or ""
    parts = [
        f"**{text(finding_name(row['code'], row['form']))}**",
        text(summary),
        text(gained),
        text(f"{row['confidence']} confidence"),
        text(row["advice"]),
    ]
    return "- " + ". ".join(part.rstrip(".") for part in parts if part) + "."


def _rank(row: Row) -> list[str]:
    return [
        str(row["rank"]),
        *(format_ns(row[field]) for field in ("window_ns", "compute_ns", "comm_ns")),
        format_fraction(row["overlap"]),
        format_ns(row["exposed_comm_ns"]),
        format_fraction(row["exposed_comm_share"]),
        format_ns(row["idle_ns"]),
    ]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterable[str]:
    yield f"| {' | '.join(text(column) for column in columns)} |"
    yield f"|{'|'.join('---' if not place else '---:' for place in range(len(columns)))}|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _rest(n_all: int, what: str) -> list[str]:
    return ["", f"and {n_all - _MAX_ROWS} more {what}"] if n_all > _MAX_ROWS else []


def _name(name: str) -> str:
    shown = function_name(name)
    return text(shown if len(shown) <= _MAX_NAME else shown[: _MAX_NAME - 1] + "…")


def text(value: object) -> str:
    """Return a value as Markdown text that is only text: no markup, no HTML, no mention, one line.

    Args:
        value: What to show.
    """
    shown = words.clean(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    shown = re.sub(r"([\\`*_\[\]|~#!$])", r"\\\1", shown)
    # A zero-width joiner: sites that show Markdown would tell people, and link addresses, that a name happens to hold.
    return re.sub(r"(@|://|www\.)", lambda match: match[1][0] + "&#8205;" + match[1][1:], shown)
