"""Measures `cptrace analyze` on a large PyTorch profiler trace against a mere pass over its text.

    python tests/benchmarks/bench_kineto.py                 1 M kernels: time and peak memory
    python tests/benchmarks/bench_kineto.py --packed        the same as .json.gz
    python tests/benchmarks/bench_kineto.py --check         exit code 1 where a target is missed

The pass is what no reader can beat: msgspec, which steps over every value to find the end of the array of events, and
keeps none. Against it stands a whole `cptrace analyze` process, from the start of Python to the JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.benchmarks.bench_analyze import Line, describe_crowding, run_command, table  # noqa: E402

GENERATOR = ("synthetic_kineto", "synthetic_timeline")
MAX_SECONDS_PER_MILLION = 12.0
"""Whole process, for 1 M kernels with their launches and flows: 3.1 M events, 711 MB of text."""
MAX_PEAK_BYTES_PER_KERNEL = 2_500
"""2.5 GB for 1 M kernels, the text included."""
SMALLEST_JUDGED = 1_000_000
"""Below this many kernels the start of Python outweighs the work, so no target applies."""

PASS = """
import mmap, sys, time
import msgspec

class Document(msgspec.Struct):
    traceEvents: msgspec.Raw

with open(sys.argv[1], "rb") as file:
    text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
started = time.perf_counter()
msgspec.json.decode(text, type=Document)
print(time.perf_counter() - started)
"""


def trace_path(n_kernels: int, folder: Path, suffix: str) -> Path:
    """Return a synthetic trace with as many kernels, made unless the folder holds it already."""
    sources = [(ROOT / "tests" / "support" / f"{name}.py").read_bytes() for name in GENERATOR]
    version = hashlib.sha256(b"".join(sources)).hexdigest()[:12]
    path = folder / f"synthetic-{n_kernels}-{version}{suffix}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"partial-{os.getpid()}{suffix}")
        module = f"tests.support.{GENERATOR[0]}"
        command = [sys.executable, "-m", module, str(partial), "--kernels", str(n_kernels)]
        subprocess.run(command, cwd=ROOT, check=True)
        partial.replace(path)
    return path


def pass_seconds(path: Path) -> float:
    """Return how long a pass over the text takes, in a process of its own: its memory shall not count as ours."""
    done = subprocess.run([sys.executable, "-c", PASS, str(path)], capture_output=True, text=True, check=True)
    return float(done.stdout)


def measure(given: argparse.Namespace) -> list[Line]:
    """Return the best of several runs, after one that fills the page cache."""
    plain = trace_path(given.kernels, given.cache, ".json")
    path = trace_path(given.kernels, given.cache, ".json.gz") if given.packed else plain
    run_command(given.command, path)
    runs = [run_command(given.command, path) for _ in range(given.repeats)]
    passes = [pass_seconds(plain) for _ in range(given.repeats)]
    seconds, cpu_seconds, peaks = zip(*runs, strict=True)
    return result(
        given.kernels, plain.stat().st_size, min(passes), min(seconds), min(cpu_seconds), max(peaks)
    )


def result(
    n_kernels: int, n_bytes: int, pass_s: float, analyze_s: float, cpu_s: float, peak_bytes: int
) -> list[Line]:
    """Return the figures, with their targets where the trace is large enough to be judged."""
    is_judged = n_kernels >= SMALLEST_JUDGED
    size = f"{n_kernels:,} kernels"
    most_s = MAX_SECONDS_PER_MILLION * n_kernels / 1e6
    most_mb = MAX_PEAK_BYTES_PER_KERNEL * n_kernels / 1e6
    return [
        Line(f"{size}: text", n_bytes / 1e6, "MB", None),
        Line(f"{size}: a pass over the text", pass_s, "s", None),
        Line(f"{size}: analyze", analyze_s, "s", most_s if is_judged else None),
        Line(f"{size}: analyze, CPU time", cpu_s, "s", None),
        Line(f"{size}: peak memory", peak_bytes / 1e6, "MB", most_mb if is_judged else None),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 1 where a target is missed and the command line asks for a check."""
    given = parse(arguments)
    crowding = describe_crowding(os.getloadavg()[0], os.cpu_count() or 1)
    lines = measure(given)
    print(
        f"best of {given.repeats}, {os.cpu_count()} CPUs, {'packed' if given.packed else 'plain'}, warm page cache"
    )
    if crowding is not None:
        print(crowding)
    print(table(lines))
    return int(given.check and any(line.is_missed for line in lines))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="Measure cptrace analyze on a PyTorch profiler trace.")
    parser.add_argument("--kernels", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--packed", action="store_true", help="measure .json.gz")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a target is missed")
    cache = Path(tempfile.gettempdir()) / "cptrace-benchmark"
    parser.add_argument("--cache", type=Path, default=cache, help="folder that keeps the traces")
    analyze = f"{shlex.quote(sys.executable)} -m cptrace analyze {{path}} --format json"
    parser.add_argument("--command", default=analyze, help="what to measure; {path} is the trace")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
