"""What pages and pictures need beside their own file: a name, plotly.js, a browser to be seen in."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cptrace.cli.output import write_output
from cptrace.errors import RenderError, UsageError

PLOTLYJS: Final = ("inline", "directory", "cdn")
PICTURES: Final = ("png", "svg")
_PAGE: Final = "html"
_BESIDE: Final = "directory"


def check_page(format_name: str, output: Path | None, plotlyjs: str, *, is_opened: bool) -> None:
    """Check, before any work is done, that the options of pages go together.

    Args:
        format_name: Format asked for.
        output: File to write; None for standard output.
        plotlyjs: Where the page has plotly.js from.
        is_opened: Whether it is to be shown in a browser.

    Raises:
        UsageError: They do not, and why.
        RenderError: Another file is where plotly.js would go.
    """
    if format_name in PICTURES and output is None:
        raise UsageError(f"--format {format_name} makes a picture; name a file with -o")
    if is_opened and (format_name != _PAGE or output is None):
        raise UsageError("--open shows a page in a browser; add --format html and name a file with -o")
    if plotlyjs != PLOTLYJS[0] and format_name != _PAGE:
        raise UsageError(
            "--plotlyjs says where a page has plotly.js from; add --format html, or leave it out"
        )
    if plotlyjs == _BESIDE and output is None:
        raise UsageError("--plotlyjs directory puts plotly.js beside the page; name a file with -o")
    if plotlyjs == _BESIDE and output is not None:
        _check_beside(output)


def _check_beside(output: Path) -> None:
    """Check that what is beside the page under the name of plotly.js is no other file."""
    from cptrace.renderers.html.page import PLOTLY_FILE, plotly_code

    beside = output.parent / PLOTLY_FILE
    try:
        is_other = beside.exists() and beside.read_bytes() != plotly_code().encode()
    except OSError as error:
        raise RenderError(f"cannot look at {beside}: {error.strerror}; choose another folder") from error
    if is_other:
        raise RenderError(f"cannot write {beside}: another file or version of that name is there; remove it")


def finish_page(output: Path | None, plotlyjs: str, *, is_opened: bool) -> None:
    """Put plotly.js beside a page that wants it there, and show the page where that was asked for.

    Args:
        output: File that was written.
        plotlyjs: Where the page has plotly.js from.
        is_opened: Whether it is to be shown in a browser.

    Raises:
        RenderError: plotly.js cannot be written, or there is no browser.
    """
    if output is None:
        return
    if plotlyjs == _BESIDE:
        from cptrace.renderers.html.page import PLOTLY_FILE, plotly_code

        write_output(plotly_code(), output.parent / PLOTLY_FILE)
    if is_opened:
        import webbrowser

        if not webbrowser.open(output.resolve().as_uri()):
            raise RenderError(f"cannot show {output}: no browser was found; open the file yourself")
