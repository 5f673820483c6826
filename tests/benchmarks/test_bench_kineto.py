"""The benchmark of PyTorch profiler traces runs, on one too small to judge."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.bench_kineto import result

SCRIPT = Path(__file__).with_name("bench_kineto.py")
FIGURES = ["text", "a pass over the text", "analyze", "analyze, CPU time", "peak memory"]


@pytest.mark.parametrize("packed", [[], ["--packed"]])
def test_it_measures_and_keeps_the_trace(tmp_path, packed):
    command = [
        sys.executable,
        SCRIPT,
        "--kernels",
        "500",
        "--repeats",
        "1",
        "--cache",
        tmp_path,
        "--check",
        *packed,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line for line in done.stdout.splitlines() if not line.startswith(("best of", "load was"))]
    assert [line.split("  ")[0] for line in lines] == [f"500 kernels: {what}" for what in FIGURES]
    suffixes = {"".join(path.suffixes) for path in tmp_path.iterdir()}
    assert suffixes == {".json", ".json.gz"} if packed else {".json"}


@pytest.mark.parametrize(
    ("seconds", "peak", "missed"),
    [(12.0, 2_500_000_000, []), (12.1, 1, ["analyze"]), (1.0, 2_500_000_001, ["peak memory"])],
)
def test_targets_apply_to_time_and_memory(seconds, peak, missed):
    lines = result(1_000_000, 7 * 10**8, 1.0, seconds, seconds, peak)
    assert [line.what.partition(": ")[2] for line in lines if line.is_missed] == missed
    assert not any(line.is_missed for line in result(999_999, 1, 1.0, seconds, seconds, peak))
