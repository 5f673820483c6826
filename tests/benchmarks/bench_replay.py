"""Measures replays of a large export against reading it.

    python tests/benchmarks/bench_replay.py                 1 M kernels: time to prepare, and of one replay
    python tests/benchmarks/bench_replay.py --check         exit code 1 where a target is missed

Both are CPU time of this process, which other load on the machine stretches less than the clock on the wall, and the
best of each counts. The replay has no changes, so it is checked: all is as recorded.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from cptrace.api import open_trace  # noqa: E402
from cptrace.classify import classify  # noqa: E402
from cptrace.dependencies import find_dependencies  # noqa: E402
from cptrace.launches import find_launches  # noqa: E402
from cptrace.peers import find_arrivals  # noqa: E402
from cptrace.replay import Recording, Replayed, make_recording, replay  # noqa: E402
from tests.benchmarks.bench_analyze import Line, describe_crowding, table  # noqa: E402
from tests.support.synthetic_nsys import write_synthetic  # noqa: E402

MAX_RATIO = 0.6
"""Preparing and one replay, over reading the export."""
SMALLEST_JUDGED = 1_000_000
"""Below this many kernels fixed costs outweigh the work, so no target applies."""


T = TypeVar("T")


class Measured(NamedTuple):
    """The best of all repeats, CPU time in s, and what was replayed."""

    n_ops: int
    n_events: int
    read_s: float
    prepare_s: float
    replay_s: float


def export_path(n_kernels: int, folder: Path) -> Path:
    """Return a synthetic export with a fifth more API calls than kernels, many of them of events."""
    path = folder / f"replay-{n_kernels}.sqlite"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        write_synthetic(partial, n_kernels, n_kernels * 6 // 5, n_kernels // 5)
        partial.replace(path)
    return path


def measure(path: Path, repeats: int) -> Measured:
    """Return how long reading, preparing and replaying take.

    Raises:
        SystemExit: The replay is not as recorded.
    """
    read_s, trace = best_of(repeats, lambda: open_trace(path))
    launches = find_launches(trace.ops, trace.api_calls)
    trace = classify(trace, launches)
    dependencies, arrivals = find_dependencies(trace, launches), find_arrivals(trace, launches)
    prepare_s, recording = best_of(repeats, lambda: make_recording(trace, dependencies, arrivals))
    replay_s, replayed = best_of(repeats, lambda: replay(recording))
    if not is_as_recorded(recording, replayed):
        raise SystemExit(f"the replay of {path} is not as recorded")
    return Measured(len(trace.ops), len(dependencies.events.producer), read_s, prepare_s, replay_s)


def is_as_recorded(recording: Recording, replayed: Replayed) -> bool:
    """Return whether a replay gives every recorded start and end."""
    starts, ends = replayed.start_ns == recording.start_ns, replayed.end_ns == recording.end_ns
    return bool(starts.all() and ends.all())


def best_of(repeats: int, work: Callable[[], T]) -> tuple[float, T]:
    """Return the least CPU time of some work in s, and what it returned."""
    best = float("inf")
    for _ in range(repeats):
        started = time.process_time()
        done = work()
        best = min(best, time.process_time() - started)
    return best, done


def lines_of(measured: Measured) -> list[Line]:
    """Return the figures, with the target where the size is to be judged."""
    ratio = (measured.prepare_s + measured.replay_s) / measured.read_s
    target = MAX_RATIO if measured.n_ops >= SMALLEST_JUDGED else None
    return [
        Line(f"{measured.n_ops:,} ops, {measured.n_events:,} events: read", measured.read_s, "s", None),
        Line("prepare", measured.prepare_s, "s", None),
        Line("one replay", measured.replay_s, "s", None),
        Line("prepare and replay over read", ratio, "x", target),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 1 where a target is missed and the command line asks for a check."""
    parser = argparse.ArgumentParser(description="Measure replays against reading.")
    parser.add_argument("--kernels", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="exit with 1 where a target is missed")
    cache = Path(tempfile.gettempdir()) / "cptrace-benchmark"
    parser.add_argument("--cache", type=Path, default=cache, help="folder that keeps the export")
    given = parser.parse_args(arguments)
    crowding = describe_crowding(os.getloadavg()[0], os.cpu_count() or 1)
    lines = lines_of(measure(export_path(given.kernels, given.cache), given.repeats))
    print(f"best of {given.repeats}, {os.cpu_count()} CPUs, CPU time")
    if crowding is not None:
        print(crowding)
    print(table(lines))
    return int(given.check and any(line.is_missed for line in lines))


if __name__ == "__main__":
    sys.exit(main())
