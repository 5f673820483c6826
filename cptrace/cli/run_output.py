"""Where the report of a run goes: names that are free, and a place of its own until it is whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Final

from cptrace.capture.nsys_capture import original_of
from cptrace.capture.nsys_command import REPORT_SUFFIX
from cptrace.cli.output import check_output
from cptrace.errors import RenderError

DEFAULT_NAME: Final = "report.sqlite"


def choose_output(output: Path | None, *, force: bool) -> Path:
    """Return where the report goes: the path asked for, or the first free default name.

    Raises:
        RenderError: The path asked for exists and is not to be replaced, or its folder cannot be written to.
    """
    path = output or next(path for path in _default_names() if not path.exists())
    check_output(path, force=force)
    return path


def _default_names() -> Iterator[Path]:
    return map(Path, chain([DEFAULT_NAME], (f"report-{number}.sqlite" for number in count(2))))


@contextmanager
def scratch_beside(path: Path) -> Iterator[Path]:
    """Yield a name of this process's own in the folder of a report; nothing is left there afterwards."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield scratch
    finally:
        scratch.unlink(missing_ok=True)
        original_of(scratch).unlink(missing_ok=True)


def keep_original(scratch: Path, path: Path) -> None:
    """Give the profiler's own report, where it has made one, the name of the report that was made of it."""
    if original_of(scratch).exists():
        os.replace(original_of(scratch), path.with_suffix(REPORT_SUFFIX))


def claim_output(scratch: Path, output: Path | None, path: Path, *, force: bool) -> Path:
    """Give a written report its name and return that: a name that another run has taken meanwhile stays its own.

    Args:
        scratch: Where the report is now.
        output: The path asked for; None for the first free default name.
        path: The name chosen before the run.
        force: A file at the path asked for is to be replaced.

    Raises:
        RenderError: The path asked for was taken while the run went on.
    """
    if output is not None and force:
        os.replace(scratch, path)
        return path
    for name in (path,) if output is not None else _default_names():
        try:
            os.link(scratch, name)
        except FileExistsError:
            continue
        return name
    raise RenderError(f"cannot write {path}: another program made it during the run; choose another name")
