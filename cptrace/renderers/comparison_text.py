"""A comparison as text: what changed, by how much, and whether that is more than noise."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Final

from cptrace.comparison import GONE, METRICS, Comparison
from cptrace.names import finding_name as name_of
from cptrace.noise import NO_DIFFERENCE, UNKNOWN
from cptrace.renderers.base import RenderOptions
from cptrace.report import Row, emulation
from cptrace.units import format_change_ns, format_fraction, format_ns, plural

_MAX_ROWS: Final = 8
_MIN_NAME: Final = 16
_VERDICTS: Final = {NO_DIFFERENCE: "no difference", UNKNOWN: "unknown noise"}
_TITLES: Final = {metric.name: metric.title for metric in METRICS}


def render(comparison: Comparison, options: RenderOptions) -> str:
    """Return the comparison as text for a terminal.

    Args:
        comparison: Runs side by side.
        options: Width; colour is not used.
    """
    lines = [part for line in _header(comparison) for part in _wrapped(line, options.width)]
    for run in range(1, len(comparison.names)):
        lines += ["", *_run(comparison, run, options.width)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _header(comparison: Comparison) -> Iterable[str]:
    for number, (name, inputs) in enumerate(zip(comparison.names, comparison.inputs, strict=True)):
        n_steps = comparison.n_steps[number]
        paths = ", ".join(clean(row["path"]) for row in inputs)
        how = plural(n_steps, "step") if n_steps else "no steps: its whole window"
        yield f"{'baseline' if not number else f'run {number}':9} {clean(name)}  ({paths}; {how})"
    for row in comparison.different:
        yield f"deliberately different: {row['key']} = {', '.join(map(str, row['values']))}"
    for said in emulated(comparison):
        yield said[:1].upper() + said[1:]


def emulated(comparison: Comparison) -> list[str]:
    """Return that the figures of emulated runs are no GPU's: of all runs at once, or of those it is true of.

    Args:
        comparison: Runs side by side.
    """
    said: dict[str, list[str]] = {}
    for name, inputs in zip(comparison.names, comparison.inputs, strict=True):
        said.setdefault(emulation(inputs), []).append(clean(name))
    return [
        sentence if len(names) == len(comparison.names) else f"{', '.join(names)}: {sentence}"
        for sentence, names in said.items()
        if sentence
    ]


def _wrapped(line: str, width: int) -> list[str]:
    """Return a line as lines that fit; a word longer than one, such as a path, stays whole."""
    return textwrap.wrap(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _run(comparison: Comparison, run: int, width: int) -> Iterable[str]:
    baseline, name = clean(comparison.names[0]), clean(comparison.names[run])
    yield from _wrapped(f"{name} against {baseline}: {headline(comparison, run)}", width)
    yield ""
    yield from _table(
        ("", "baseline", "this", "change", "", "noise", "verdict"),
        [metric_cells(row, comparison) for row in comparison.of_run("metrics", run)],
        width,
        left=(0, 4, 6),
    )
    if findings := comparison.of_run("findings", run):
        yield from ("", "Findings")
        yield from (f"  {finding_line(row)}" for row in findings)
    for title, section, columns in (
        ("Collectives, per step and rank", "collectives", ("kind", "name")),
        ("Device work, per step and rank", "kernels", ("role", "name")),
    ):
        rows = [row for row in comparison.of_run(section, run) if row["total_change_ns"]]
        if rows:
            yield from ("", title)
            cells = [work_cells(row, columns) for row in rows[:_MAX_ROWS]]
            yield from _table(("name", columns[0], "baseline", "this", "change"), cells, width, left=(0, 1))
        if len(rows) > _MAX_ROWS:
            yield f"and {len(rows) - _MAX_ROWS} more; --format json has all"


def headline(comparison: Comparison, run: int) -> str:
    """Return one sentence about a run: its step time and the findings that are gone.

    Args:
        comparison: Runs side by side.
        run: Number of the run.
    """
    row = comparison.of_run("metrics", run)[0]
    what = "step time" if all(comparison.n_steps) else "window"
    if row["verdict"] == NO_DIFFERENCE:
        said = f"no difference in {what} ({format_change(row)}; the steps' own spread is larger)"
        if not row["noise"]:
            said = f"no difference in {what}"
    elif row["verdict"] == UNKNOWN:
        said = f"{what} {format_ns(row['baseline'])} -> {format_ns(row['value'])}; too few steps to tell it from noise"
    else:
        said = (
            f"{what} {format_ns(row['baseline'])} -> {format_ns(row['value'])}"
            f" ({format_change(row)}, {row['verdict']})"
        )
    by_status: dict[str, list[str]] = {}
    for finding in comparison.of_run("findings", run):
        by_status.setdefault(finding["status"], []).append(finding_name(finding))
    parts = [f"{status}: {', '.join(names)}" for status, names in by_status.items() if status != "kept"]
    return "; ".join([said, *parts])


def finding_name(row: Row) -> str:
    """Return a finding's code, with its form where it has one.

    Args:
        row: Row of findings.
    """
    return clean(name_of(row["code"], row["form"]))


def finding_line(row: Row) -> str:
    """Return what became of a finding.

    Args:
        row: Row of `Comparison.findings`.
    """
    times = [row["baseline_recoverable_ns"], row["recoverable_ns"]]
    text = f"{row['status']:5} {finding_name(row)}"
    if row["status"] == GONE:
        return (
            text
            + ("" if times[0] is None else f": {format_ns(times[0])} was recoverable")
            + (
                ""
                if row["predicted_step_ns"] is None
                else f", predicted step {format_ns(row['predicted_step_ns'])}"
            )
        )
    known = [format_ns(time) for time in times if time is not None]
    return text + (f": {' -> '.join(known)} recoverable" if known else "")


def format_value(row: Row, field: str) -> str:
    """Return a metric's value for people.

    Args:
        row: Row of `Comparison.metrics`.
        field: `baseline`, `value` or `noise`.
    """
    value = row[field]
    if value is None:
        return "-"
    return format_ns(value) if row["unit"] == "ns" else format_fraction(value)


def format_change(row: Row) -> str:
    """Return a metric's change for people: percent of times, percentage points of fractions.

    Args:
        row: Row of `Comparison.metrics`.
    """
    if row["change"] is None:
        return "-"
    if row["unit"] != "ns":
        return f"{100 * row['change']:+.1f} pp"
    return (
        f"{100 * row['relative_change']:+.1f} %"
        if row["relative_change"] is not None
        else format_change_ns(row["change"])
    )


def metric_cells(row: Row, comparison: Comparison) -> tuple[str, ...]:
    """Return the cells of a metric's line.

    Args:
        row: Row of `Comparison.metrics`.
        comparison: Where it is from.
    """
    title = _TITLES[row["metric"]]
    if row["metric"] == METRICS[0].name and not all(comparison.n_steps):
        title = "window"
    noise = format_value(row, "noise").replace("%", "pp") if row["noise"] is not None else "not known"
    return (
        title,
        format_value(row, "baseline"),
        format_value(row, "value"),
        format_change(row),
        bar(row),
        noise,
        "-" if row["change"] is None else _VERDICTS.get(row["verdict"], str(row["verdict"])),
    )


def bar(row: Row) -> str:
    """Return how large a change is: one sign per ten percent or percentage points, at most five.

    Args:
        row: Row of `Comparison.metrics`.
    """
    size = row["change"] if row["unit"] != "ns" else row["relative_change"]
    if not size or row["verdict"] == NO_DIFFERENCE:
        return ""
    n_signs = max(1, min(5, round(10 * abs(float(size)))))
    return ("+" if size > 0 else "-") * n_signs


def work_cells(row: Row, columns: Sequence[str]) -> tuple[str, ...]:
    """Return the cells of a line about collectives or kernels.

    Args:
        row: Row of `Comparison.collectives` or `Comparison.kernels`.
        columns: Its kind or role, and its name.
    """
    return (
        clean(row[columns[1]]),
        clean(row[columns[0]]),
        format_ns(row["baseline_total_ns"]),
        format_ns(row["total_ns"]),
        format_change_ns(row["total_change_ns"]),
    )


def clean(text: object) -> str:
    """Return text without control characters: names come from traces and must not steer the terminal.

    Args:
        text: What to show.
    """
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(text))


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, left: Sequence[int]
) -> Iterable[str]:
    """Yield aligned lines; the first column is cut to the room that the others leave."""
    sizes = [max(_cells(row[place]) for row in [columns, *rows]) for place in range(len(columns))]
    sizes[0] = max(_MIN_NAME, min(sizes[0], width - sum(sizes[1:]) - 2 * len(sizes[1:])))
    for row in [columns, *rows]:
        cells = [_cut(row[0], sizes[0]), *row[1:]]
        yield "  ".join(
            _pad(cell, sizes[place], is_left=place in left) for place, cell in enumerate(cells)
        ).rstrip()


def _cells(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )


def _pad(text: str, room: int, *, is_left: bool) -> str:
    gap = " " * max(0, room - _cells(text))
    return text + gap if is_left else gap + text


def _cut(text: str, room: int) -> str:
    if _cells(text) <= room:
        return text
    while _cells(text) > room - 1:
        text = text[:-1]
    return text + "…"
