"""What a PyTorch profiler trace says about itself: versions, time 0, devices and its place in a distributed job."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from cptrace.sources.kineto_events import as_integer
from cptrace.sources.kineto_text import Document, decode_value
from cptrace.sources.sqlite_columns import decode_text

_MAX_RANK: Final = 2**31


@dataclass(frozen=True, slots=True)
class FileInfo:
    """What a file says about itself.

    Attributes:
        path: Path of the file.
        schema_version: Version of its layout.
        base_ns: UTC of time 0 in ns since 1970, where times are relative.
        trace_name: Path that it was exported to.
        device_names: Name of each GPU of the machine.
        rank: Rank of the process in its job; None where it is not said, or said to be what no rank can be.
        impossible_rank: What the file says its rank to be, as JSON, where no rank can be that.
        world_size: Number of ranks in the job; 0 where it is not said.
        own: What our own export adds; empty for other traces.
    """

    path: Path
    schema_version: str | None
    base_ns: int | None
    trace_name: str | None
    device_names: Mapping[int, str]
    rank: int | None
    world_size: int
    impossible_rank: str | None = None
    own: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def recorded_ranks(self) -> dict[tuple[int, int], tuple[int, bool]]:
        """Rank of each (process, device), and whether it was recorded with the run, where our own export says it."""
        entries = self.own.get("ranks")
        rows = [row for row in entries if isinstance(row, dict)] if isinstance(entries, list) else []
        return {
            (pid, device): (rank, row.get("is_recorded") is True)
            for row in rows
            for pid, device, rank in [[as_integer(row.get(name)) for name in ("pid", "device", "rank")]]
            if pid is not None and device is not None and rank is not None and 0 <= rank < _MAX_RANK
        }

    @property
    def display_path(self) -> str:
        """The path as text; names of files need not be UTF-8, reports are."""
        return decode_text(os.fsencode(self.path))


def read_info(path: Path, document: Document) -> FileInfo:
    """Return what a file says about itself; what is of another type than it should be counts as missing.

    Args:
        path: Path of the file.
        document: Its top level.
    """
    version, name = decode_value(document.schema_version), decode_value(document.trace_name)
    job = decode_value(document.distributed_info)
    job = job if isinstance(job, dict) else {}
    own = decode_value(document.cptrace)
    rank, world_size = as_integer(job.get("rank")), as_integer(job.get("world_size"))
    is_possible = rank is not None and 0 <= rank < _MAX_RANK
    return FileInfo(
        path=path,
        schema_version=None if version is None else str(version),
        base_ns=as_integer(decode_value(document.base_time_nanoseconds)),
        trace_name=name if isinstance(name, str) else None,
        device_names=MappingProxyType(_device_names(decode_value(document.device_properties))),
        rank=rank if is_possible else None,
        impossible_rank=None if is_possible or "rank" not in job else json.dumps(job["rank"]),
        world_size=world_size if world_size is not None and 0 <= world_size < _MAX_RANK else 0,
        own=MappingProxyType(own if isinstance(own, dict) else {}),
    )


def _device_names(devices: Any) -> dict[int, str]:
    entries = [entry for entry in devices if isinstance(entry, dict)] if isinstance(devices, list) else []
    named = [(as_integer(entry.get("id")), entry.get("name")) for entry in entries]
    return {number: name for number, name in named if number is not None and isinstance(name, str)}
