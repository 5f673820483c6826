"""Pieces of HTML: everything that comes from a trace goes through `text`."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Final

from cptrace.names import function_name

_MAX_NAME: Final = 120
_MAX_TITLE: Final = 400


def text(value: object) -> str:
    """Return a value as HTML text that is only text: escaped, and without control or direction characters.

    Args:
        value: What to show.
    """
    shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(value))
    return html.escape(shown, quote=True)


def cut(value: object, room: int = _MAX_NAME) -> str:
    """Return a value cut to some length, not yet escaped.

    Args:
        value: What to cut.
        room: Characters that may stay.
    """
    shown = str(value)
    return shown if len(shown) <= room else shown[: room - 1] + "…"


def name(value: object) -> str:
    """Return a kernel's function as HTML, its direction isolated, with the whole name as far as it is of use on hover.

    Args:
        value: Name as the trace has it.
    """
    return f'<bdi title="{text(cut(value, _MAX_TITLE))}">{text(cut(function_name(str(value))))}</bdi>'


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], n_names: int = 1) -> str:
    """Return a table of cells that are HTML already.

    Args:
        columns: Titles.
        rows: Cells of each row.
        n_names: How many columns, from the left, hold words and not numbers.
    """
    is_name = [place < n_names for place in range(len(columns))]
    head = "".join(
        f'<th scope="col"{_class(named)}>{text(title)}</th>'
        for title, named in zip(columns, is_name, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{_class(named)}>{cell}</td>" for cell, named in zip(row, is_name, strict=True))
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _class(is_name: bool) -> str:
    return ' class="name"' if is_name else ""


def card(label: str, number: str, note: str = "", is_wide: bool = False) -> str:
    """Return one card of the headline; the parts are HTML already.

    Args:
        label: What it is.
        number: The figure.
        note: What explains it.
        is_wide: Whether it takes two places.
    """
    more = f'<span class="muted">{note}</span>' if note else ""
    wide = ' class="wide"' if is_wide else ""
    return f'<li{wide}><span class="label">{label}</span><span class="number">{number}</span>{more}</li>'


def section(identifier: str, title: str, *parts: str) -> str:
    """Return a section, nothing where it has no content.

    Args:
        identifier: Its anchor.
        title: Its heading.
        *parts: Its content, HTML already.
    """
    content = "".join(parts)
    if not content:
        return ""
    heading = f'<h2 id="{identifier}-title">{text(title)}</h2>'
    return f'<section id="{identifier}" aria-labelledby="{identifier}-title">{heading}{content}</section>\n'
