"""Accounts of communication and compute, worked out a second time with nothing but Python's own integers.

Tests compare the analyzer with this file, so it shares no code and no method with it: no arrays, no interval
unions. It walks once over the sorted start and end times of all ops, counts the running ops of each role, and
adds the time between two neighbouring moments to the fields that these counts select.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

COMPUTE, COMM, COPY, WINDOW = "compute", "comm", "copy", "window"

COMM_NAMES = (
    "nccl",
    "rccl",
    "nvshmem",
    "deep_ep::",
    "dpsk::ep::",
    "cross_device_reduce",
    "multimem",
    "userbuffers",
    "gloo",
)
"""A kernel whose name holds one of these, in any case, is communication here; any other is compute."""

DEVICE_WORK = ("KERNEL", "MEMCPY", "MEMSET")
WITH_GRAPHS = (*DEVICE_WORK, "GRAPH_TRACE")
"""Tables of ops, without and with the launches of whole CUDA graphs, whose kernels the trace does not show."""

PEER_TO_PEER = 10
"""CUPTI's copy kind of a copy between two devices."""

Window = tuple[int, int]
"""Half-open [start, end) in ns of the export's clock."""


class Rank(NamedTuple):
    """One process on one device, the key of an account."""

    pid: int
    device: int


class Op(NamedTuple):
    """One row of device work."""

    rank: Rank
    role: str
    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Account:
    """Where the time of one rank's window goes, in ns; see `account` for the meaning of each field."""

    window_ns: int
    compute_ns: int
    comm_ns: int
    overlapped_comm_ns: int
    exposed_copy_ns: int
    idle_ns: int

    @property
    def exposed_comm_ns(self) -> int:
        """Communication with no compute beside it."""
        return self.comm_ns - self.overlapped_comm_ns

    @property
    def comm_share(self) -> float | None:
        """Communication over the window; None for an empty window."""
        return self.comm_ns / self.window_ns if self.window_ns else None

    @property
    def exposed_comm_share(self) -> float | None:
        """Exposed communication over the window; None for an empty window."""
        return self.exposed_comm_ns / self.window_ns if self.window_ns else None

    @property
    def overlap(self) -> float | None:
        """Overlapped communication over all communication; None where there is none."""
        return self.overlapped_comm_ns / self.comm_ns if self.comm_ns else None


def accounts(
    path: Path, windows: Sequence[Window] | None = None, tables: Sequence[str] = DEVICE_WORK
) -> dict[Rank, Account]:
    """Return the account of every rank in an Nsight Systems SQLite export.

    Args:
        path: The export; it is opened read-only.
        windows: The windows to measure, the same for every rank; they may touch or overlap. None measures
            each rank from the start of its first op to the end of its last.
        tables: `DEVICE_WORK` or `WITH_GRAPHS`.
    """
    by_rank: dict[Rank, list[Op]] = defaultdict(list)
    for op in read_ops(path, tables):
        by_rank[op.rank].append(op)
    return {rank: account(ops, windows) for rank, ops in sorted(by_rank.items())}


def account(ops: Sequence[Op], windows: Sequence[Window] | None = None) -> Account:
    """Return where the time of the windows goes, for the ops of one rank.

    A moment counts as compute where any compute op runs, as communication where any comm op runs, and as
    overlapped where both run. Exposed copy is a moment of neither with other ops, idle one of no op at all. Ops that
    cross an edge of a window count inside it only.

    Args:
        ops: Ops of one rank in any order, at least one where `windows` is None.
        windows: As in `accounts`.
    """
    spans = [whole_window(ops)] if windows is None else windows
    totals = dict.fromkeys(("window", "compute", "comm", "overlapped", "copy", "idle"), 0)
    for length, running in segments(ops, spans):
        totals["window"] += length
        totals["compute"] += length if COMPUTE in running else 0
        totals["comm"] += length if COMM in running else 0
        totals["overlapped"] += length if {COMPUTE, COMM} <= running else 0
        totals["copy"] += length if running == {COPY, WINDOW} else 0
        totals["idle"] += length if running == {WINDOW} else 0
    return Account(*totals.values())


def whole_window(ops: Iterable[Op]) -> Window:
    """Return the window from the first start to the last end, in ns."""
    ops = list(ops)
    return min(op.start for op in ops), max(op.end for op in ops)


