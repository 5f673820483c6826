"""Process life: nothing outlives its parent, and the first rank to fail is the one that is named."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Final

from cptrace.errors import RunError

FORK: Final = "fork"
SPAWN: Final = "spawn"
"""How the processes of ranks start."""

_PR_SET_PDEATHSIG: Final = 1
_SETTLE_S: Final = 0.5  # ranks that lose a peer fail too: time to see who was first
_PEER_LOSS_SIGNS: Final = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connect timeout",
)


def die_with_parent(signal_number: int, parent_pid: int) -> None:
    """Ask the kernel to send this process a signal when its parent dies.

    Args:
        signal_number: What to send.
        parent_pid: The parent that started this process; if it is gone already, this process ends now.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal_number)


@dataclass(frozen=True, slots=True)
class _Failure:
    rank: int
    reason: str

    @property
    def is_consequence(self) -> bool:
        """Whether the rank failed only because it lost a peer."""
        return any(sign in self.reason for sign in _PEER_LOSS_SIGNS)


class RankLink:
    """A rank's way to report to its supervisor."""

    def __init__(self, connection: Connection) -> None:
        """Report over `connection`."""
        self._connection = connection

    def progress(self, text: str) -> None:
        """Say what the rank does now."""
        self._connection.send(("progress", text))

    def result(self, value: Any) -> None:
        """Hand in the rank's result; the last thing it does."""
        self._connection.send(("result", value))

    def failure(self, error: BaseException) -> None:
        """Say in one line why the rank ends."""
        self._connection.send(("failure", failure_line(error)))


def failure_line(error: BaseException) -> str:
    """Return an error in one line."""
    text = str(error).strip()
    line = text.splitlines()[0] if text else ""
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def run_ranks(
    size: int,
    body: Callable[[int, RankLink], None],
    on_progress: Callable[[str], None],
    *,
    start_method: str = FORK,
    on_started: Callable[[Sequence[int]], None] | None = None,
) -> list[Any]:
    """Run `body(rank, link)` in one process per rank and return their results in rank order.

    When one rank fails, or this process is interrupted, all are ended before this returns.

    Args:
        size: Number of ranks.
        body: What each runs; to be pickled where processes are spawned.
        on_progress: Called with a line about what happens now.
        start_method: Fork takes 0.1 s where spawn imports torch once per rank; no torch op may have run before. Spawn
            where a profiler watches: it follows programs that are started, not copies of this one.
        on_started: Called with the process id of each rank.

    Raises:
        RunError: A rank failed; the message names it and the reason.
    """
    context: Any = multiprocessing.get_context(start_method)
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    receivers = [receiver for receiver, _ in pipes]
    parent_pid = os.getpid()
    processes: list[BaseProcess] = [
        context.Process(target=_rank_entry, args=(rank, sender, parent_pid, body), name=f"rank-{rank}")
        for rank, (_, sender) in enumerate(pipes)
    ]
    with _ended_at_exit(processes):
        for process, (_, sender) in zip(processes, pipes, strict=True):
            process.start()
            sender.close()
        if on_started is not None:
            on_started([process.pid or 0 for process in processes])
        return _collect(processes, receivers, on_progress)


@contextmanager
def _ended_at_exit(processes: Sequence[BaseProcess]) -> Iterator[None]:
    try:
        yield
    finally:
        started = [process for process in processes if process.pid is not None]
        for process in started:
            process.kill()
        for process in started:
            process.join()


def _rank_entry(
    rank: int, connection: Connection, parent_pid: int, body: Callable[[int, RankLink], None]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor ends its ranks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(signal.SIGKILL, parent_pid)
    link = RankLink(connection)
    try:
        body(rank, link)
    except BaseException as error:  # noqa: BLE001 - the process boundary: every failure must reach the supervisor
        link.failure(error)
        os._exit(1)  # stream threads may be stuck in a transfer that never ends
    connection.close()
    os._exit(0)


def _collect(
    processes: Sequence[BaseProcess], receivers: Sequence[Connection], on_progress: Callable[[str], None]
) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = dict(enumerate(receivers))
    while waiting:
        for ready in wait(list(waiting.values())):
            rank = next(rank for rank, receiver in waiting.items() if receiver is ready)
            kind, value = _receive(waiting[rank], processes[rank])
            if kind == "failure":
                failures = [_Failure(rank, value), *_more_failures(processes, waiting, rank)]
                raise _as_error(failures)
            if kind == "progress":
                on_progress(value)
            else:
                results[rank] = value
                del waiting[rank]
    return [results[rank] for rank in range(len(processes))]


def _receive(receiver: Connection, process: BaseProcess) -> tuple[str, Any]:
    try:
        kind, value = receiver.recv()
    except (EOFError, OSError):
        process.join(timeout=_SETTLE_S)
        return "failure", _death_reason(process.exitcode)
    return kind, value


def _death_reason(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"ended by {name}{hint}"
    return f"ended without a result, exit code {exit_code}"


def _more_failures(
    processes: Sequence[BaseProcess], waiting: dict[int, Connection], known_rank: int
) -> Iterator[_Failure]:
    """Yield the failures of other ranks within a moment of the first one seen."""
    rest = {rank: receiver for rank, receiver in waiting.items() if rank != known_rank}
    deadline = time.monotonic() + _SETTLE_S
    while rest and (left := deadline - time.monotonic()) > 0:
        for ready in wait(list(rest.values()), timeout=left):
            rank = next(rank for rank, receiver in rest.items() if receiver is ready)
            kind, value = _receive(rest[rank], processes[rank])
            if kind == "progress":
                continue
            del rest[rank]
            if kind == "failure":
                yield _Failure(rank, value)


def _as_error(failures: Sequence[_Failure]) -> RunError:
    """Return the error that names the failure that others follow from."""
    first = min(failures, key=lambda failure: failure.is_consequence)
    return RunError(f"rank {first.rank} failed: {first.reason}; all ranks were ended")
