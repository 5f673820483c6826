"""Progress of long loads, on standard error and only where a person looks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_QUIET_SECONDS: Final = 1.0


@contextmanager
def loading() -> Iterator[Callable[[int, int], None] | None]:
    """Yield a callback for rows read so far and in all, or None where standard error is no terminal.

    Loads shorter than a second show nothing.
    """
    if not sys.stderr.isatty():
        yield None
        return
    # Only here: every other run of the command does without this import.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("reading"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} rows"),
        TimeElapsedColumn(),
    )
    started = time.monotonic()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=False) as bar:
        task = bar.add_task("reading", total=None, visible=False)

        def update(n_done: int, n_rows: int) -> None:
            bar.update(
                task, completed=n_done, total=n_rows, visible=time.monotonic() - started > _QUIET_SECONDS
            )

        yield update
