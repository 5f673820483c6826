"""Reads emulated reports with sqlite3 and plain integers, sharing no code with the analyzer."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

TID_BITS = 0xFFFFFF
NONE_ID = 4294967295

Interval = tuple[int, int]


class KernelRow(NamedTuple):
    """One kernel with the host call that launched it and the labels around that call, outermost first."""

    pid: int
    name: str
    start: int
    end: int
    stream: int
    correlation: int
    launch_start: int
    launch_end: int
    labels: tuple[str, ...]

    @property
    def is_comm(self) -> bool:
        """Whether the kernel moves data between ranks."""
        return "gloo" in self.name


def query(path: Path, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
    """Return the rows of a query on a report that is opened read-only."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        return connection.execute(sql, parameters).fetchall()


def run_metadata(path: Path) -> dict[str, Any]:
    """Return the run's description."""
    ((text,),) = query(path, "SELECT value FROM META_DATA_CAPTURE WHERE name = 'CPTRACE_RUN'")
    return json.loads(text)


def read_kernels(path: Path) -> list[KernelRow]:
    """Return all kernels, by process and start."""
    ranges: dict[int, list[tuple[int, int, str]]] = {}
    for start, end, text, tid in query(
        path,
        "SELECT start, end, value, globalTid FROM NVTX_EVENTS JOIN StringIds ON id = textId "
        "WHERE eventType = 59 ORDER BY start",
    ):
        ranges.setdefault(tid & ~TID_BITS, []).append((start, end, text))
    rows = query(
        path,
        "SELECT k.globalPid, s.value, k.start, k.end, k.streamId, k.correlationId, r.start, r.end "
        "FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds s ON s.id = k.demangledName "
        "JOIN CUPTI_ACTIVITY_KIND_RUNTIME r ON r.correlationId = k.correlationId "
        f"AND r.globalTid & ~{TID_BITS} = k.globalPid ORDER BY k.globalPid, k.start, k.correlationId",
    )
    return [
        KernelRow(
            pid >> 24 & TID_BITS,
            *rest,
            tuple(text for start, end, text in ranges[pid] if start <= rest[5] and rest[6] <= end),
        )
        for pid, *rest in rows
    ]


def united(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of half-open intervals as disjoint ones in order."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def common(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two unions, pair by pair: slow and plain."""
    pairs = ((max(a, c), min(b, d)) for a, b in first for c, d in second)
    return [(start, end) for start, end in pairs if start < end]


def total(intervals: Iterable[Interval]) -> int:
    """Return the summed length."""
    return sum(end - start for start, end in intervals)


def pass_overlap(path: Path, pass_name: str) -> dict[int, tuple[int, int]]:
    """Return per process (overlapped, all) communication ns in the measured steps' projected pass ranges."""
    result = {}
    kernels = read_kernels(path)
    for pid in sorted({kernel.pid for kernel in kernels}):
        mine = [kernel for kernel in kernels if kernel.pid == pid and "step" in kernel.labels]
        window = _projected(mine, pass_name)
        comm = common(united((k.start, k.end) for k in mine if k.is_comm), window)
        compute = united((k.start, k.end) for k in mine if not k.is_comm)
        result[pid] = (total(common(comm, compute)), total(comm))
    return result


def _projected(kernels: Sequence[KernelRow], pass_name: str) -> list[Interval]:
    """Return the union over pass ranges of first start to last end of the kernels launched inside."""
    groups: dict[tuple[int, str], list[KernelRow]] = {}
    n_layers_done = 0
    previous = None
    for kernel in sorted(kernels, key=lambda kernel: kernel.launch_start):
        label = next(text for text in kernel.labels if text.split(" ")[0] in ("forward", "backward"))
        if label != previous:  # a new instance of a pass range begins
            n_layers_done += 1
            previous = label
        if label.split(" ")[0] == pass_name:
            groups.setdefault((n_layers_done, label), []).append(kernel)
    return united((min(k.start for k in group), max(k.end for k in group)) for group in groups.values())
