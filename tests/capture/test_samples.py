"""The sample reports are the files that the manifest describes, and virtual ones can be made again."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.emulated_report import pass_overlap, query, run_metadata

SAMPLES = Path(__file__).resolve().parents[2] / "samples"
MANIFEST: list[dict[str, str]] = json.loads((SAMPLES / "manifest.json").read_text(encoding="utf-8"))
EACH = pytest.mark.parametrize("entry", MANIFEST, ids=[entry["file"] for entry in MANIFEST])
MAX_BYTES = 256 * 1024

TIMED_TABLES = {
    "CUPTI_ACTIVITY_KIND_KERNEL": "start, end, deviceId, streamId, correlationId, globalPid",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start, end, globalTid, correlationId",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": "start, end, streamId, eventId, eventSyncId, correlationId, globalPid",
    "CUPTI_ACTIVITY_KIND_CUDA_EVENT": "streamId, eventId, eventSyncId, correlationId, globalPid",
    "NVTX_EVENTS": "start, end, globalTid, int64Value",
}


@EACH
def test_a_sample_is_the_file_that_the_manifest_describes(entry: dict[str, str]) -> None:
    data = (SAMPLES / entry["file"]).read_bytes()
    assert hashlib.sha256(data).hexdigest() == entry["sha256"]
    assert len(data) <= MAX_BYTES


def test_manifest_folder_and_readme_list_the_same_files() -> None:
    named = {entry["file"] for entry in MANIFEST}
    assert {path.name for path in SAMPLES.glob("*.sqlite")} == named
    readme = (SAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in readme for name in named)


@EACH
def test_a_sample_says_how_it_was_run_and_passed_its_checks(entry: dict[str, str]) -> None:
    run = run_metadata(SAMPLES / entry["file"])
    assert run["checks"]["running_max"]["passed"]
    assert run["checks"]["parity"]
    assert all(row["passed"] for row in run["checks"]["parity"])
    assert f"--clock {run['clock']}" in entry["command"]


def timed_rows(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Return all times and what they belong to, by table."""
    return {table: query(path, f"SELECT {columns} FROM {table}") for table, columns in TIMED_TABLES.items()}


@pytest.mark.parametrize(
    "name", ["ring-virtual.sqlite", "te-causal-virtual.sqlite", "all-gather-sliced-virtual.sqlite"]
)
def test_a_virtual_sample_can_be_made_again(name: str, tmp_path: Path) -> None:
    (entry,) = [entry for entry in MANIFEST if entry["file"] == name]
    arguments = [*shlex.split(entry["command"])[1:], "--no-check", "--format", "json"]
    subprocess.run(
        [sys.executable, "-m", "cptrace", *arguments], cwd=tmp_path, check=True, capture_output=True
    )
    assert timed_rows(tmp_path / name) == timed_rows(SAMPLES / name)


def test_the_samples_show_what_they_say() -> None:
    def share(name: str, pass_name: str) -> list[float]:
        return [part / whole for part, whole in pass_overlap(SAMPLES / name, pass_name).values()]

    assert share("ring-virtual.sqlite", "forward") == [1.0] * 4
    assert share("ring-gqa-forward-virtual.sqlite", "forward") == [1.0] * 4
    assert max(share("ring-slow-link-virtual.sqlite", "forward")) < 0.5
    assert min(share("ring-paced.sqlite", "forward")) > 0.5
    causal = share("ring-causal-virtual.sqlite", "backward")
    assert causal[0] < causal[3]
    assert max(share("ulysses-virtual.sqlite", "forward")) < 0.01
    assert min(share("ulysses-chunked-virtual.sqlite", "forward")) > 0.5
    assert max(share("all-gather-virtual.sqlite", "forward")) == 0.0
    assert min(share("all-gather-sliced-virtual.sqlite", "forward")) > 0.85
    zigzag, te = (share(f"{name}-causal-virtual.sqlite", "backward") for name in ("zigzag-ring", "te"))
    assert max(zigzag) - min(zigzag) < 0.01
    assert min(te) > max(zigzag) > 0.8


@pytest.mark.nsys
@EACH
def test_nsight_systems_sums_the_same_kernel_times(entry: dict[str, str], tmp_path: Path) -> None:
    if shutil.which("nsys") is None:
        pytest.skip("nsys is not on PATH")
    path = Path(shutil.copy(SAMPLES / entry["file"], tmp_path))
    version = subprocess.run(["nsys", "--version"], capture_output=True, text=True, check=True).stdout
    is_old = int(re.search(r"version (\d{4})\.", version)[1]) < 2023
    report = "gpukernsum" if is_old else "cuda_gpu_kern_sum"
    command = ["nsys", "stats", "--report", report, "--format", "csv", "--quiet", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    table = done.stdout[done.stdout.index("Time (%)") :]
    totals = {
        row["Name"]: (int(row["Instances"]), int(row["Total Time (ns)"]))
        for row in csv.DictReader(io.StringIO(table))
        if row["Name"]
    }
    expected = query(
        path,
        "SELECT value, COUNT(*), SUM(end - start) FROM CUPTI_ACTIVITY_KIND_KERNEL "
        "JOIN StringIds ON id = demangledName GROUP BY value",
    )
    assert totals == {name: (n, total) for name, n, total in expected}
