"""What every renderer shares: a report or a comparison in, a text or bytes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Subject = TypeVar("Subject")


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """How to render.

    Attributes:
        width: Columns of the terminal.
        has_color: Whether the reader shows colour.
        has_details: Whether text has everything, or what fits one screen.
        plotlyjs: Where a page has plotly.js from: `inline`, `directory` (a file beside it) or `cdn`.
    """

    width: int = 80
    has_color: bool = False
    has_details: bool = True
    plotlyjs: str = "inline"


@dataclass(frozen=True, slots=True)
class Renderer(Generic[Subject]):
    """One form of a report or of a comparison.

    Attributes:
        name: What `--format` calls it.
        summary: One line for help.
        render: Makes the text, or the bytes of a picture.
        needs_timeline: Whether a report must have been made with its timeline.
        is_binary: Whether it makes bytes that are no text, for files only.
    """

    name: str
    summary: str
    render: Callable[[Subject, RenderOptions], str | bytes]
    needs_timeline: bool = False
    is_binary: bool = False
