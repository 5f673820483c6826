"""The diagnosis as text: the recognised scheme, the findings with what mending them gives, and the start causes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final

from rich.cells import cell_len, set_cell_size
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cptrace.gates import CODES, not_looked_for
from cptrace.names import function_name
from cptrace.renderers.comparison_text import clean, finding_name
from cptrace.report import Report, Row
from cptrace.units import format_instant, format_ns, joined, plural

_MAX_FULL: Final = 3
_MAX_ALIKE: Final = 3
_MAX_EVIDENCE: Final = 2
_MAX_RANK_ROWS: Final = 12
_MAX_NAME: Final = 48
_ERROR: Final = "error"
_STYLES: Final = {_ERROR: "bold red", "warning": "bold", "info": ""}


def diagnosis(report: Report, width: int, *, has_details: bool = True) -> Iterable[Any]:
    """Yield the recognised scheme and the findings; nothing where they were not looked for.

    Args:
        report: Report to show.
        width: Columns.
        has_details: Whether all findings are shown in full, with the ops that show them.
    """
    schemes, rows = report.rows("schemes"), report.rows("findings")
    if not schemes and not rows:
        return
    yield Text("\nFindings", style="bold")
    yield from _schemes(schemes)
    if not rows:
        yield Text(_none_found(report))
    what = _compared(report)
    groups = [[row] for row in rows] if has_details else _alike(rows)
    n_full = len(groups) if has_details else _MAX_FULL
    for number, group in enumerate(groups[:n_full], start=1):
        yield from _in_full(number, group[0], what, _MAX_EVIDENCE if has_details else 0)
        if others := group[1:]:
            yield _indented(_in_other_files(others, what))
    if rest := groups[n_full:]:
        yield Text("")
        for number, group in enumerate(rest, start=n_full + 1):
            yield _in_one_line(number, group, what, width)
    if rows:
        yield Text(
            f"`cptrace explain {clean(rows[0]['code'])}` says how it is detected, how it looks and how to mend it",
            style="dim",
        )


def _compared(report: Report) -> str:
    """Return what gains are of: the headline has the median step, and a run takes as long as its mean step."""
    steps = {row["step"] for row in report.rows("steps")}
    return "mean step" if len(steps) > 1 else "step" if steps else "window"


def _schemes(rows: Sequence[Row]) -> Iterable[Text]:
    """Yield which scheme the traces show, how sure that is, and by what; the same of several files once."""
    several = {(row["scheme"], row["confidence"], row["evidence"]) for row in rows}
    for scheme, confidence, evidence in dict.fromkeys(
        (row["scheme"], row["confidence"], row["evidence"]) for row in rows
    ):
        paths = [row["path"] for row in rows if (row["scheme"], row["evidence"]) == (scheme, evidence)]
        where = f" in {', '.join(paths)}" if len(several) > 1 else ""
        sure = "not recognised" if scheme == "unknown" else f"{scheme} ({confidence} confidence)"
        yield Text(clean(f"scheme{where}: {sure}: {evidence}"))


def _none_found(report: Report) -> str:
    """Return what was looked for and not found, and what could not be looked for."""
    missing = not_looked_for(report)
    looked = [code for code in CODES if code not in missing]
    text = f"No finding: none of {', '.join(looked)} is there, or none costs a hundredth of the step."
    return text + (f" Could not be looked for (see Could not tell): {', '.join(missing)}." if missing else "")


def _in_full(number: int, row: Row, what: str, n_evidence: int) -> Iterable[Any]:
    is_error = row["severity"] == _ERROR
    title = Text(f"\n{number:>2} {finding_name(row)}  ", style=_STYLES.get(row["severity"], ""))
    title.append("ERROR: RESULTS MAY BE WRONG  " if is_error else "")
    title.append(f"{_gain(row, what)}  ({clean(row['confidence'])} confidence)", style="not bold")
    yield title
    yield _indented(clean(row.get("summary", "")))
    for entry in row["evidence"][:n_evidence]:
        yield from _evidence(entry)
    yield _indented(f"-> {clean(row['advice'])}")


def _alike(rows: Sequence[Row]) -> list[list[Row]]:
    """Return findings in groups of one code and form: a file has each once, so a group's are of different files."""
    groups: dict[tuple[str, str | None], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["code"], row["form"]), []).append(row)
    return list(groups.values())


