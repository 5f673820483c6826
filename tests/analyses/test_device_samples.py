"""Utilisation by counters, and peak memory by allocations, for each rank.

rank 0   step [10           40)            step [60        90)
samples  5   15   25   35        50   65        85   95
SM %     0   50  100   90         0  100       60    0
"""

from __future__ import annotations

from pathlib import Path

import pytest

import cptrace
from cptrace.renderers import RenderOptions, find_renderer
from tests.sources.test_nsys_samples import allocate
from tests.support.tiny_export import TinyExport

SAMPLES = {5: 0, 15: 50, 25: 100, 35: 90, 50: 0, 65: 100, 85: 60, 95: 0}


def export_of(*, device: int = 0) -> TinyExport:
    export = TinyExport().range("step 0", 0, 2).range("step 1", 50, 52)
    export.kernel("gemm", 10, 40, launch=1).kernel("gemm", 60, 90, launch=51)
    export.add("TARGET_INFO_GPU_METRICS", typeId=device, sourceId=1, metricId=3, metricName="SMs Active")
    for time, value in SAMPLES.items():
        export.add("GPU_METRICS", timestamp=time, typeId=device, metricId=3, value=value)
    return export


def test_the_mean_is_over_the_samples_in_the_window(tmp_path: Path) -> None:
    report = cptrace.analyze(export_of().write(tmp_path / "a.sqlite"))
    (row,) = report.rows("ranks")
    assert row["sm_active"] == pytest.approx((0.5 + 1.0 + 0.9 + 1.0 + 0.6) / 5)
    assert row["tensor_active"] is None
    assert "SM activity, sampled: rank 0 80.0 %" in find_renderer("text").render(report, RenderOptions())


def test_another_devices_samples_are_not_this_ranks(tmp_path: Path) -> None:
    (row,) = cptrace.analyze(export_of(device=1).write(tmp_path / "a.sqlite")).rows("ranks")
    assert row["sm_active"] is None


@pytest.mark.parametrize(("recorded", "shown"), [(None, 150), ([999], 999)])
def test_peak_memory_is_the_runs_own_figure_else_that_of_its_allocations(
    recorded: list[int] | None, shown: int, tmp_path: Path
) -> None:
    export = TinyExport().kernel("gemm", 0, 40)
    for start, address, size, operation in ((1, 8, 100, 0), (2, 16, 50, 0), (3, 8, 0, 1), (4, 8, 70, 0)):
        allocate(export, start, address, size, operation=operation)
    allocate(export, 1, 8, 5_000, pid=200)
    if recorded is not None:
        export.run(ranks=[{"rank": 0, "pid": 100, "device": 0}], peak_memory_bytes=recorded)
    (row,) = cptrace.analyze(export.write(tmp_path / "a.sqlite")).rows("ranks")
    assert row["peak_memory_bytes"] == shown
