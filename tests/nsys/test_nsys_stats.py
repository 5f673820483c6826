"""Nsight Systems itself opens the reports that the analyzer reads, and its figures are the analyzer's.

NVIDIA's `nsys stats` reads the SQLite tables with queries of its own, and users have it at hand. So the
kernel times per name must be equal in three places: `nsys stats`, sums over the table, and `cptrace
analyze`. The same holds for where a range lies on the device.

`nsys stats` 2022.4 opens all public traces in `../shared/traces/nsys`, from 2021.2 to 2026.2, because it
asks for tables and columns by name and not for a schema version. The trace without kernels is no
exception: it says that there are none, and exits with 0.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.plain_account import connect, kernel_totals
from tests.support.shared_traces import ROOT, nsys_traces
from tests.support.synthetic_nsys import write_synthetic

pytestmark = [
    pytest.mark.nsys,
    pytest.mark.skipif(
        shutil.which("nsys") is None, reason="nsys is not on PATH; .ci/install-nsys installs it"
    ),
]

RENAMED_IN = (2023, 1)
"""The version from which reports have the second of the two names below."""

KERNEL_SUMMARY = ("gpukernsum", "cuda_gpu_kern_sum")
PROJECTION = ("nvtxgpuproj", "nvtx_gpu_proj_trace")

Totals = dict[str, tuple[int, int]]
"""Kernel name to number of instances and total ns."""

Steps = dict[int, list[tuple[int, int, int]]]
"""Process id to the start and duration on the device, in ns, and number of ops of each step."""


def traces(paths: tuple[Path, ...], missing: str) -> list[object]:
    """Return test parameters for paths, or one that skips with a reason where there are none."""
    params = [pytest.param(path, id=path.name) for path in paths]
    return params or [pytest.param(None, marks=pytest.mark.skip(reason=missing), id="none")]


def has_kernels(path: Path) -> bool:
    """Return whether the export has rows of kernels."""
    return bool(kernel_totals(path))


PUBLIC = traces(
    tuple(path for path in nsys_traces() if has_kernels(path)),
    "needs the public traces in ../shared/traces, which is absent",
)
WITHOUT_KERNELS = traces(
    tuple(path for path in nsys_traces() if not has_kernels(path)),
    "needs the public traces in ../shared/traces, which is absent",
)
SAMPLES = traces(tuple(sorted((ROOT / "samples").glob("*.sqlite"))), "there are no samples/*.sqlite")


def nsys_version() -> tuple[int, int]:
    """Return the year and number of the installed Nsight Systems, such as (2022, 4)."""
    text = run("nsys", "--version").stdout
    year, number = re.search(r"version (\d+)\.(\d+)", text).groups()
    return int(year), int(number)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Return a finished command; its failure fails the test with what it wrote."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240, check=False)
    assert done.returncode == 0, (
        f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout}{done.stderr}"
    )
    return done


def nsys_report(names: tuple[str, str], path: Path, folder: Path) -> list[dict[str, str]]:
    """Return the rows of one report of `nsys stats`, which gets a copy, as it may write beside its input."""
    name = names[nsys_version() >= RENAMED_IN]
    copy = folder / path.name
    shutil.copyfile(path, copy)
    output = run("nsys", "stats", "--report", name, "--format", "csv", "--output", "-", str(copy)).stdout
    lines = output.splitlines(keepends=True)
    headers = [at for at, line in enumerate(lines) if line.startswith(("Time (%)", "Name,"))]
    assert headers, f"nsys stats gave no table for {path.name}:\n{output}"
    return list(csv.DictReader(line for line in lines[headers[0] :] if line.strip()))


def nsys_kernels(path: Path, folder: Path) -> Totals:
    """Return what `nsys stats` says of each kernel name; 2022.4 has one row per name and launch size."""
    totals: Totals = {}
    for row in nsys_report(KERNEL_SUMMARY, path, folder):
        count, total_ns = totals.get(row["Name"], (0, 0))
        totals[row["Name"]] = count + int(row["Instances"]), total_ns + int(row["Total Time (ns)"])
    return totals


def plain_kernels(path: Path) -> Totals:
    """Return the same sums over the table of kernels, in plain Python."""
    totals: Totals = {}
    for (_, name), (count, total_ns) in kernel_totals(path).items():
        known = totals.get(name, (0, 0))
        totals[name] = known[0] + count, known[1] + total_ns
    return totals


def analysis(path: Path) -> dict[str, list[dict[str, object]]]:
    """Return the report of `cptrace analyze` over the whole trace."""
    if importlib.util.find_spec("cptrace.__main__") is None:
        pytest.skip("this checkout has no cptrace command")
    return json.loads(run(sys.executable, "-m", "cptrace", "analyze", str(path), *ANALYZE_OPTIONS).stdout)


ANALYZE_OPTIONS = ("--format", "json", "--window", "all")


def analyzed_kernels(path: Path) -> Totals:
    """Return what `cptrace analyze` says of each kernel name, summed over ranks.

    Its table also has copies, sets of memory and whole CUDA graphs, which `nsys stats` counts in other reports.
    """
    counts: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for row in (each for each in analysis(path)["kernels"] if each["kind"] == "kernel"):
        counts[row["name"]] += row["count"]
        totals[row["name"]] += row["total_ns"]
    return {name: (counts[name], totals[name]) for name in counts}


@pytest.fixture
def synthetic(tmp_path: Path) -> Path:
    """Return a synthetic export of two processes whose correlation ids collide."""
    path = tmp_path / "source" / "synthetic.sqlite"
    path.parent.mkdir()
    write_synthetic(path, 4_000, 4_400, 800, n_steps=4)
    return path


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Return a report that `cptrace run` has just written."""
    if importlib.util.find_spec("cptrace.__main__") is None:
        pytest.skip("this checkout has no cptrace command")
    path = tmp_path / "source" / "ring.sqlite"
    path.parent.mkdir()
    run(sys.executable, "-m", "cptrace", "run", "--scheme", "ring", "--clock", "virtual", "-o", str(path))
    return path


