"""Source `kineto_json`: traces of the PyTorch profiler (Kineto), as JSON or gzip of JSON.

Kineto's versions differ in layout and in what they record: times were whole microseconds since 1970, and are fractions
relative to `baseTimeNanoseconds` today; each key is used where it exists and reported where it does not.

This module starts to read; `kineto_events` makes columns of the events in a thread of its own, `kineto_tables` a Trace
of the columns. It stays free of pandas, which is imported meanwhile.

Source: the writer in Kineto, libkineto/src/output_json.cpp, and the traces themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Final

from cptrace.errors import SourceError
from cptrace.requests import ReadOptions
from cptrace.sources.base import Source

if TYPE_CHECKING:
    from cptrace.sources.kineto_events import EventTables
    from cptrace.sources.kineto_file import FileInfo
    from cptrace.sources.kineto_text import Document
    from cptrace.trace import Trace

NAME: Final = "kineto_json"
SUFFIXES: Final = (".json", ".json.gz")
_GZIP_MAGIC: Final = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class KinetoReading:
    """A trace that is being read.

    Attributes:
        events: What the file says about itself and its events, as they come.
        is_cancelled: Set where nobody wants them any more.
        options: How to read it.
    """

    events: Future[tuple[FileInfo, EventTables]]
    is_cancelled: Event
    options: ReadOptions

    def finish(self) -> Trace:
        """Return the trace, once everything is read."""
        from cptrace.sources.kineto_tables import assemble  # here: it brings pandas

        info, tables = self.events.result()
        return assemble(NAME, info, tables, self.options)

    def cancel(self) -> None:
        """Give up what has not been read yet."""
        self.is_cancelled.set()
        self.events.cancel()


def start(path: Path, options: ReadOptions) -> KinetoReading:
    """Start to read a trace of the PyTorch profiler.

    Args:
        path: Path of an existing file; it is never written to.
        options: How to read it.

    Raises:
        SourceError: The file holds something else, or is damaged from the beginning.
    """
    from cptrace.sources.kineto_text import is_json_object

    if not is_json_object(path):
        raise SourceError(
            f"{path}: no JSON object, as the PyTorch profiler writes it; name a file that prof.export_chrome_trace"
            " wrote"
        )
    is_cancelled = Event()
    pool = ThreadPoolExecutor(1)
    events = pool.submit(_read, path, options.progress, lambda: not is_cancelled.is_set())
    pool.shutdown(wait=False)
    return KinetoReading(events, is_cancelled, options)


def _read(
    path: Path, progress: Callable[[int, int], None] | None, is_wanted: Callable[[], bool]
) -> tuple[FileInfo, EventTables]:
    from cptrace.sources.kineto_file import read_info
    from cptrace.sources.kineto_text import read_document

    try:
        document = read_document(path, is_wanted)
        return read_info(path, document), _read_events(document, progress, is_wanted)
    except RecursionError as error:
        raise SourceError(
            f"{path}: damaged JSON (nested a thousand levels deep); copy the file again"
        ) from error


def _read_events(
    document: Document, progress: Callable[[int, int], None] | None, is_wanted: Callable[[], bool]
) -> EventTables:
    from cptrace.sources.kineto_events import EventTables, decode_events
    from cptrace.sources.kineto_text import event_runs

    tables, n_read = EventTables(), 0
    for (events, misfits), done in event_runs(document.trace_events, decode_events):
        tables.add(events, misfits)
        n_read += len(events)
        if progress is not None:
            progress(n_read, round(n_read / done))
        if not is_wanted():
            break
    return tables


def _recognises(path: Path, first_bytes: bytes) -> bool:
    if first_bytes.startswith(_GZIP_MAGIC):
        return True
    text = first_bytes.removeprefix(b"\xef\xbb\xbf").lstrip()
    return text.startswith(b"{") or (not text and bool(first_bytes) and path.suffix == ".json")


SOURCE: Final = Source(
    NAME, "PyTorch profiler (prof.export_chrome_trace), plain or gzip", SUFFIXES, _recognises, start
)
