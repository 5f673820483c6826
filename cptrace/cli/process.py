"""What a short-lived process that handles large arrays does differently from a library."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Final, NoReturn

from cptrace.cli.settings import INTERRUPTED
from cptrace.errors import RenderError

# Parameters of glibc's mallopt, see its malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_LARGE: Final = 1 << 30


def use_one_heap() -> None:
    """Let all threads allocate from one heap and keep what is freed for the next array, where the C library is glibc.

    By default each thread has a heap of its own, and large arrays go back to the system one by one: a fifth of the peak
    memory is then for nobody, and a third of the page faults give back what was there a moment ago.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library: nothing to set
        return
    for parameter, value in ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, _LARGE), (_M_TRIM_THRESHOLD, _LARGE)):
        mallopt(parameter, value)


def run() -> NoReturn:
    """Run the command line as a process of its own: the entry point of the command `cptrace`."""
    use_one_heap()
    try:
        from cptrace.cli.main import main  # here: an interrupt may come while it loads

        main()
    except SystemExit as end:
        leave(end.code if isinstance(end.code, int) else 0)
    except KeyboardInterrupt:
        leave(INTERRUPTED)


def leave(exit_code: int) -> NoReturn:
    """End the process at once, everything written, without taking apart millions of objects one by one.

    Args:
        exit_code: Code for the caller.
    """
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # closed before the start
                stream.flush()
    except BrokenPipeError:
        exit_code = 0  # the reader (`| head`) has seen enough
    except OSError:
        exit_code = exit_code or RenderError.exit_code
    os._exit(exit_code)
