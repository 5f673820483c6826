"""Renderer `text`: headline first; one screen at 80 columns, or everything."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cptrace.labels import CPU_EMULATED
from cptrace.names import function_name
from cptrace.renderers.base import RenderOptions
from cptrace.renderers.findings_text import diagnosis, start_causes
from cptrace.renderers.headline_text import headline, peak_memory, run_line
from cptrace.renderers.traffic_text import traffic
from cptrace.report import Report, Row
from cptrace.units import format_bytes, format_bytes_per_s, format_fraction, format_ns

_MAX_PATHS: Final = 8
_MAX_ROWS: Final = 8
_MIN_NAME: Final = 12
_BAR: Final = (("compute_ns", "█"), ("exposed_comm_ns", "▒"), ("exposed_copy_ns", "+"), ("idle_ns", "·"))


def render(report: Report, options: RenderOptions) -> str:
    """Return the report as text for a terminal.

    Args:
        report: Report to render.
        options: Width and colour.
    """
    out = io.StringIO()
    console = Console(
        file=out,
        width=options.width,
        force_terminal=options.has_color,
        color_system="standard" if options.has_color else None,
        highlight=False,
        markup=False,
        emoji=False,
    )
    for block in _blocks(report, options.width) if options.has_details else _screen(report, options.width):
        console.print(block)
    lines = (line.rstrip() for line in out.getvalue().splitlines())
    return "\n".join(lines).rstrip() + "\n"


def _screen(report: Report, width: int) -> Iterable[Any]:
    """Yield what fits one screen: headline, findings, a bar per rank, and what could not be told."""
    yield from _inputs(report)
    yield from headline(report)
    yield from diagnosis(report, width, has_details=False)
    if rows := report.rows("ranks"):
        yield Text("\nTime of each rank", style="bold")
        yield from _bars(rows, width)
        yield from _rest(len(rows), "ranks", 2 * _MAX_ROWS)
        yield from _gap(rows)
        yield from _peer_wait(report)
    yield from _not_applicable(report)
    yield from _coverage(report)
    if report.rows("ranks"):
        yield Text("\n--details has more; --format html -o report.html shows it", style="dim")


def _blocks(report: Report, width: int) -> Iterable[Any]:
    yield from _inputs(report)
    yield from headline(report)
    yield from diagnosis(report, width)
    for heading, section, table in (
        ("Time of each rank", "ranks", _ranks),
        ("Steps (slowest rank of each)", "steps", _steps),
        ("Collectives (all ranks)", "collectives", _collectives),
        ("Streams", "streams", _streams),
        ("Longest device work (all ranks)", "kernels", _kernels),
    ):
        rows = report.rows(section)
        if rows:
            yield Text(f"\n{heading}", style="bold")
            yield from table(rows, width)
        if rows and section == "ranks":
            yield from _window(rows)
            yield from peak_memory(rows)
            yield from _activity(rows)
            yield from _peer_wait(report)
        causes = report.rows("start_causes") if section == "streams" else ()
        if causes:
            yield Text("\nWhy communication and attention started when they did", style="bold")
            yield from start_causes(causes)
    if rows := report.rows("traffic"):
        yield Text("\nTraffic", style="bold")
        yield from traffic(rows)
    yield from _not_applicable(report)
    yield from _coverage(report)


def _inputs(report: Report) -> Iterable[Any]:
    """Yield the files, and what each is; of files that are alike once."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for entry in report.inputs:
        alike.setdefault(tuple(_about(entry)), []).append(_clean(entry["path"]))
    for (versions, emulated, run), paths in alike.items():
        for path in paths[:_MAX_PATHS]:
            yield Text(path, style="bold")
        if len(paths) > _MAX_PATHS:
            yield Text(f"and {len(paths) - _MAX_PATHS} more")
        yield Text(f"  {versions}")
        if emulated:
            yield Text(f"  {emulated}", style="bold yellow")
        if run:
            yield Text(f"  {run}")