READERS = [pytest.param(plain_kernels, id="table"), pytest.param(analyzed_kernels, id="cptrace")]


@pytest.mark.parametrize("ours", READERS)
@pytest.mark.parametrize("path", PUBLIC)
def test_kernel_times_of_public_traces_are_equal(path: Path, ours: Callable[[Path], Totals], tmp_path: Path):
    assert ours(path) == nsys_kernels(path, tmp_path)


@pytest.mark.parametrize("ours", READERS)
@pytest.mark.parametrize("path", SAMPLES)
def test_kernel_times_of_samples_are_equal(path: Path, ours: Callable[[Path], Totals], tmp_path: Path):
    assert ours(path) == nsys_kernels(path, tmp_path)


@pytest.mark.parametrize("ours", READERS)
def test_kernel_times_of_a_recorded_run_are_equal(
    recorded: Path, ours: Callable[[Path], Totals], tmp_path: Path
):
    assert ours(recorded) == nsys_kernels(recorded, tmp_path)


@pytest.mark.parametrize("ours", READERS)
def test_kernel_times_of_colliding_processes_are_equal(
    synthetic: Path, ours: Callable[[Path], Totals], tmp_path: Path
):
    assert ours(synthetic) == nsys_kernels(synthetic, tmp_path)


@pytest.mark.parametrize("path", WITHOUT_KERNELS)
def test_a_trace_without_kernels_has_no_kernel_times(path: Path, tmp_path: Path):
    copy = tmp_path / path.name
    shutil.copyfile(path, copy)
    report = KERNEL_SUMMARY[nsys_version() >= RENAMED_IN]
    assert "does not contain CUDA kernel data" in run("nsys", "stats", "--report", report, str(copy)).stdout
    assert analyzed_kernels(path) == {}


def nsys_steps(path: Path, folder: Path) -> Steps:
    """Return where `nsys stats` projects the steps; newer versions put the NVTX domain before the name."""
    steps: Steps = defaultdict(list)
    for row in nsys_report(PROJECTION, path, folder):
        if re.search(r"(^|:)step( \d+)?$", row["Name"]):
            duration_ns = int(row["Projected Duration (ns)"])
            steps[int(row["PID"])].append(
                (int(row["Projected Start (ns)"]), duration_ns, int(row["NumGPUOps"]))
            )
    return {pid: sorted(rows) for pid, rows in steps.items()}


def analyzed_steps(path: Path) -> Steps:
    """Return the same from `cptrace analyze`."""
    report = analysis(path)
    pid_of_rank = {row["rank"]: row["pid"] for row in report["ranks"]}
    steps: Steps = defaultdict(list)
    for row in report["steps"]:
        steps[pid_of_rank[row["rank"]]].append((row["start_ns"], row["window_ns"], row["n_ops"]))
    return {pid: sorted(rows) for pid, rows in steps.items()}


def test_steps_lie_where_nsys_projects_them(synthetic: Path, tmp_path: Path):
    """A step runs on the device from the first to the last op that was launched inside its range."""
    steps = analyzed_steps(synthetic)
    assert steps == nsys_steps(synthetic, tmp_path)
    assert sum(map(len, steps.values())) == 8


def test_steps_of_a_recorded_run_lie_where_nsys_projects_them(recorded: Path, tmp_path: Path):
    steps = analyzed_steps(recorded)
    assert steps == nsys_steps(recorded, tmp_path)
    assert steps


@pytest.mark.parametrize("path", SAMPLES)
def test_steps_of_samples_lie_where_nsys_projects_them(path: Path, tmp_path: Path):
    assert analyzed_steps(path) == nsys_steps(path, tmp_path)


@pytest.mark.parametrize("path", [*PUBLIC, *SAMPLES])
def test_nsys_leaves_the_copy_as_it_was(path: Path, tmp_path: Path):
    """Documents that reading is safe: were this to fail, users would find their reports changed."""
    nsys_kernels(path, tmp_path)
    with closing(connect(tmp_path / path.name)) as connection:
        assert connection.execute("PRAGMA quick_check").fetchone() == ("ok",)
    assert (tmp_path / path.name).read_bytes() == path.read_bytes()
