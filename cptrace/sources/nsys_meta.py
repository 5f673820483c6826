"""What an Nsight Systems export says about itself: versions, devices, capture problems, and our own run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from cptrace import labels
from cptrace.errors import TraceError
from cptrace.sources.nsys_sqlite import DIAGNOSTICS, GPU_INFO, METADATA, NAME, SESSION
from cptrace.sources.sqlite_columns import SqliteFile, decode_text
from cptrace.trace import Note, TraceMeta

_MAX_DIAGNOSTICS: Final = 5


@dataclass(frozen=True, slots=True)
class FileInfo:
    """What a file says about itself.

    Attributes:
        metadata: Names and values of its metadata tables.
        run: What an instrumented run recorded about itself, empty where there is none.
        device_names: Name of each CUDA device.
        recorded_ranks: Rank of each (pid, device) that the run recorded.
        is_time_shifted: The export was asked to shift times, which may make them negative.
    """

    metadata: Mapping[str, str]
    run: Mapping[str, Any]
    device_names: Mapping[int, str]
    recorded_ranks: Mapping[tuple[int, int], int]
    is_time_shifted: bool


def read_info(file: SqliteFile) -> FileInfo:
    """Return what a file says about itself.

    Args:
        file: Export to look into.

    Raises:
        TraceError: What a run recorded about itself cannot be understood.
    """
    metadata = _metadata(file)
    run = _run(file, metadata.get(labels.RUN_METADATA_KEY))
    return FileInfo(
        metadata=metadata,
        run=MappingProxyType(run),
        device_names=_device_names(file),
        recorded_ranks=_recorded_ranks(file, run.get("ranks", [])),
        is_time_shifted=metadata.get("EXPORT_CONFIG_TIME_SHIFT", "0") not in ("", "0"),
    )


def make_meta(file: SqliteFile, info: FileInfo, missing: tuple[str, ...], notes: list[Note]) -> TraceMeta:
    """Return where a trace comes from.

    Args:
        file: Export that it is from.
        info: What the file says about itself.
        missing: Expected tables that it lacks.
        notes: What a reader should know.
    """
    start = (
        file.rows(f"SELECT utcEpochNs FROM {SESSION}")
        if "utcEpochNs" in file.columns.get(SESSION, ())
        else []
    )
    return TraceMeta(
        path=decode_text(os.fsencode(file.path)),  # names of files need not be UTF-8, reports are
        format=NAME,
        tool_version=info.metadata.get("EXPORT_PRODUCT_VERSION"),
        schema_version=info.metadata.get("EXPORT_SCHEMA_VERSION"),
        device_kind=labels.CPU_EMULATED
        if info.run.get("device_kind") == labels.CPU_EMULATED
        else labels.CUDA,
        clock=info.run.get("clock"),
        run=info.run,
        session_start_utc_ns=start[0][0] if start else None,
        missing_tables=missing,
        notes=(*notes, *_diagnostics(file)),
    )


def _metadata(file: SqliteFile) -> dict[str, str]:
    rows: dict[str, str] = {}
    for table in METADATA:
        if {"name", "value"} <= file.columns.get(table, frozenset()):
            rows.update(file.rows(f"SELECT name, CAST(value AS TEXT) FROM {table} WHERE value IS NOT NULL"))
    return rows


def _run(file: SqliteFile, text: str | None) -> dict[str, Any]:
    """Return what an instrumented run recorded about itself, empty where there is none."""
    if text is None:
        return {}
    try:
        run = json.loads(text)
    except ValueError as error:
        raise TraceError(
            f"{file.path}: its row {labels.RUN_METADATA_KEY} is not JSON ({error}); record the run again"
        ) from error
    if not isinstance(run, dict) or run.get("schema") != labels.RUN_METADATA_SCHEMA:
        raise TraceError(
            f"{file.path}: its row {labels.RUN_METADATA_KEY} is not of schema {labels.RUN_METADATA_SCHEMA};"
            " it needs another version of cptrace"
        )
    return run


def _recorded_ranks(file: SqliteFile, entries: Any) -> dict[tuple[int, int], int]:
    """Return the rank of each (pid, device) that a run recorded."""
    try:
        ranks = {(entry["pid"], entry["device"]): entry["rank"] for entry in entries}
        is_plain = all(
            type(number) is int and 0 <= number < 2**31 for pair in ranks for number in (*pair, ranks[pair])
        )
        is_one_to_one = len(entries) == len(ranks) == len(set(ranks.values()))
    except (KeyError, TypeError):
        is_plain = is_one_to_one = False
    if not (is_plain and is_one_to_one):
        raise TraceError(
            f"{file.path}: the ranks in its row {labels.RUN_METADATA_KEY} are not one rank for each pid and device;"
            " record the run again"
        )
    return ranks


def _device_names(file: SqliteFile) -> dict[int, str]:
    """Return the name of each CUDA device; other GPUs of the machine are listed beside them."""
    columns = file.columns.get(GPU_INFO, frozenset())
    if not {"id", "name"} <= columns:
        return {}
    ordinal = "coalesce(cuDevice, id)" if "cuDevice" in columns else "id"
    rows = file.rows(f"SELECT {ordinal}, name FROM {GPU_INFO} ORDER BY id DESC")
    return {device: name for device, name in rows if device is not None and isinstance(name, str)}


def _diagnostics(file: SqliteFile) -> list[Note]:
    """Return what Nsight Systems itself warned about during the capture."""
    if not {"severity", "text"} <= file.columns.get(DIAGNOSTICS, frozenset()):
        return []
    rows = file.rows(
        f"SELECT text, count(*) FROM {DIAGNOSTICS} WHERE severity IN (2, 3) AND text IS NOT NULL"
        f" GROUP BY text ORDER BY max(severity) DESC, count(*) DESC, text LIMIT {_MAX_DIAGNOSTICS}"
    )
    return [
        Note("capture-diagnostic", f"Nsight Systems said: {' '.join(text.split())}", count)
        for text, count in rows
    ]
