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
    """

    width: int = 80
    has_color: bool = False


@dataclass(frozen=True, slots=True)
class Renderer(Generic[Subject]):
    """One form of a report or of a comparison.

    Attributes:
        name: What `--format` calls it.
        summary: One line for help.
        render: Makes the text.
    """

    name: str
    summary: str
    render: Callable[[Subject, RenderOptions], str]
