"""Where a command's result goes: standard output, or a file that is never overwritten unasked nor left half-written."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import click

from cptrace.errors import RenderError, UsageError

_PLAIN_WIDTH: Final = 80
_LEAST_WIDTH: Final = 40  # below this, folded text is harder to read than what a terminal makes of it


def check_output(output: Path | None, *, force: bool, inputs: Iterable[Path] = ()) -> None:
    """Check, before any work is done, that an output file may be written.

    Args:
        output: File to write; None for standard output.
        force: The file may exist.
        inputs: Files that must not be overwritten, whatever `force` says.

    Raises:
        UsageError: It is `-`.
        RenderError: The file may not be written, and why.
    """
    if output is None:
        return
    refuse_dash(output, "leave -o out for standard output, or name a file")
    try:
        _check_file(output, force, inputs)
    except OSError as error:
        raise RenderError(f"cannot write {output}: {error.strerror}; choose another name") from error


def refuse_dash(output: Path, instead: str) -> None:
    """Refuse the name by which other tools mean standard output: nobody looks for a file called `-`.

    Args:
        output: File to write.
        instead: What to do.

    Raises:
        UsageError: It is that name.
    """
    if output == Path("-"):
        raise UsageError(f"-o -: a file would be written under the name '-'; {instead}")


def _check_file(output: Path, force: bool, inputs: Iterable[Path]) -> None:
    if output.is_dir():
        raise RenderError(f"cannot write {output}: it is a folder; name a file")
    if not output.parent.is_dir():
        raise RenderError(f"cannot write {output}: there is no folder {output.parent}; make it first")
    if output.exists() and any(path.exists() and output.samefile(path) for path in inputs):
        raise RenderError(f"cannot write {output}: it is an input; inputs are never written to")
    if output.exists() and not output.is_file():
        # A device would be replaced by a file of its name.
        raise RenderError(
            f"cannot write {output}: it is not a regular file; name one, or use standard output"
        )
    if output.exists() and not force:
        raise RenderError(
            f"cannot write {output}: it exists; choose another name, or replace it with --force"
        )
    if not os.access(output.parent, os.W_OK) or (output.exists() and not os.access(output, os.W_OK)):
        raise RenderError(f"cannot write {output}: permission denied; choose a place that you may write to")


def write_output(content: str | bytes, output: Path | None) -> None:
    """Write a result.

    Args:
        content: What to write; bytes go to files only.
        output: File to write, whole or not at all; None for standard output.

    Raises:
        RenderError: The output cannot be written.
    """
    if output is None:
        _write_stdout(content if isinstance(content, str) else content.decode("utf-8", "replace"))
        return
    target = os.path.realpath(output)  # a link stays one: the file that it points to is replaced
    try:
        with tempfile.NamedTemporaryFile(
            "wb", dir=os.path.dirname(target), prefix=".cptrace-", delete=False
        ) as file:
            try:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fchmod(file.fileno(), 0o666 & ~_umask())
                os.replace(file.name, target)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise RenderError(f"cannot write {output}: {error.strerror}; choose another place") from error


def _write_stdout(text: str) -> None:
    if sys.stdout is None:
        raise RenderError("cannot write to standard output: it is closed; name a file with --output")
    encoding = sys.stdout.encoding or "utf-8"
    # Names of any script reach a terminal that may not know it: a question mark is better than no report.
    known = text.encode(encoding, "replace").decode(encoding)
    try:
        click.echo(known, nl=False)
    except BrokenPipeError:
        _give_up_stdout()  # the reader (`| head`) has seen enough
    except OSError as error:
        _give_up_stdout()
        raise RenderError(f"cannot write to standard output: {error.strerror}") from error


def _give_up_stdout() -> None:
    """Let what is left go nowhere: Python would complain once more while it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def terminal_width() -> int:
    """Return the number of columns to write for: the terminal's, else 80 (or what COLUMNS says)."""
    if not _is_terminal() and "COLUMNS" not in os.environ:
        return _PLAIN_WIDTH
    return shutil.get_terminal_size((_PLAIN_WIDTH, 24)).columns


def fit_lines(text: str, width: int, hang: int = 4) -> str:
    """Return a text whose lines are folded where they are longer than `width`; words stay whole.

    Args:
        text: Lines with any indentation.
        width: Columns.
        hang: Columns by which the rest of a folded line is further in than its begin.
    """
    return "\n".join(_fold(line, max(width, _LEAST_WIDTH), hang) for line in text.split("\n"))


def _fold(line: str, width: int, hang: int) -> str:
    rest = " " * (len(line) - len(line.lstrip(" ")) + hang)
    return textwrap.fill(line, width, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False)


def has_color() -> bool:
    """Return whether standard output is a terminal that wants colour (see no-color.org)."""
    return _is_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _is_terminal() -> bool:
    # Python has no standard output at all where it was closed before the start.
    return sys.stdout is not None and sys.stdout.isatty()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