def _about(entry: Row) -> Iterable[str]:
    """Yield a file's versions, what is to be said of an emulated run, and which run it is; empty for what is not."""
    schema = entry["schema_version"] and f"schema {entry['schema_version']}"
    yield ", ".join(_clean(part) for part in (entry["format"], entry["tool_version"], schema) if part)
    is_emulated, clock = entry["device_kind"] == CPU_EMULATED, _clean(entry["clock"] or "unknown")
    yield f"CPU EMULATION, {clock} clock: no figure below is a GPU's" if is_emulated else ""
    yield _clean(run_line(entry["run"])) if entry["run"] else ""


def _ranks(rows: Sequence[Row], width: int) -> Iterable[Any]:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("rank", "window", "compute", "comm", "overlap", "exposed comm", "copy, other", "idle"):
        table.add_column(name, justify="right")
    for row in rows[: 2 * _MAX_ROWS]:
        table.add_row(
            f"{row['rank']}\ndev {row['device']}",
            f"{format_ns(row['window_ns'])}\n{row['window_basis']}",
            f"{format_ns(row['compute_ns'])}\n{_part(row, 'compute_ns')}",
            _comm(row),
            format_fraction(row["overlap"]) + ("" if row["overlap"] is None else "\nof comm"),
            f"{format_ns(row['exposed_comm_ns'])}\n{format_fraction(row['exposed_comm_share'])}",
            f"{format_ns(row['exposed_copy_ns'])}\n{_part(row, 'exposed_copy_ns')}",
            f"{format_ns(row['idle_ns'])}\n{_part(row, 'idle_ns')}",
        )
    yield table
    yield from _rest(len(rows), "ranks", 2 * _MAX_ROWS)
    yield from _bars(rows, width)
    yield from _balance(rows)


def _comm(row: Row) -> str:
    # With work hidden in CUDA graphs, what shows is the least that there is, and no share can be told.
    is_hidden = row["comm_share"] is None and row["window_ns"]
    return f"{'>= ' if is_hidden else ''}{format_ns(row['comm_ns'])}\n{format_fraction(row['comm_share'])}"


def _part(row: Row, name: str) -> str:
    return format_fraction(row[name] / row["window_ns"] if row["window_ns"] else None)


def _bars(rows: Sequence[Row], width: int) -> Iterable[Any]:
    """Yield one stacked bar per rank, its length the window's share of the longest one."""
    longest = max((row["window_ns"] for row in rows), default=0)
    if not longest:
        return
    room = max(20, width - 8)
    for row in rows[: 2 * _MAX_ROWS]:
        edges = _edges([row[name] for name, _ in _BAR], longest, room)
        bar = "".join(
            sign * (high - low) for (_, sign), low, high in zip(_BAR, edges, edges[1:], strict=False)
        )
        yield Text(f"{row['rank']:>5}  {bar}")
    yield Text("       █ compute  ▒ exposed comm  + copy, other  · idle", style="dim")


def _edges(parts: Sequence[int], longest: int, room: int) -> list[int]:
    """Return where each part of a bar starts, and its end, in columns."""
    edges, total = [0], 0
    for part in parts:
        total += part
        edges.append(round(total * room / longest))
    return edges


def _balance(rows: Sequence[Row]) -> Iterable[Any]:
    """Yield the account in nanoseconds, of the rank with the longest window: it must sum exactly."""
    row = max(rows, key=lambda r: (r["window_ns"], -r["rank"]))
    parts = {
        "compute": "compute_ns",
        "exposed comm": "exposed_comm_ns",
        "exposed copy": "exposed_copy_ns",
        "idle": "idle_ns",
    }
    is_exact = all(sum(r[name] for name in parts.values()) == r["window_ns"] for r in rows)
    text = " + ".join(f"{label} {row[name]:,}" for label, name in parts.items())
    verdict = "every rank sums exactly" if is_exact else "NOT EXACT: please report this as a bug of cptrace"
    yield Text(f"rank {row['rank']}: {text} = window {row['window_ns']:,} ns ({verdict})", style="dim")


def _window(rows: Sequence[Row]) -> Iterable[Any]:
    """Yield where the window of the rank with the longest one lies, and what its steps leave out."""
    row = max(rows, key=lambda r: (r["window_ns"], -r["rank"]))
    yield Text(
        f"its window runs from {row['window_start_ns']:,} to {row['window_end_ns']:,} ns of the trace",
        style="dim",
    )
    yield from _gap(rows)


