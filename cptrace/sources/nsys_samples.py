"""What an Nsight Systems export samples and counts beside device work: activity of the GPU's units, allocations.

Source: the tables GPU_METRICS, TARGET_INFO_GPU_METRICS and CUDA_GPU_MEMORY_USAGE_EVENTS in "SQLite Schema Reference" of
the Nsight Systems user guide, and the enumerations that exports hold.
"""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np
import pandas as pd

from cptrace import schema
from cptrace.intervals import Int64Array
from cptrace.sources.columns import category
from cptrace.sources.sqlite_columns import SqliteFile

METRICS: Final = "GPU_METRICS"
METRIC_NAMES: Final = "TARGET_INFO_GPU_METRICS"
MEMORY: Final = "CUDA_GPU_MEMORY_USAGE_EVENTS"

_PATTERNS: Final = (
    ("sm_active", re.compile(r"(?i)^SMs? Active\b")),
    ("tensor_active", re.compile(r"(?i)^(SM )?Tensor (Active|Core Active|Pipe Active)\b")),
)
_DEVICE_MASK: Final = 0xFF  # the lowest byte of a metric's type is the GPU's number
_PERCENT: Final = 100.0
_DEVICE_MEMORY: Final = (2, 5)  # allocated, and static
_ALLOCATION: Final = 0


def read_samples(file: SqliteFile) -> pd.DataFrame:
    """Return the samples of SM and tensor core activity, none where the file has none.

    Args:
        file: Export to look into.
    """
    needed = {
        METRICS: {"timestamp", "typeId", "metricId", "value"},
        METRIC_NAMES: {"typeId", "metricId", "metricName"},
    }
    if not _has(file, needed):
        return schema.empty_frame(schema.GPU_SAMPLES)
    names = file.rows(f"SELECT DISTINCT typeId, metricId, metricName FROM {METRIC_NAMES}")
    wanted = {(kind, metric): found for kind, metric, text in names if (found := _metric(text)) is not None}
    if not wanted:
        return schema.empty_frame(schema.GPU_SAMPLES)
    ids = ", ".join(str(int(metric)) for metric in sorted({metric for _, metric in wanted}))
    rows = file.rows(
        f"SELECT timestamp, typeId, metricId, CAST(value AS REAL) FROM {METRICS} WHERE metricId IN ({ids})"
        " AND timestamp IS NOT NULL AND typeId IS NOT NULL AND value IS NOT NULL"
    )
    return _samples([row for row in rows if (row[1], row[2]) in wanted], wanted)


def _has(file: SqliteFile, needed: dict[str, set[str]]) -> bool:
    return all(columns <= file.columns.get(table, frozenset()) for table, columns in needed.items())


def _metric(text: Any) -> str | None:
    return next((name for name, pattern in _PATTERNS if isinstance(text, str) and pattern.search(text)), None)


def _samples(rows: list[tuple[Any, ...]], wanted: dict[tuple[int, int], str]) -> pd.DataFrame:
    times, kinds, metrics, values = zip(*rows, strict=True) if rows else ((), (), (), ())
    names = [name for name, _ in _PATTERNS]
    codes = [names.index(wanted[key]) for key in zip(kinds, metrics, strict=True)]
    columns = {
        "time_ns": np.array(times, np.int64),
        "device": np.array(kinds, np.int64) & _DEVICE_MASK,
        "metric": category(np.array(codes, np.int64), names),
        "share": np.array(values, np.float64) / _PERCENT,
    }
    return schema.make_frame(schema.GPU_SAMPLES, columns)


def read_allocations(file: SqliteFile) -> pd.DataFrame:
    """Return how allocations and releases change the memory in use on each device, none where that was not traced.

    Args:
        file: Export to look into.
    """
    columns = {"start", "globalPid", "deviceId", "address", "bytes", "memKind", "memoryOperationType"}
    if not _has(file, {MEMORY: columns}):
        return schema.empty_frame(schema.ALLOCATIONS)
    kinds = ", ".join(map(str, _DEVICE_MEMORY))
    rows = file.rows(
        f"SELECT start, globalPid, deviceId, address, bytes, memoryOperationType FROM {MEMORY}"
        f" WHERE memKind IN ({kinds}) AND start IS NOT NULL AND globalPid IS NOT NULL AND deviceId IS NOT NULL"
        " ORDER BY start, memoryOperationType DESC"
    )
    frame = pd.DataFrame(rows, columns=["time_ns", "process", "device", "address", "bytes", "operation"])
    is_release = (frame["operation"] != _ALLOCATION).to_numpy()
    return schema.make_frame(
        schema.ALLOCATIONS,
        {
            **{name: frame[name].to_numpy(np.int64) for name in ("time_ns", "process", "device")},
            "change_bytes": _changes(frame, is_release),
        },
    )


def _changes(frame: pd.DataFrame, is_release: Any) -> Int64Array:
    """Return what each row adds: a release takes away what was allocated at its address, whatever size it states."""
    size = frame["bytes"].fillna(0).to_numpy(np.int64)
    places = frame.assign(bytes=np.where(is_release, 0, size)).groupby(
        ["process", "device", "address"], sort=False
    )
    before = places["bytes"].shift(fill_value=0).to_numpy(np.int64)
    return np.where(is_release, -before, size)
