"""Taking turns: work that shares one resource runs in the order in which the host launched it."""

from __future__ import annotations

import threading


class Turn:
    """One piece of work's place in the order."""

    def __init__(self) -> None:
        """Make a turn that is not over."""
        self._done = threading.Event()
        self._end_ns = 0

    def finish(self, end_ns: int) -> None:
        """Let the next one start, no earlier than `end_ns`."""
        self._end_ns = end_ns
        self._done.set()

    def release(self) -> None:
        """Let the next one go even though this one failed."""
        self._done.set()

    def wait(self) -> int:
        """Return when the turn ended, once it has."""
        self._done.wait()
        return self._end_ns


class TurnOrder:
    """A resource that one piece of work holds at a time."""

    def __init__(self) -> None:
        """Start with the resource free since time 0."""
        self._tail = Turn()
        self._tail.finish(0)

    def take(self) -> tuple[Turn, Turn]:
        """Return the turn to wait for and the turn to finish; called by the host in launch order."""
        before, self._tail = self._tail, Turn()
        return before, self._tail
