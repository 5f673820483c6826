"""Draws one figure with a browser, as a process of its own: `python -m cptrace.renderers.drawing BROWSER`.

The figure and how to draw it come in on standard input as JSON, the picture goes out on standard output. The package
that drives the browser leaves threads behind that may wait for it for ever; this process ends with the picture.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, Final

_TIMEOUT_S: Final = 120
_DOES_NOT_RUN: Final = 3


class BrowserError(Exception):
    """The browser does not draw."""


def draw(figure_json: str, options: dict[str, Any], browser: str) -> bytes:
    """Return the picture that a browser draws.

    Args:
        figure_json: Figure as plotly writes it.
        options: Format, width, height and scale, as the package that drives the browser knows them.
        browser: Path of the browser.

    Raises:
        BrowserError: It does not run, or draws nothing in two minutes.
    """
    command = [sys.executable, "-m", __name__, browser]
    request = json.dumps({"figure": figure_json, "options": options}).encode()
    # A group of its own, so that a browser that hangs ends with it.
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            picture, _ = process.communicate(request, timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise BrowserError(f"no picture within {_TIMEOUT_S} s") from error
        finally:
            _end_group(process.pid)
    if process.returncode != 0 or not picture:
        raise BrowserError(f"exit code {process.returncode}")
    return picture


def _end_group(leader: int) -> None:
    try:
        os.killpg(leader, 9)
    except ProcessLookupError:  # it has ended by itself
        return


def main() -> None:
    """Draw, and end at once."""
    import kaleido
    from choreographer.errors import BrowserClosedError, BrowserFailedError, ChannelClosedError

    request = json.load(sys.stdin)
    figure = json.loads(request["figure"])
    try:
        picture = kaleido.calc_fig_sync(figure, opts=request["options"], kopts={"path": sys.argv[1]})
    except (BrowserFailedError, BrowserClosedError, ChannelClosedError, TimeoutError):
        os._exit(_DOES_NOT_RUN)
    sys.stdout.buffer.write(picture)
    sys.stdout.buffer.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
