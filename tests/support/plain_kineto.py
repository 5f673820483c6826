"""PyTorch profiler traces, read a second time with nothing but Python's `json` and `decimal`.

Tests compare the analyzer with this file, so it shares no code and no method with it: it holds all events as
dictionaries and every time as a `Decimal`. The accounts are those of `plain_account`.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from tests.support.plain_account import COMM, COMM_NAMES, COMPUTE, COPY, Account, Op, Rank, Window, account

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
API_CALLS = ("cuda_runtime", "cuda_driver")


def read_document(path: Path) -> dict[str, Any]:
    """Return the trace, every number with a fraction as a Decimal."""
    raw = path.read_bytes()
    return json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw, parse_float=Decimal)


def events_of(path: Path, categories: Sequence[str]) -> list[dict[str, Any]]:
    """Return the complete events of some categories, in file order."""
    events = read_document(path)["traceEvents"]
    return [event for event in events if event["ph"] == "X" and event.get("cat") in categories]


def span_ns(event: dict[str, Any]) -> tuple[int, int]:
    """Return start and end of an event in ns.

    Raises:
        ValueError: They are no whole nanoseconds.
    """
    edges = Decimal(event["ts"]) * 1000, (Decimal(event["ts"]) + Decimal(event["dur"])) * 1000
    if any(edge != int(edge) for edge in edges):
        raise ValueError(f"{event} does not start and end at whole nanoseconds")
    return int(edges[0]), int(edges[1])


def read_ops(path: Path) -> list[Op]:
    """Return the device work of a trace of one process, whose rank is that of its API calls and the device."""
    pid = min((event["pid"] for event in events_of(path, API_CALLS)), default=0)
    return [op for event in events_of(path, DEVICE_WORK) for op in _ops(event, pid)]


def accounts(path: Path, windows: Sequence[Window] | None = None) -> dict[Rank, Account]:
    """Return the account of every device in a trace, as `plain_account.accounts` does for an export."""
    by_rank: dict[Rank, list[Op]] = defaultdict(list)
    for op in read_ops(path):
        by_rank[op.rank].append(op)
    return {rank: account(ops, windows) for rank, ops in sorted(by_rank.items())}


def launches(path: Path) -> list[tuple[int, int | None]]:
    """Return the start of each kernel, copy and memset, and that of the call that launched it, sorted."""
    calls: dict[int, int] = {}
    for event in events_of(path, API_CALLS):
        start, _ = span_ns(event)
        number = event["args"]["correlation"]
        calls[number] = min(start, calls.get(number, start))
    works = events_of(path, DEVICE_WORK)
    pairs = [(span_ns(event)[0], calls.get(event["args"]["correlation"])) for event in works]
    return sorted(pairs, key=lambda pair: (pair[0], pair[1] or 0))


def _ops(event: dict[str, Any], pid: int) -> Iterator[Op]:
    start, end = span_ns(event)
    if event["cat"] == "kernel":
        is_comm = any(word in event["name"].lower() for word in COMM_NAMES)
        role = COMM if is_comm else COMPUTE
    else:
        role = COMM if "PtoP" in event["name"] else COPY
    yield Op(Rank(pid, event["args"]["device"]), role, event["name"], start, end)
