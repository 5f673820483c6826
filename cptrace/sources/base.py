"""What every source shares: how it is described, and how it is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from cptrace.requests import ReadOptions

if TYPE_CHECKING:
    from cptrace.trace import Trace


class Reading(Protocol):
    """A file that is being read in the background."""

    def finish(self) -> Trace:
        """Return the trace, once everything is read.

        Raises:
            SourceError: The file is damaged or is not of the source's format.
            TraceError: Its content contradicts itself.
        """

    def cancel(self) -> None:
        """Give up what has not been read yet; without effect after `finish`."""


@dataclass(frozen=True, slots=True)
class Source:
    """A trace format.

    Attributes:
        name: Stable name, as the report states it.
        summary: One line for help.
        suffixes: File name endings that people know it by.
        recognises: Whether a file, given its path and first 16 bytes, is of this format.
        start: Starts to read a file in the background; a file that is plainly wrong raises SourceError at once.
    """

    name: str
    summary: str
    suffixes: tuple[str, ...]
    recognises: Callable[[Path, bytes], bool]
    start: Callable[[Path, ReadOptions], Reading]
