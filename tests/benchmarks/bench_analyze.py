"""Measures `cptrace analyze` on a large export against SQLite's own scan of the same columns.

    python tests/benchmarks/bench_analyze.py                 1 M kernels: ratio to the scan, and peak memory
    python tests/benchmarks/bench_analyze.py --scale 10      also 10 M kernels: does time grow with the rows
    python tests/benchmarks/bench_analyze.py --check         exit code 1 where a target is missed

The scan is what no reader of this format can beat: one connection that adds up, in SQLite's C code, the columns that
the analyzer needs. Against it stands a whole `cptrace analyze --no-findings` process, from the start of Python to the
JSON. What findings add (dependency graph, start causes, diagnosis) stands against loading the trace alone. All run by
turns on a warm page cache, and the best of each counts, because other load on the machine only ever adds.
Python's compiled files are written first, as any first use does: without them each process compiles pandas anew, which
takes longer than the analysis (so it is where PYTHONDONTWRITEBYTECODE is set and pip was told --no-compile).

This process stays small on purpose: Linux hands the peak memory of a parent on to the child that it starts.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATOR = ("synthetic_nsys", "synthetic_timeline", "nsys_tables")

MAX_RATIO = 3.0
"""Whole process over scan. Reading alone is 1.2 to 1.5 with the fastest known reader."""
MAX_DIAGNOSIS_RATIO = 3.0
"""What findings add, over loading the trace."""
MAX_PEAK_BYTES_PER_KERNEL = 600
"""600 MB for 1 M kernels."""
MAX_GROWTH_OVER_SCALE = 1.1
"""Time may grow a tenth faster than the rows."""
SMALLEST_JUDGED = 1_000_000
"""Below this many kernels the start of Python outweighs the work, so no target applies."""

_PYTHON = shlex.quote(sys.executable)
FULL = f"{_PYTHON} -m cptrace analyze {{path}} --format json"
FIGURES = f"{FULL} --no-findings"
LOAD = f"{_PYTHON} -c 'import sys, cptrace; cptrace.open_trace(sys.argv[1])' {{path}}"

_NO_COMPILED_FILES = "PYTHONDONTWRITEBYTECODE"

SCAN = (
    """SELECT total(start), total("end"), total(deviceId), total(contextId), total(streamId), total(correlationId),
       total(globalPid), total(demangledName) FROM CUPTI_ACTIVITY_KIND_KERNEL""",
    """SELECT total(start), total("end"), total(correlationId), total(globalTid), total(nameId)
       FROM CUPTI_ACTIVITY_KIND_RUNTIME""",
    """SELECT total(start), total("end"), total(globalTid), total(domainId), total(eventType), total(textId),
       total(length(text)), total(coalesce(int64Value, uint64Value, int32Value, uint32Value)) FROM NVTX_EVENTS""",
)
"""Total and not sum: sums of 10 M process ids do not fit into 64 bits, and SQLite then gives up."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The best of all repeats on one export."""

    n_kernels: int
    scan_s: float
    analyze_s: float
    analyze_cpu_s: float
    peak_bytes: int
    load_s: float | None = None
    findings_s: float | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the result: a figure, and the target that it must not exceed where one applies."""

    what: str
    value: float
    unit: str
    target: float | None

    @property
    def is_missed(self) -> bool:
        """Whether the figure exceeds its target."""
        return self.target is not None and self.value > self.target


def export_path(n_kernels: int, folder: Path) -> Path:
    """Return a synthetic export with as many kernels, made unless the folder holds it already.

    It has 1.05 API calls per kernel (one launch each; the rest record events, wait and copy) and 0.2 ranges.
    """
    sources = [(ROOT / "tests" / "support" / f"{name}.py").read_bytes() for name in GENERATOR]
    version = hashlib.sha256(b"".join(sources)).hexdigest()[:12]
    path = folder / f"synthetic-{n_kernels}-{version}.sqlite"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        module = f"tests.support.{GENERATOR[0]}"
        command = [sys.executable, "-m", module, str(partial), "--kernels", str(n_kernels)]
        subprocess.run(command, cwd=ROOT, check=True)
        partial.replace(path)
    return path


def measure(
    path: Path, command: str, n_kernels: int, repeats: int, *, with_findings: bool = False
) -> Measured:
    """Return the best of several runs by turns, after one of each that fills the page cache and compiles."""
    scan_seconds(path)
    run_command(command, path, {key: os.environ[key] for key in os.environ if key != _NO_COMPILED_FILES})
    scans, runs, loads, full = [], [], [], []
    for _ in range(repeats):
        scans.append(scan_seconds(path))
        runs.append(run_command(command, path))
        if with_findings:
            loads.append(run_command(LOAD, path)[0])
            full.append(run_command(FULL, path)[0])
    seconds, cpu_seconds, peaks = zip(*runs, strict=True)
    best = (min(scans), min(seconds), min(cpu_seconds), max(peaks))
    return Measured(n_kernels, *best, min(loads, default=None), min(full, default=None))


def scan_seconds(path: Path) -> float:
    """Return how long SQLite takes to add up the columns."""
    started = time.perf_counter()
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
        for statement in SCAN:
            connection.execute(statement).fetchone()
    return time.perf_counter() - started


def run_command(
    command: str, path: Path, environment: Mapping[str, str] = os.environ
) -> tuple[float, float, int]:
    """Return a process's time from start to end and its CPU time, in s, and its peak memory in bytes.

    Its output is discarded.

    Args:
        command: Shell words, in which `{path}` stands for the export.
        path: The export.
        environment: Variables of the process.
    """
    words = [word.replace("{path}", str(path)) for word in shlex.split(command)]
    discard = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    started = time.perf_counter()
    pid = os.posix_spawnp(words[0], words, environment, file_actions=discard)
    _, status, usage = os.wait4(pid, 0)
    seconds = time.perf_counter() - started
    code = os.waitstatus_to_exitcode(status)
    if code != 0:
        raise SystemExit(f"{shlex.join(words)} exited with {code}")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def result(small: Measured, large: Measured | None) -> list[Line]:
    """Return the figures of the first size with their targets, and how they grow where a second was measured."""
    is_judged = small.n_kernels >= SMALLEST_JUDGED
    lines = lines_of(small, is_judged)
    if large is None:
        return lines
    scale = large.n_kernels / small.n_kernels
    growth = large.analyze_s / small.analyze_s
    target = scale * MAX_GROWTH_OVER_SCALE if is_judged else None
    return [*lines, *lines_of(large, False), Line(f"time of {scale:g}x rows over 1x", growth, "x", target)]


def lines_of(measured: Measured, is_judged: bool) -> list[Line]:
    """Return the figures of one size, with their targets where it is to be judged."""
    size = f"{measured.n_kernels:,} kernels"
    ratio = measured.analyze_s / measured.scan_s
    most_mb = measured.n_kernels * MAX_PEAK_BYTES_PER_KERNEL / 1e6
    lines = [
        Line(f"{size}: SQLite's scan", measured.scan_s, "s", None),
        Line(f"{size}: analyze", measured.analyze_s, "s", None),
        Line(f"{size}: analyze, CPU time", measured.analyze_cpu_s, "s", None),
        Line(f"{size}: analyze over scan", ratio, "x", MAX_RATIO if is_judged else None),
        Line(f"{size}: peak memory", measured.peak_bytes / 1e6, "MB", most_mb if is_judged else None),
    ]
    if measured.load_s is None or measured.findings_s is None:
        return lines
    added = (measured.findings_s - measured.analyze_s) / measured.load_s
    return [
        *lines,
        Line(f"{size}: loading alone", measured.load_s, "s", None),
        Line(f"{size}: analyze with findings", measured.findings_s, "s", None),
        Line(f"{size}: findings over loading", added, "x", MAX_DIAGNOSIS_RATIO if is_judged else None),
    ]


def table(lines: Sequence[Line]) -> str:
    """Return the lines as text for a terminal."""
    rows = [
        f"{line.what:<42} {line.value:>9.2f} {line.unit:<3}"
        + ("" if line.target is None else f" <= {line.target:<8g} {'MISSED' if line.is_missed else 'ok'}")
        for line in lines
    ]
    return "\n".join(row.rstrip() for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 1 where a target is missed and the command line asks for a check."""
    given = parse(arguments)
    crowding = describe_crowding(os.getloadavg()[0], os.cpu_count() or 1)
    sizes = [given.kernels] if given.scale is None else [given.kernels, given.kernels * given.scale]
    is_ours = given.command == FIGURES
    measured = [
        measure(
            export_path(n, given.cache), given.command, n, given.repeats, with_findings=is_ours and not place
        )
        for place, n in enumerate(sizes)
    ]
    lines = result(measured[0], measured[1] if len(measured) > 1 else None)
    print(f"best of {given.repeats}, {os.cpu_count()} CPUs, SQLite {sqlite3.sqlite_version}, warm page cache")
    if crowding is not None:
        print(crowding)
    print(table(lines))
    return int(given.check and any(line.is_missed for line in lines))


def describe_crowding(load: float, n_cpus: int) -> str | None:
    """Return a warning where other processes kept the CPUs busy before the start, or None."""
    if load < n_cpus / 2:
        return None
    return f"load was {load:.1f} on {n_cpus} CPUs before the start: times are too long, repeat on an idle machine"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="Measure cptrace analyze against SQLite's own scan.")
    parser.add_argument("--kernels", type=int, default=1_000_000)
    parser.add_argument("--scale", type=int, help="measure this many times as many kernels too")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="exit with 1 where a target is missed")
    cache = Path(tempfile.gettempdir()) / "cptrace-benchmark"
    parser.add_argument("--cache", type=Path, default=cache, help="folder that keeps the exports")
    parser.add_argument("--command", default=FIGURES, help="what to measure; {path} is the export")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
