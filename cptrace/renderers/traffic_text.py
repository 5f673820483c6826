"""The traffic section as text: one line where all ranks sent what the formula says, else what differs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from cptrace.analyses.traffic import ATTENTION
from cptrace.report import Row
from cptrace.units import format_bytes

_MAX_ROWS: Final = 8
_COLUMNS: Final = (
    "rank",
    "pass",
    "layer",
    "steps",
    "messages",
    "expected",
    "bytes",
    "expected",
    "difference",
)


def traffic(rows: Sequence[Row]) -> Iterable[Any]:
    """Yield the section's lines.

    Args:
        rows: Rows of the section `traffic`.
    """
    known = [row for row in rows if row["expected_bytes"] is not None]
    attention = [row for row in known if row["part"] == ATTENTION]
    different = [row for row in known if _differs(row)]
    if different:
        yield Text("NOT what the formula says, per layer and step:", style="bold yellow")
        yield _table(different[:_MAX_ROWS])
        if len(different) > _MAX_ROWS:
            yield Text(f"and {len(different) - _MAX_ROWS} more; --format json has all", style="dim")
    elif attention:
        passes = dict.fromkeys(row["pass"] for row in attention)
        sums = "; ".join(f"{name} {_sizes(attention, name)}" for name in passes)
        yield Text(f"each rank, layer and step as the scheme's formula says, to the byte: {sums}")
    yield from _others([row for row in rows if row["part"] != ATTENTION])


def _differs(row: Row) -> bool:
    return bool(row["difference_bytes"]) or row["n_messages"] != row["expected_n_messages"]


def _sizes(rows: Sequence[Row], pass_name: str) -> str:
    """Return what is sent in a pass of a layer, each different amount once."""
    amounts = dict.fromkeys((row["bytes"], row["n_messages"]) for row in rows if row["pass"] == pass_name)
    return " or ".join(f"{format_bytes(size)} in {_messages(count)}" for size, count in amounts)


def _messages(count: int) -> str:
    return f"{count} message" + ("" if count == 1 else "s")


def _others(rows: Sequence[Row]) -> Iterable[Any]:
    """Yield what was sent besides attention in one step, of the rank that sent most."""
    if not rows:
        return
    by_rank: dict[int, int] = {}
    for row in rows:
        by_rank[row["rank"]] = by_rank.get(row["rank"], 0) + row["bytes"]
    rank = max(by_rank, key=lambda number: (by_rank[number], -number))
    sums: dict[str, tuple[int, int]] = {}
    for entry in (entry for row in rows if row["rank"] == rank for entry in row["by_tensor"]):
        name = " ".join(word for word in (entry["kind"], entry["tensor"]) if word)
        size, count = sums.get(name, (0, 0))
        sums[name] = (size + entry["bytes"], count + entry["n_messages"])
    parts = ", ".join(
        f"{name} {format_bytes(size)} in {_messages(count)}" for name, (size, count) in sums.items()
    )
    is_expected = all(row["expected_bytes"] is not None and not _differs(row) for row in rows)
    verdict = ", as the model's formula says on all ranks" if is_expected else ""
    yield Text(f"besides attention, in a step of rank {rank}: {parts}{verdict}")


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "pass" else "right", no_wrap=True)
    for row in rows:
        numbers = ("layer", "n_steps", "n_messages", "expected_n_messages", "bytes", "expected_bytes")
        cells = ("-" if row[name] is None else f"{row[name]:,}" for name in numbers)
        table.add_row(str(row["rank"]), str(row["pass"] or "-"), *cells, f"{row['difference_bytes']:+,}")
    return table