def _gap(rows: Sequence[Row]) -> Iterable[Any]:
    """Yield what the steps leave out, of the rank where that is most."""
    gap = max(rows, key=lambda r: (r["between_steps_ns"], -r["rank"]))
    if gap["between_steps_ns"]:
        yield Text(
            f"not in it: {format_ns(gap['between_steps_ns'])} between the steps of rank {gap['rank']}, from the last"
            " operation of one to the first of the next (--window all has it)"
        )


def _activity(rows: Sequence[Row]) -> Iterable[Any]:
    """Yield how busy the GPUs' units were by their own counters, where those were sampled."""
    shown = [row for row in rows if row.get("sm_active") is not None][:_MAX_ROWS]
    if shown:
        texts = [
            f"rank {row['rank']} {format_fraction(row['sm_active'])}"
            + (
                f" (tensor cores {format_fraction(row['tensor_active'])})"
                if row["tensor_active"] is not None
                else ""
            )
            for row in shown
        ]
        yield Text(f"SM activity, sampled: {', '.join(texts)}")


def _peer_wait(report: Report) -> Iterable[Any]:
    """Yield how much of the communication is waiting for other ranks, of the ranks that wait most."""
    waits = [row for row in report.rows("ranks") if row["peer_wait_ns"]]
    if not waits:
        return
    waits.sort(key=lambda row: (-row["peer_wait_ns"], row["rank"]))
    texts = [
        f"rank {r['rank']} {format_ns(r['peer_wait_ns'])} of {format_ns(r['comm_ns'])}"
        for r in waits[:_MAX_ROWS]
    ]
    spread = max((entry["end_spread_ns"] for entry in report.coverage.get("peers", ())), default=0)
    yield Text(f"of comm, waiting for peers: {', '.join(texts)} (give or take {format_ns(spread)} an op)")


def _steps(rows: Sequence[Row], width: int) -> Iterable[Any]:
    numbers = sorted({row["step"] for row in rows})
    lines = []
    for number in numbers[:_MAX_ROWS]:
        row = max((r for r in rows if r["step"] == number), key=lambda r: (r["window_ns"], -r["rank"]))
        times = (
            format_ns(row[name])
            for name in ("window_ns", "compute_ns", "comm_ns", "exposed_comm_ns", "idle_ns")
        )
        # What people call a step often has its number in it already.
        name = row["name"] if any(map(str.isdecimal, row["name"])) else f"{row['name']} {number}"
        lines.append((name, str(row["rank"]), *times, format_fraction(row["overlap"])))
    columns = ("step", "rank", "time", "compute", "comm", "exposed comm", "idle", "overlap")
    yield _table(columns, lines, width, name=0)
    yield from _rest(len(numbers), "steps")


def _collectives(rows: Sequence[Row], width: int) -> Iterable[Any]:
    groups = _group(rows, lambda row: (row["kind"], row["name"]), "total_ns")
    lines = []
    for (kind, name), group in groups[:_MAX_ROWS]:
        total, busy = (sum(row[field] for row in group) for field in ("total_ns", "busy_ns"))
        size = None if any(row["bytes"] is None for row in group) else sum(row["bytes"] for row in group)
        has_rate = size is not None and total and all(row["bytes_per_s"] is not None for row in group)
        lines.append(
            (
                _function(name),
                kind,
                str(sum(row["count"] for row in group)),
                format_ns(total),
                format_fraction(sum(row["overlapped_ns"] for row in group) / busy if busy else None),
                format_ns(sum(row["exposed_ns"] for row in group)),
                format_bytes(size),
                format_bytes_per_s(size * 1e9 / total if has_rate and size is not None else None),
            )
        )
    yield _table(("name", "kind", "ops", "time", "overlap", "exposed", "sent", "rate"), lines, width, name=0)
    yield from _rest(len(groups), "collectives")


