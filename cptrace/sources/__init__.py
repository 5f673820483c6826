"""Trace formats: which file is read by which source. `SOURCES` is the list that help and tests go by."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from cptrace.errors import SourceError, UsageError
from cptrace.requests import ReadOptions
from cptrace.sources import kineto_json, nsys_rep, nsys_sqlite
from cptrace.sources.base import Reading, Source

if TYPE_CHECKING:
    from cptrace.trace import Trace

SOURCES: Final[tuple[Source, ...]] = (nsys_sqlite.SOURCE, nsys_rep.SOURCE, kineto_json.SOURCE)

__all__ = ["SOURCES", "Reading", "Readings", "Source", "as_paths", "read_trace", "start_reading"]


def start_reading(path: Path, options: ReadOptions | None = None) -> Reading:
    """Start to read a file of any known format.

    Args:
        path: Path of the file; it is never written to.
        options: How to read it.

    Raises:
        SourceError: The file is missing, unreadable, plainly damaged or of no known format.
    """
    return _source_of(path).start(path, options or ReadOptions())


def read_trace(path: Path, options: ReadOptions | None = None) -> Trace:
    """Return the trace in a file of any known format.

    Args:
        path: Path of the file; it is never written to.
        options: How to read it.

    Raises:
        SourceError: The file is missing, unreadable, damaged or of no known format.
        TraceError: Its content contradicts itself.
    """
    with Readings([path], options) as readings:
        return next(iter(readings))


def as_paths(source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Return the paths that one path or several stand for.

    Args:
        source: Path or paths.
    """
    return [Path(source)] if isinstance(source, (str, os.PathLike)) else [Path(path) for path in source]


class Readings:
    """Traces of several files, in order, each being read while the one before it is worked on.

    Args:
        paths: Paths of the files.
        options: How to read them.

    Raises:
        UsageError: No file was named.
        SourceError: The first file is missing, unreadable, plainly damaged or of no known format.
    """

    def __init__(self, paths: Sequence[Path], options: ReadOptions | None = None) -> None:
        if not paths:
            raise UsageError("no trace was named; give at least one file")
        _check_once(paths)
        self._options = options
        self._remaining = list(paths)
        self._current: Reading | None = None
        self._next: Reading | None = start_reading(self._remaining.pop(0), options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for reading in (self._current, self._next):
            if reading is not None:
                reading.cancel()

    def __iter__(self) -> Iterator[Trace]:
        while self._next is not None:
            self._current = self._next
            self._next = start_reading(self._remaining.pop(0), self._options) if self._remaining else None
            trace = self._current.finish()
            self._current = None
            yield trace


def _check_once(paths: Sequence[Path]) -> None:
    """Check that no file is named twice: its ranks would count as others."""
    named: dict[str, Path] = {}
    for path in paths:
        other = named.setdefault(os.path.realpath(path), path)
        if other is not path:
            what = f"{path} is named twice" if str(other) == str(path) else f"{other} and {path} are one file"
            raise UsageError(f"{what}; name each file once")


def _source_of(path: Path) -> Source:
    try:
        if path.is_dir():
            raise SourceError(f"{path}: is a folder; name the files in it that shall be analysed")
        if path.exists() and not path.is_file():
            # A pipe would be waited for, and can be read once only.
            raise SourceError(f"{path}: is not a regular file; save what it gives to one first")
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
