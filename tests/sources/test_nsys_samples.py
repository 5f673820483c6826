"""Counters of the GPU and allocations of an export, in any version's names."""

from __future__ import annotations

from pathlib import Path

import pytest

import cptrace
from tests.support.tiny_export import TinyExport, global_pid

GPU1 = 0x0A00_0000_0001
"""A type whose lowest byte says that it is of GPU 1."""


def sampled(sm_name: str = "SMs Active [Throughput %]") -> TinyExport:
    export = TinyExport().kernel("gemm", 0, 40, launch=0)
    for metric, name in ((3, sm_name), (5, "Tensor Active [Throughput %]"), (9, "SM Issue [Throughput %]")):
        export.add("TARGET_INFO_GPU_METRICS", typeId=GPU1, sourceId=1, metricId=metric, metricName=name)
    for time, metric, value in ((10, 3, 80), (10, 5, 20), (10, 9, 55), (20, 3, 100)):
        export.add("GPU_METRICS", timestamp=time, typeId=GPU1, metricId=metric, value=value)
    return export


@pytest.mark.parametrize("name", ["SMs Active [Throughput %]", "SM Active [Throughput %]", "SMs Active"])
def test_activity_is_a_fraction_of_the_device_that_the_type_names(name: str, tmp_path: Path) -> None:
    samples = cptrace.open_trace(sampled(name).write(tmp_path / "metrics.sqlite")).gpu_samples
    assert samples[["time_ns", "device", "metric", "share"]].to_numpy().tolist() == [
        [10, 1, "sm_active", 0.8],
        [10, 1, "tensor_active", 0.2],
        [20, 1, "sm_active", 1.0],
    ]


def test_without_such_a_metric_or_table_there_are_no_samples(tmp_path: Path) -> None:
    assert cptrace.open_trace(sampled("Unrelated").write(tmp_path / "a.sqlite")).gpu_samples[
        "metric"
    ].tolist() == ["tensor_active"]
    plain = TinyExport().kernel("gemm", 0, 40)
    trace = cptrace.open_trace(plain.write(tmp_path / "b.sqlite"))
    assert trace.gpu_samples.empty
    assert trace.allocations.empty


def allocate(
    export: TinyExport,
    start: int,
    address: int,
    size: int,
    *,
    kind: int = 2,
    operation: int = 0,
    pid: int = 100,
) -> TinyExport:
    return export.add(
        "CUDA_GPU_MEMORY_USAGE_EVENTS",
        start=start,
        globalPid=global_pid(pid),
        deviceId=0,
        address=address,
        bytes=size,
        memKind=kind,
        memoryOperationType=operation,
    )


def test_a_release_takes_away_what_was_allocated_at_its_address(tmp_path: Path) -> None:
    """Newer versions state no size at a release; memory of the host does not count."""
    export = TinyExport().kernel("gemm", 0, 40)
    for row in ((1, 8, 100, 0), (2, 16, 50, 0), (3, 8, 0, 1), (4, 8, 70, 0), (5, 8, 70, 1), (6, 99, 1, 1)):
        allocate(export, *row[:3], operation=row[3])
    allocate(export, 2, 64, 1_000, kind=1)
    allocations = cptrace.open_trace(export.write(tmp_path / "memory.sqlite")).allocations
    assert allocations["change_bytes"].tolist() == [100, 50, -100, 70, -70, 0]
