"""What every export shares: a trace in, a file or a folder out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cptrace.trace import Trace


@dataclass(frozen=True, slots=True)
class Export:
    """A format that a trace can be written in.

    Attributes:
        name: What `--to` calls it.
        summary: One line for help.
        is_folder: Whether it is a folder of files.
        write: Writes a trace to a path that does not exist yet.
    """

    name: str
    summary: str
    is_folder: bool
    write: Callable[[Trace, Path], None]
