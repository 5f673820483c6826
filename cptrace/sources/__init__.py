"""Trace formats: which file is read by which source. `SOURCES` is the list that help and tests go by."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cptrace.errors import SourceError
from cptrace.sources import nsys_rep, nsys_sqlite
from cptrace.sources.base import ReadOptions, Source
from cptrace.trace import Trace

SOURCES: Final[tuple[Source, ...]] = (nsys_sqlite.SOURCE, nsys_rep.SOURCE)

__all__ = ["SOURCES", "ReadOptions", "Source", "read_trace"]


def read_trace(path: Path, options: ReadOptions | None = None) -> Trace:
    """Return the trace in a file of any known format.

    Args:
        path: Path of the file; it is never written to.
        options: How to read it.

    Raises:
        SourceError: The file is missing, unreadable, damaged or of no known format.
        TraceError: Its content contradicts itself.
    """
    return _source_of(path).read(path, options or ReadOptions())


def _source_of(path: Path) -> Source:
    try:
        if path.is_dir():
            raise SourceError(f"{path}: is a folder; name the files in it that shall be analysed")
        with path.open("rb") as file:
            first_bytes = file.read(16)
    except OSError as error:
        raise SourceError(f"{path}: cannot be opened ({error.strerror}); check the path") from error
    for source in SOURCES:
        if source.recognises(path, first_bytes):
            return source
    if not any(first_bytes):
        what = "is filled with zeros" if first_bytes else "is empty"
        raise SourceError(f"{path}: the file {what}; its export was interrupted: export the report again")
    known = "; ".join(f"{source.summary}" for source in SOURCES)
    raise SourceError(f"{path}: not a known trace format; cptrace reads: {known}")
