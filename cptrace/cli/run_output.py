"""Where the report of a run goes: names that are free, and a place of its own until it is whole."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Final

from cptrace.capture.nsys_capture import original_of
from cptrace.capture.nsys_command import REPORT_SUFFIX
from cptrace.cli.output import check_output, refuse_dash
from cptrace.errors import RenderError, UsageError
from cptrace.sources.nsys_rep import SUFFIXES

DEFAULT_NAME: Final = "report.sqlite"


def choose_output(output: Path | None, *, force: bool, has_original: bool = False) -> Path:
    """Return where the report goes: the path asked for, or the first default name that is free.

    Args:
        output: The path asked for; None for a default name.
        force: A file at the path asked for is to be replaced.
        has_original: The profiler writes a report of its own, which goes beside it.

    Raises:
        UsageError: The path asked for has the name of a profiler's own report, or of standard output.
        RenderError: The path asked for exists and is not to be replaced, or its folder cannot be written to.
    """
    if output is not None:
        refuse_dash(output, f"name a file, or leave -o out for {DEFAULT_NAME} or the next free name")
        _refuse_report_names(output)
    path = output or next(_free_names())
    check_output(path, force=force)
    if has_original:
        check_output(_original_beside(path), force=force)
    return path


def _refuse_report_names(output: Path) -> None:
    """Refuse a name by which every reader, ours too, would take the SQLite report for one of a profiler."""
    for suffix in SUFFIXES:
        if output.name.endswith(suffix):
            name = output.name.removesuffix(suffix) or "NAME"
            raise UsageError(
                f"-o {output}: the report that a run writes is SQLite, and {suffix} is the suffix of nsys's own report,"
                f" which --profiler nsys writes beside NAME.sqlite; use -o {output.with_name(name + '.sqlite')}"
            )


def _original_beside(path: Path) -> Path:
    """Return where the profiler's own report goes, beside the report that is made of it."""
    return path.with_suffix(REPORT_SUFFIX)


def _free_names() -> Iterator[Path]:
    """Yield the default names of which no file is there: a report is never put beside another run's original."""
    names = map(Path, chain([DEFAULT_NAME], (f"report-{number}.sqlite" for number in count(2))))
    return (
        name for name in names if not os.path.lexists(name) and not os.path.lexists(_original_beside(name))
    )


@contextmanager
def scratch_beside(path: Path) -> Iterator[Path]:
    """Yield a name of this process's own in the folder of a report; nothing is left there afterwards."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield scratch
    finally:
        scratch.unlink(missing_ok=True)
        original_of(scratch).unlink(missing_ok=True)


def claim_output(scratch: Path, output: Path | None, path: Path, *, force: bool) -> Path:
    """Give a written report its name and return that: a name that another run has taken meanwhile stays its own.

    The profiler's own report, where it has made one, gets that name with its own suffix.

    Args:
        scratch: Where the report is now.
        output: The path asked for; None for the first free default name.
        path: The name chosen before the run.
        force: A file at the path asked for is to be replaced.

    Raises:
        RenderError: The path asked for was taken while the run went on.
    """
    if output is not None and force:
        for source, target in _files(scratch, path):
            os.replace(source, target)
        return path
    for name in (path,) if output is not None else _free_names():
        if _have_linked(_files(scratch, name)):
            return name
    raise RenderError(f"cannot write {path}: another program made it during the run; choose another name")


def _files(scratch: Path, path: Path) -> list[tuple[Path, Path]]:
    """Return each file that a run has made, and the name that it gets."""
    original = original_of(scratch)
    return [(scratch, path), *([(original, _original_beside(path))] if original.exists() else [])]


def _have_linked(files: Iterable[tuple[Path, Path]]) -> bool:
    """Give files their names, all of them or none; return whether all names were free."""
    made: list[Path] = []
    for source, target in files:
        try:
            os.link(source, target)
        except FileExistsError:
            for name in made:
                name.unlink()
            return False
        made.append(target)
    return True