def _in_other_files(rows: Sequence[Row], what: str) -> str:
    """Return what files with the same finding gain; each file is diagnosed by itself."""
    files = plural(len(rows), "other file")
    gains = [_gain(row, what) for row in rows[:_MAX_ALIKE]]
    more = f" and {len(rows) - _MAX_ALIKE} more" if len(rows) > _MAX_ALIKE else ""
    return f"the same in {files}: {', '.join(gains)}{more} (--details has each)"


def _in_one_line(number: int, group: Sequence[Row], what: str, width: int) -> Text:
    row = group[0]
    mark = "ERROR  " if row["severity"] == _ERROR else ""
    files = f"in {len(group)} files  " if len(group) > 1 else ""
    head = f"{number:>2} {finding_name(row)}  {mark}{files}{_gain(row, what)}"
    return Text(_cut(f"{head}  {clean(row.get('summary', ''))}", width))


def _gain(row: Row, what: str) -> str:
    """Return what mending it gives, as the replay says, of a step, or of the window where there are none."""
    predicted, saved = row["predicted_step_ns"], row["recoverable_ns"]
    if predicted is None or saved is None:
        return "no gain predicted"
    recorded = predicted + saved
    share = f" ({-100 * saved / recorded:+.1f} %)" if recorded else ""
    if names := row.get("after"):
        what = f"once {clean(joined(names))} {'is' if len(names) == 1 else 'are'} mended: {what}"
    return f"{what} {format_ns(recorded)} -> {format_ns(predicted)}{share}"


def _evidence(entry: Mapping[str, Any]) -> Iterable[Any]:
    """Yield an op as it is found in a timeline: its part in the finding, its name, and where and when it is."""
    number = entry["correlation_id"]
    name = _cut(clean(function_name(entry["name"])), _MAX_NAME)
    yield _indented(f"- {clean(entry['what'])}: {name}")
    start_ns, file = entry.get("file_start_ns", entry["start_ns"]), entry.get("file")
    where = f" of {clean(PurePath(file).name)}" if file else ""
    yield _indented(
        f"  at {format_instant(start_ns)}{where} for {format_ns(entry['end_ns'] - entry['start_ns'])},"
        f" rank {entry['rank']}, stream {entry['stream']}, "
        + ("no correlation id" if number is None else f"correlation id {number}")
    )


def _indented(text: str) -> Padding:
    return Padding(Text(text), (0, 0, 0, 3))


def _cut(text: str, room: int) -> str:
    return text if cell_len(text) <= room else set_cell_size(text, max(room - 1, 0)).rstrip() + "…"


def start_causes(rows: Sequence[Row]) -> Iterable[Any]:
    """Yield why communication and attention started when they did; of many ranks, those of all in one line.

    Args:
        rows: Rows of the section `start_causes`.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("rank", "role", "waited last for", "ops", "exposed"):
        table.add_column(name, justify="left" if name in ("role", "waited last for") else "right")
    for row in rows if len(rows) <= _MAX_RANK_ROWS else _over_ranks(rows):
        cells = (row["rank"], row["role"], row["cause"], row["count"])
        table.add_row(*(clean(cell) for cell in cells), format_ns(row["exposed_ns"]))
    yield table


def _over_ranks(rows: Sequence[Row]) -> Iterable[Row]:
    """Yield one row per role and cause, those with most exposed time first."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["role"], row["cause"]), []).append(row)
    summed = [
        {
            "rank": f"{len(group)} ranks" if len(group) > 1 else group[0]["rank"],
            "role": role,
            "cause": cause,
            **{name: sum(row[name] for row in group) for name in ("count", "exposed_ns")},
        }
        for (role, cause), group in groups.items()
    ]
    yield from sorted(summed, key=lambda row: (-row["exposed_ns"], row["role"], row["cause"]))
