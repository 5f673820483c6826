"""Sections of the page of a report; one that has nothing to show is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePath
from typing import Any, Final

from cptrace.comparison import medians
from cptrace.labels import CPU_EMULATED
from cptrace.names import finding_name, function_name
from cptrace.renderers.html.markup import card, name, section, table, text
from cptrace.report import Report, Row
from cptrace.tidy import by_gain, gain
from cptrace.units import format_bytes, format_bytes_per_s, format_fraction, format_ns

_MAX_ROWS: Final = 30
_EXPLAINED: Final = {
    "comm_share": "of {what} some communication runs",
    "overlap": "of it runs beside compute",
    "exposed_comm_share": "of {what} nothing but communication runs: its cost",
}


def header(report: Report) -> str:
    """Return title, files and what a reader must know of them first.

    Args:
        report: Report to show.
    """
    parts = ["<header><h1>Where the time goes</h1>"]
    for row in report.inputs:
        versions = ", ".join(text(part) for part in (row["format"], row["tool_version"]) if part)
        parts.append(f"<p><strong>{text(row['path'])}</strong> <span class='muted'>{versions}</span></p>")
        if row["run"]:
            parts.append(f"<p>{_run(row['run'])}</p>")
    for clock in sorted({str(row["clock"]) for row in report.inputs if row["device_kind"] == CPU_EMULATED}):
        parts.append(f'<p class="banner">CPU emulation, {text(clock)} clock: no figure here is a GPU\'s.</p>')
    return "".join(parts) + "</header>\n"


def _run(run: Row) -> str:
    keys = (
        "scheme",
        "cp_size",
        "seq_len",
        "heads",
        "kv_heads",
        "head_dim",
        "layers",
        "dtype",
        "causal",
        "faults",
    )
    shown = [
        f"{key.replace('_', ' ')} {_value(run[key])}" for key in keys if run.get(key) not in (None, [], ())
    ]
    return text(", ".join(shown))


def _value(value: Any) -> str:
    return " + ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def headline(report: Report) -> str:
    """Return the cards: step time, communication share, overlap, exposed communication, the finding that costs most.

    Args:
        report: Report to show.
    """
    if not report.rows("ranks"):
        return ""
    n_steps = len({row["step"] for row in report.rows("steps")})
    middle = medians(report)
    note = "first to last operation, slowest rank"
    if n_steps:
        note = f"median of {n_steps} steps, slowest rank" if n_steps > 1 else "one step, slowest rank"
    explained = {
        key: line.format(what="a step" if n_steps else "the window") for key, line in _EXPLAINED.items()
    }
    cards = [card("step time" if n_steps else "window", format_ns(middle["step_ns"]), note)]
    for key, title in (("comm_share", "communication share"), ("overlap", "overlap")):
        cards.append(card(title, format_fraction(middle[key]), explained[key]))
    # Where no share can be told, what shows is the least that there is.
    least = "" if middle["exposed_comm_share"] is None else f"{format_ns(middle['exposed_comm_ns'])}, "
    exposed = f"{least}{explained['exposed_comm_share']}"
    cards.append(card("exposed communication", format_fraction(middle["exposed_comm_share"]), exposed))
    if rows := by_gain(report.rows("findings")):
        gained = gain(rows[0], has_steps=n_steps > 0)
        cards.append(card("top finding", text(finding_name(rows[0]["code"], rows[0]["form"])), gained, True))
    return f'<ul class="cards">{"".join(cards)}</ul>\n'


def findings(report: Report) -> str:
    """Return the findings with their evidence, each of which can be shown in the timeline.

    Args:
        report: Report to show.
    """
    rows = by_gain(report.rows("findings"))
    has_steps = bool(report.rows("steps"))
    return "".join(
        _finding(row, gain(row, has_steps=has_steps), report.timeline is not None, row is rows[0])
        for row in rows
    )


def _finding(row: Row, gained: str, has_timeline: bool, is_open: bool) -> str:
    where = [f"{key} {row[key]}" for key in ("rank", "step") if row[key] is not None]
    badges = "".join(
        f'<span class="badge">{text(part)}</span>'
        for part in (row["severity"], *where, f"confidence {_confidence(row['confidence'])}")
    )
    summary = f"<p>{text(row['summary'])}</p>" if row.get("summary") else ""
    saved = f'<p class="gain">{text(gained)}</p>' if gained else ""
    severity = "error" if row["severity"] == "error" else "warning" if row["severity"] != "info" else "info"
    return (
        f'<article class="finding {severity}"><h3>{text(finding_name(row["code"], row["form"]))}{badges}</h3>'
        f"{summary}{saved}<p>{text(row['advice'])}</p>{_evidence(row['evidence'], has_timeline, is_open)}</article>"
    )


def _confidence(value: Any) -> str:
    return format_fraction(value) if isinstance(value, float) else str(value)


def _evidence(rows: Sequence[Row], has_timeline: bool, is_open: bool) -> str:
    """Return the operations that show a finding, each with a button that shows it in the timeline."""
    lines = [
        (
            _jump(row) if has_timeline else "",
            text(row.get("what", "")),
            name(row["name"]),
            *(text(row.get(field, "-")) for field in ("rank", "stream")),
            format_ns(row["end_ns"] - row["start_ns"]),
            _from(row),
        )
        for row in rows
        if all(row.get(field) is not None for field in ("name", "start_ns", "end_ns"))
    ]
    columns = ("timeline" if has_timeline else "", "what", "operation", "rank", "stream", "duration", "from")
    state = " open" if is_open else ""
    return f"<details{state}><summary>Evidence</summary>{table(columns, lines, 3)}</details>" if lines else ""


def _from(row: Row) -> str:
    """Return when an operation starts in its file, and of several which that is."""
    start = f"{row.get('file_start_ns', row['start_ns']):,} ns"
    return f"{start} in {text(PurePath(row['file']).name)}" if row.get("file") else start


def _jump(row: Row) -> str:
    if any(row.get(field) is None for field in ("rank", "stream")):
        return ""
    places = (("rank", row["rank"]), ("stream", row["stream"]), ("start", row["start_ns"]))
    where = " ".join(f'data-{key}="{int(value)}"' for key, value in places)
    return f'<button type="button" {where} aria-label="show in timeline">show</button>'


def ranks(report: Report) -> str:
    """Return the account of each rank as a table.

    Args:
        report: Report to show.
    """
    times = (
        "window_ns",
        "compute_ns",
        "comm_ns",
        "exposed_comm_ns",
        "exposed_copy_ns",
        "idle_ns",
        "peer_wait_ns",
    )
    titles = (
        "window",
        "compute",
        "comm",
        "exposed comm",
        "copy, other",
        "idle",
        "of comm, waiting for peers",
    )
    lines = [
        (f"rank {row['rank']}", *(format_ns(row[field]) for field in times), format_fraction(row["overlap"]))
        for row in report.rows("ranks")
    ]
    return _table_of(("rank", *titles, "overlap"), lines)


def collectives(report: Report) -> str:
    """Return the collectives of all ranks as a table.

    Args:
        report: Report to show.
    """
    lines = []
    for (kind, title), rows in _groups(report.rows("collectives"), lambda row: (row["kind"], row["name"])):
        total, busy = (sum(row[field] for row in rows) for field in ("total_ns", "busy_ns"))
        size = None if any(row["bytes"] is None for row in rows) else sum(row["bytes"] for row in rows)
        has_rate = size is not None and total and all(row["bytes_per_s"] is not None for row in rows)
        lines.append(
            (
                name(title),
                text(kind),
                str(sum(row["count"] for row in rows)),
                format_ns(total),
                format_fraction(sum(row["overlapped_ns"] for row in rows) / busy if busy else None),
                format_ns(sum(row["exposed_ns"] for row in rows)),
                format_bytes(size),
                format_bytes_per_s(size * 1e9 / total if has_rate and size is not None else None),
            )
        )
    return _table_of(("name", "kind", "ops", "time", "overlap", "exposed", "sent", "rate"), lines, 2)


def kernels(report: Report) -> str:
    """Return the device work with most time as a table.

    Args:
        report: Report to show.
    """
    lines = [
        (
            name(title),
            text(role),
            str(sum(row["count"] for row in rows)),
            format_ns(sum(row["total_ns"] for row in rows)),
            format_ns(max(row["longest_ns"] for row in rows)),
        )
        for (title, role), rows in _groups(
            report.rows("kernels"), lambda row: (function_name(row["name"]), row["role"])
        )
    ]
    return _table_of(("name", "role", "ops", "time", "longest"), lines, 2)


def doubts(report: Report) -> str:
    """Return what could not be told, and what to mind.

    Args:
        report: Report to show.
    """
    by_reason: dict[str, list[str]] = {}
    for entry in report.not_applicable:
        by_reason.setdefault(entry.reason, []).append(entry.analysis)
    lines = [f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()]
    if unclassified := report.coverage.get("unclassified_ns"):
        lines.append(f"{format_ns(unclassified)} is in work that no rule knows; it counts as compute")
    lines += [str(note["text"]) for note in report.coverage.get("notes", ())]
    return f"<ul>{''.join(f'<li>{text(line)}</li>' for line in lines)}</ul>" if lines else ""


def _groups(
    rows: Iterable[Row], key: Callable[[Row], tuple[str, str]]
) -> list[tuple[tuple[str, str], list[Row]]]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return sorted(groups.items(), key=lambda item: (-sum(row["total_ns"] for row in item[1]), item[0]))


def _table_of(columns: Sequence[str], lines: Sequence[Sequence[str]], n_names: int = 1) -> str:
    """Return a table of the first rows, with how many more there are; nothing without rows."""
    if not lines:
        return ""
    more = len(lines) - _MAX_ROWS
    rest = f'<p class="muted">and {more} more; --format json has all</p>' if more > 0 else ""
    return table(columns, lines[:_MAX_ROWS], n_names) + rest


__all__ = [
    "by_gain",
    "collectives",
    "doubts",
    "findings",
    "header",
    "headline",
    "kernels",
    "ranks",
    "section",
]
