"""The benchmark runs, on an export too small to judge."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.bench_analyze import (
    Line,
    Measured,
    describe_crowding,
    lines_of,
    result,
    run_command,
    table,
)

SCRIPT = Path(__file__).with_name("bench_analyze.py")


def bench(folder, *options):
    """Return the finished benchmark of a tiny export, whose files go into a folder."""
    command = [sys.executable, str(SCRIPT), "--kernels", "2000", "--repeats", "1", "--cache", str(folder)]
    return subprocess.run([*command, *options], capture_output=True, text=True, timeout=120, check=False)


def test_it_measures_two_sizes_and_keeps_the_exports(tmp_path):
    done = bench(tmp_path, "--scale", "2", "--check")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line for line in done.stdout.splitlines() if not line.startswith(("best of", "load was"))]
    assert [line.split("  ")[0] for line in lines] == [
        *(f"2,000 kernels: {what}" for what in (*FIGURES, *WITH_FINDINGS)),
        *(f"4,000 kernels: {what}" for what in FIGURES),
        "time of 2x rows over 1x",
    ]
    exports = sorted(path.name.rpartition("-")[0] for path in tmp_path.iterdir())
    assert exports == ["synthetic-2000", "synthetic-4000"]


FIGURES = ("SQLite's scan", "analyze", "analyze, CPU time", "analyze over scan", "peak memory")
WITH_FINDINGS = ("loading alone", "analyze with findings", "findings over loading")


def test_a_command_that_fails_ends_the_benchmark(tmp_path):
    done = bench(tmp_path, "--command", f"{shlex.quote(sys.executable)} -c 'raise SystemExit(3)'")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("exited with 3")


def test_only_the_first_run_may_write_compiled_files(tmp_path, monkeypatch):
    """Without compiled files every run would compile pandas anew, and that would be measured."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    seen = tmp_path / "seen"
    code = f"import sys; open({str(seen)!r}, 'a').write(f'{{sys.dont_write_bytecode:d}}')"
    done = bench(tmp_path, "--command", f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}")
    assert (done.returncode, seen.read_text()) == (0, "01")


def test_the_memory_of_the_command_is_measured(tmp_path):
    hold = f"{shlex.quote(sys.executable)} -c 'import pathlib; held = bytearray(300_000_000)' {{path}}"
    _, _, peak_bytes = run_command(hold, tmp_path)
    # No upper bound: this test process may be large itself, and hands its peak on to what it starts.
    assert peak_bytes > 300e6


@pytest.mark.parametrize(
    ("measured", "missed"),
    [
        (Measured(1_000_000, scan_s=1.0, analyze_s=3.0, analyze_cpu_s=3.0, peak_bytes=600_000_000), []),
        (
            Measured(1_000_000, scan_s=1.0, analyze_s=3.1, analyze_cpu_s=3.0, peak_bytes=600_000_000),
            ["analyze over scan"],
        ),
        (
            Measured(1_000_000, scan_s=1.0, analyze_s=3.0, analyze_cpu_s=3.0, peak_bytes=600_000_001),
            ["peak memory"],
        ),
        (Measured(2_000_000, scan_s=1.0, analyze_s=3.0, analyze_cpu_s=3.0, peak_bytes=1_200_000_000), []),
    ],
)
def test_targets_apply_to_ratio_and_memory(measured, missed):
    assert [line.what.partition(": ")[2] for line in lines_of(measured, True) if line.is_missed] == missed
    assert not any(line.is_missed for line in lines_of(measured, False))


@pytest.mark.parametrize(("findings_s", "is_missed"), [(6.0, False), (6.1, True)])
def test_findings_may_add_three_times_the_loading(findings_s, is_missed):
    measured = Measured(1_000_000, 1.0, 3.0, 3.0, 1, load_s=1.0, findings_s=findings_s)
    missed = [line.what.partition(": ")[2] for line in lines_of(measured, True) if line.is_missed]
    assert missed == ["findings over loading"] * is_missed


@pytest.mark.parametrize(("seconds", "is_missed"), [(33.0, False), (33.1, True)])
def test_growth_may_exceed_the_rows_by_a_tenth(seconds, is_missed):
    small = Measured(1_000_000, scan_s=1.0, analyze_s=3.0, analyze_cpu_s=3.0, peak_bytes=1)
    large = Measured(10_000_000, scan_s=10.0, analyze_s=seconds, analyze_cpu_s=3.0, peak_bytes=9_000_000_000)
    assert [line.what for line in result(small, large) if line.is_missed] == [
        "time of 10x rows over 1x"
    ] * is_missed


def test_the_table_marks_what_is_missed():
    lines = [Line("time", 1.5, "s", None), Line("ratio", 3.5, "x", 3.0), Line("memory", 600.0, "MB", 600.0)]
    assert [line.split() for line in table(lines).splitlines()] == [
        ["time", "1.50", "s"],
        ["ratio", "3.50", "x", "<=", "3", "MISSED"],
        ["memory", "600.00", "MB", "<=", "600", "ok"],
    ]


def test_a_crowded_machine_is_named():
    assert describe_crowding(0.9, 2) is None
    assert describe_crowding(3.04, 2).startswith("load was 3.0 on 2 CPUs")
