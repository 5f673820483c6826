"""Source `nsys_rep`: reports of Nsight Systems before export, read through the `nsys export` of this machine."""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cptrace.errors import SourceError
from cptrace.requests import ReadOptions
from cptrace.sources import nsys_sqlite
from cptrace.sources.base import Source
from cptrace.sources.sqlite_columns import decode_text

if TYPE_CHECKING:
    from cptrace.trace import Trace

NAME: Final = "nsys_rep"
SUFFIXES: Final = (".nsys-rep", ".qdrep")


@dataclass(frozen=True, slots=True)
class RepReading:
    """A report that was exported to a temporary folder and is being read there.

    Attributes:
        path: Path of the report.
        folder: Temporary folder; it goes with the reading.
        reading: The export, being read.
    """

    path: Path
    folder: tempfile.TemporaryDirectory[str]
    reading: nsys_sqlite.NsysReading

    def finish(self) -> Trace:
        """Return the trace, once everything is read."""
        trace = self.reading.finish()
        self.folder.cleanup()
        return dataclasses.replace(
            trace,
            meta=dataclasses.replace(trace.meta, path=decode_text(os.fsencode(self.path)), format=NAME),
        )

    def cancel(self) -> None:
        """Give up what has not been read yet."""
        self.reading.cancel()
        self.folder.cleanup()


def start(path: Path, options: ReadOptions) -> RepReading:
    """Export a report and start to read the export.

    Args:
        path: Path of the report.
        options: How to read the export.

    Raises:
        SourceError: Nsight Systems is not installed, or cannot export the report.
    """
    folder = tempfile.TemporaryDirectory(prefix="cptrace-")
    export = Path(folder.name, "export.sqlite")
    try:
        export_report(path, export)
        return RepReading(path, folder, nsys_sqlite.start(export, options))
    except SourceError:
        folder.cleanup()
        raise


def export_report(path: Path, export: Path) -> None:
    """Export a report to SQLite.

    Args:
        path: Path of the report.
        export: File to write.

    Raises:
        SourceError: Nsight Systems is not installed, or cannot export the report.
    """
    command = shutil.which("nsys")
    by_hand = (
        f"nsys export --type sqlite --output {shlex.quote(path.stem + '.sqlite')} {shlex.quote(str(path))}"
    )
    if command is None:
        raise SourceError(
            f"{path}: reading a report needs Nsight Systems, and nsys is not on PATH; export it where it is, with:"
            f" {by_hand}"
        )
    arguments = [command, "export", "--type", "sqlite", "--output", str(export), str(path)]
    done = subprocess.run(arguments, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0 or not export.is_file():
        said = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        reason = said[-1] if said else f"exit code {done.returncode}"
        raise SourceError(f"{path}: nsys could not export it ({reason}); try by hand: {by_hand}")


def _recognises(path: Path, _first_bytes: bytes) -> bool:
    return path.suffix in SUFFIXES


SOURCE: Final = Source(NAME, "Nsight Systems report (needs nsys on PATH)", SUFFIXES, _recognises, start)
