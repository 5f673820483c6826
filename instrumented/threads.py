"""Ranks as threads of one process, for devices that several ranks share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from cptrace.errors import RunError
from instrumented.processes import failure_line


class ThreadLink:
    """A rank's way to report to the thread that started it; the same calls as `processes.RankLink`."""

    def __init__(self, on_progress: Callable[[str], None], lock: threading.Lock | None = None) -> None:
        """Report progress, one rank at a time where they share a lock."""
        self.value: Any = None
        self._on_progress, self._lock = on_progress, lock or threading.Lock()

    def progress(self, text: str) -> None:
        """Say what the rank does now."""
        with self._lock:
            self._on_progress(text)

    def result(self, value: Any) -> None:
        """Hand in the rank's result; the last thing it does."""
        self.value = value


def run_threads(
    size: int,
    body: Callable[[int, ThreadLink], None],
    on_progress: Callable[[str], None],
    on_failure: Callable[[], None],
    consequence: type[BaseException],
) -> list[Any]:
    """Run `body(rank, link)` in one thread per rank and return their results in rank order.

    Args:
        size: Number of ranks.
        body: What each runs.
        on_progress: Called with a line about what happens now.
        on_failure: Called when a rank has failed, so that others need not wait for it.
        consequence: What the others then fail with.

    Raises:
        RunError: A rank failed; the message names it and the reason.
    """
    lock = threading.Lock()
    links = [ThreadLink(on_progress, lock) for _ in range(size)]
    failures: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        try:
            body(rank, links[rank])
        except BaseException as error:  # noqa: BLE001 - the thread's boundary: every failure must reach the caller
            failures.append((rank, error))
            on_failure()

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        rank, error = min(failures, key=lambda failure: isinstance(failure[1], consequence))
        raise RunError(f"rank {rank} failed: {failure_line(error)}; all ranks were ended") from error
    return [link.value for link in links]