def _streams(rows: Sequence[Row], width: int) -> Iterable[Any]:
    lines = []
    for row in rows[: 2 * _MAX_ROWS]:
        times = (format_ns(row[name]) for name in ("busy_ns", "compute_ns", "comm_ns", "copy_ns", "other_ns"))
        lines.append((*(str(row[name]) for name in ("rank", "context", "stream", "n_ops")), *times))
    yield _table(
        ("rank", "context", "stream", "ops", "busy", "compute", "comm", "copy", "other"), lines, width
    )
    yield from _rest(len(rows), "streams", 2 * _MAX_ROWS)


def _kernels(rows: Sequence[Row], width: int) -> Iterable[Any]:
    groups = _group(rows, lambda row: (_function(row["name"]), row["role"]), "total_ns")
    lines = [
        (
            name,
            role,
            str(sum(row["count"] for row in group)),
            format_ns(sum(row["total_ns"] for row in group)),
            format_ns(max(row["longest_ns"] for row in group)),
        )
        for (name, role), group in groups[:_MAX_ROWS]
    ]
    yield _table(("name", "role", "ops", "time", "longest"), lines, width, name=0)
    yield from _rest(len(groups), "names")


def _group(rows: Sequence[Row], key: Callable[[Row], Any], by: str) -> list[tuple[Any, list[Row]]]:
    """Return the rows by key, the group with the largest sum first."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return sorted(groups.items(), key=lambda item: (-sum(row[by] for row in item[1]), item[0]))


def _not_applicable(report: Report) -> Iterable[Any]:
    if report.not_applicable:
        yield Text("\nCould not tell", style="bold")
    by_reason: dict[str, list[str]] = {}
    for entry in report.not_applicable:
        by_reason.setdefault(entry.reason, []).append(entry.analysis)
    for reason, names in by_reason.items():
        yield _bullet(f"{', '.join(names)}: {reason}")


def _coverage(report: Report) -> Iterable[Any]:
    lines = []
    busy = sum(row["window_ns"] - row["idle_ns"] for row in report.rows("ranks"))
    if unclassified := report.coverage.get("unclassified_ns"):
        names = ", ".join(_function(entry["name"]) for entry in report.coverage["unclassified"][:3])
        share = format_fraction(unclassified / busy if busy else None)
        lines.append(
            f"{format_ns(unclassified)} ({share} of busy time) is in work that no rule knows, such as {names}"
        )
    lines += [
        f"{note['text']}" + (f" ({note['count']}x)" if note["count"] else "")
        for note in report.coverage.get("notes", ())
    ]
    if lines:
        yield Text("\nMind", style="bold")
    for line in lines:
        yield _bullet(line)


def _bullet(text: str) -> Padding:
    return Padding(Text("- " + _clean(text)), (0, 0, 0, 1))


def _table(
    columns: Sequence[str], lines: Sequence[Sequence[str]], width: int, name: int | None = None
) -> Table:
    """Return a table of one line per row; the column of names is cut to the room that the others leave."""
    cells = [[_clean(cell) for cell in line] for line in lines]
    if name is not None:
        others = [
            max(cell_len(line[c]) for line in [columns, *cells]) for c in range(len(columns)) if c != name
        ]
        room = max(_MIN_NAME, width - sum(others) - 2 * len(others))
        cells = [[_cut(cell, room) if c == name else cell for c, cell in enumerate(line)] for line in cells]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for position, title in enumerate(columns):
        is_text = position == name or title in ("kind", "role")
        table.add_column(title, justify="left" if is_text else "right", no_wrap=True)
    for line in cells:
        table.add_row(*line)
    return table


def _cut(text: str, room: int) -> str:
    return text if cell_len(text) <= room else set_cell_size(text, room - 1).rstrip() + "…"


def _rest(n_all: int, what: str, n_shown: int = _MAX_ROWS) -> Iterable[Any]:
    if n_all > n_shown:
        yield Text(f"and {n_all - n_shown} more {what}; --format json has all", style="dim")


def _function(name: str) -> str:
    """Return a kernel's function without template and call arguments; the full name is in the JSON."""
    return _clean(function_name(name))


def _clean(text: object) -> str:
    """Return text without control characters: names come from traces and must not steer the terminal."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(text))