def segments(ops: Iterable[Op], windows: Iterable[Window]) -> Iterator[tuple[int, set[str]]]:
    """Yield the length in ns and the running roles of each stretch inside a window where nothing changes."""
    spans = [(op.role, op.start, op.end) for op in ops] + [(WINDOW, start, end) for start, end in windows]
    changes = [(start, role, 1) for role, start, _ in spans] + [(end, role, -1) for role, _, end in spans]
    running: dict[str, int] = defaultdict(int)
    for (time, role, change), (next_time, _, _) in pairwise(sorted(changes)):
        running[role] += change
        if next_time > time and running[WINDOW] > 0:
            yield next_time - time, {name for name, count in running.items() if count > 0}


def kernel_totals(path: Path) -> dict[tuple[Rank, str], tuple[int, int]]:
    """Return how many kernels of each rank and full name there are, and their total ns, without any union."""
    totals: dict[tuple[Rank, str], tuple[int, int]] = {}
    for op in read_ops(path, tables=("KERNEL",)):
        count, total_ns = totals.get((op.rank, op.name), (0, 0))
        totals[op.rank, op.name] = count + 1, total_ns + op.end - op.start
    return totals


def read_ops(path: Path, tables: Sequence[str] = DEVICE_WORK) -> list[Op]:
    """Return the device work in an export, in table order; a table that is absent gives no ops.

    Args:
        path: The export.
        tables: Which kinds of device work to read.

    Raises:
        ValueError: An op ends before it starts.
    """
    with closing(connect(path)) as connection:
        present = {
            name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        }
        ops = [
            op
            for kind in tables
            if f"CUPTI_ACTIVITY_KIND_{kind}" in present
            for op in READERS[kind](connection)
        ]
    for op in ops:
        if op.end < op.start:
            raise ValueError(f"{op.name} of {op.rank} ends at {op.end} ns, before its start at {op.start} ns")
    return ops


def connect(path: Path) -> sqlite3.Connection:
    """Return a connection that cannot change the file nor write beside it."""
    return sqlite3.connect(f"{Path(path).resolve().as_uri()}?mode=ro&immutable=1", uri=True)


def pid_of(global_id: int) -> int:
    """Return the process id in bits 24 to 47 of a serialized global id."""
    return (global_id // 2**24) % 2**24


def _read_kernels(connection: sqlite3.Connection) -> Iterator[Op]:
    strings = dict(connection.execute("SELECT id, value FROM StringIds"))
    rows = connection.execute(
        'SELECT globalPid, deviceId, demangledName, start, "end" FROM CUPTI_ACTIVITY_KIND_KERNEL'
    )
    for global_pid, device, name_id, start, end in rows:
        name = strings[name_id]
        role = COMM if any(word in name.lower() for word in COMM_NAMES) else COMPUTE
        yield Op(Rank(pid_of(global_pid), device), role, name, start, end)


def _read_copies(connection: sqlite3.Connection) -> Iterator[Op]:
    rows = connection.execute(
        'SELECT globalPid, deviceId, copyKind, srcDeviceId, dstDeviceId, start, "end"'
        " FROM CUPTI_ACTIVITY_KIND_MEMCPY"
    )
    for global_pid, device, kind, source, destination, start, end in rows:
        is_peer = kind == PEER_TO_PEER or (None not in (source, destination) and source != destination)
        yield Op(Rank(pid_of(global_pid), device), COMM if is_peer else COPY, f"copy kind {kind}", start, end)


def _read_sets(connection: sqlite3.Connection) -> Iterator[Op]:
    rows = connection.execute('SELECT globalPid, deviceId, start, "end" FROM CUPTI_ACTIVITY_KIND_MEMSET')
    for global_pid, device, start, end in rows:
        yield Op(Rank(pid_of(global_pid), device), COPY, "memset", start, end)


def _read_graphs(connection: sqlite3.Connection) -> Iterator[Op]:
    rows = connection.execute('SELECT globalPid, deviceId, start, "end" FROM CUPTI_ACTIVITY_KIND_GRAPH_TRACE')
    for global_pid, device, start, end in rows:
        # Whatever runs inside is unknown, so it is neither compute nor communication.
        yield Op(Rank(pid_of(global_pid), device), COPY, "graph", start, end)


READERS = {
    "KERNEL": _read_kernels,
    "MEMCPY": _read_copies,
    "MEMSET": _read_sets,
    "GRAPH_TRACE": _read_graphs,
}
