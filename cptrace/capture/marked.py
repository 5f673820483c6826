"""Finds and ends the processes of one run, wherever they went: each inherits a mark in its environment.

A process group is not enough: `nsys profile` starts an agent that leaves it and is no child of anything of ours. It
ends by itself once what it watches has ended, and stays for minutes where that was killed under it.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

_NAME: Final = "CPTRACE_RUN"
_POLL_S: Final = 0.02
_PROCESSES: Final = Path("/proc")


def new_mark() -> tuple[str, str]:
    """Return the name and the value of an environment variable that no other run has."""
    return _NAME, f"{os.getpid()}-{secrets.token_hex(8)}"


def marked(mark: tuple[str, str]) -> list[int]:
    """Return the ids of the processes that live and carry a mark.

    Args:
        mark: Name and value of the variable.
    """
    entry = "=".join(mark).encode()
    found = []
    for folder in _PROCESSES.glob("[0-9]*"):
        # Another user's, or gone meanwhile. One that has ended and waits to be collected has no environment.
        with suppress(OSError):
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def wait_for_end(mark: tuple[str, str], limit_s: float) -> bool:
    """Wait until no process carries a mark, and return whether that came true.

    Args:
        mark: Name and value of the variable.
        limit_s: Seconds to wait at most.
    """
    end = time.monotonic() + limit_s
    while marked(mark):
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_S)
    return True


def end_marked(mark: tuple[str, str], grace_s: float) -> None:
    """End the processes that carry a mark: by asking, and by force those that do not within a time.

    Args:
        mark: Name and value of the variable.
        grace_s: Seconds that they have to end by themselves.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in marked(mark):
            with suppress(OSError):
                os.kill(pid, number)
        if wait_for_end(mark, grace_s):
            return
