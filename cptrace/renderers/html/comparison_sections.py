"""Sections of the page of a comparison."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from cptrace.comparison import Comparison
from cptrace.renderers import comparison_text as words
from cptrace.renderers.html.markup import name, section, table, text
from cptrace.report import Row
from cptrace.units import plural

_MAX_ROWS: Final = 20


def header(comparison: Comparison) -> str:
    """Return title, runs and what is deliberately different.

    Args:
        comparison: Runs side by side.
    """
    runs = "".join(
        f"<li>{'baseline' if not number else f'run {number}'}: <strong>{text(title)}</strong>"
        f" <span class='muted'>{text(', '.join(str(row['path']) for row in inputs))};"
        f" {plural(comparison.n_steps[number], 'step') if comparison.n_steps[number] else 'no steps'}</span></li>"
        for number, (title, inputs) in enumerate(zip(comparison.names, comparison.inputs, strict=True))
    )
    different = "".join(
        f'<p class="banner">Deliberately different: {text(row["key"])} = {text(", ".join(map(str, row["values"])))}</p>'
        for row in comparison.different
    )
    emulated = "".join(f'<p class="banner">{text(said)}</p>' for said in words.emulated(comparison))
    return f"<header><h1>What differs between runs</h1><ul>{runs}</ul>{emulated}{different}</header>\n"


def runs(comparison: Comparison) -> Iterable[str]:
    """Yield a section for each run after the baseline.

    Args:
        comparison: Runs side by side.
    """
    for run in range(1, len(comparison.names)):
        title = f"{comparison.names[run]} against {comparison.names[0]}"
        yield section(
            f"run-{run}",
            title,
            f"<p><strong>{text(words.headline(comparison, run))}</strong></p>",
            _metrics(comparison, run),
            _findings(comparison, run),
            _work(comparison, run, "collectives", "kind", "Collectives"),
            _work(comparison, run, "kernels", "role", "Device work"),
        )


def _metrics(comparison: Comparison, run: int) -> str:
    rows = [words.metric_cells(row, comparison) for row in comparison.of_run("metrics", run)]
    columns = ("metric", "verdict", "baseline", "this", "change", "noise")
    cells = [[text(row[place]) for place in (0, 6, 1, 2, 3, 5)] for row in rows]
    return table(columns, cells, 2)


def _findings(comparison: Comparison, run: int) -> str:
    rows = comparison.of_run("findings", run)
    lines = "".join(f"<li>{text(words.finding_line(row))}</li>" for row in rows)
    return f"<h3>Findings</h3><ul>{lines}</ul>" if rows else ""


def _work(comparison: Comparison, run: int, part: str, kind: str, title: str) -> str:
    rows = [row for row in comparison.of_run(part, run) if row["total_change_ns"]]
    if not rows:
        return ""
    cells = [_work_cells(row, kind) for row in rows[:_MAX_ROWS]]
    heading = f"<h3>{title}, per step and rank</h3>"
    return heading + table(("name", kind, "baseline", "this", "change"), cells, 2)


def _work_cells(row: Row, kind: str) -> list[str]:
    return [name(row["name"]), text(row[kind]), *words.work_cells(row, (kind, "name"))[2:]]
