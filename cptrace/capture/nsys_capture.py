"""Runs under `nsys profile`, and makes one report of what it recorded and what the run says about itself."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final, NamedTuple

from cptrace.capture.launched import find_launched
from cptrace.capture.launcher import FOLLOWED, RunOutcome, child_command, require_ready, run_child
from cptrace.capture.nsys_command import (
    FLAGS,
    REPORT_SUFFIX,
    NoNsys,
    NsysTool,
    find_nsys,
    flags_for,
    lost_ranges,
    nsys_command,
)
from cptrace.capture.run_spec import CUDA_DEVICE, RunSpec
from cptrace.errors import RenderError, RunError, UsageError
from cptrace.labels import CPU_EMULATED, CUDA, DOMAIN, RUN_METADATA_KEY
from cptrace.sources.nsys_rep import export_report

NAME: Final = "nsys"

# Bytes. The names of sockets begin with it and have at most 107: nsys 2022.4 starts with 86, not with 134 (measured).
_LONGEST_TEMPORARY: Final = 64
_VIRTUAL: Final = "virtual"
_RUN_TABLE: Final = "META_DATA_CAPTURE"
# Ends nsys, and by that what it runs, when this process dies without doing so.
_WITH_PARENT: Final = (
    "import ctypes,os,sys;ctypes.CDLL(None).prctl(1,15,0,0,0);"
    "os.getppid()==int(sys.argv[1]) or sys.exit(1);os.execvp(sys.argv[2],sys.argv[2:])"
)


def capture(spec: RunSpec, output: Path, on_progress: Callable[[str], None]) -> RunOutcome:
    """Run `spec` under `nsys profile` and write what it recorded to `output`, as SQLite with the run's description.

    The report of nsys itself lies beside it, with the suffix `.nsys-rep`.

    Args:
        spec: What to run.
        output: Where the report goes.
        on_progress: Called with a line about what happens now.

    Raises:
        UsageError: The options cannot be meant.
        RunError: The run, or its recording, could not start or did not finish.
        RenderError: The report could not be written.
    """
    require_ready(spec)
    with tempfile.TemporaryDirectory(prefix="cptrace-") as folder:
        made = record_into(Path(folder), spec, on_progress)
        _move(made.export, output)
        _move(made.report, original_of(output))
    return RunOutcome(output, made.metadata)


class Recorded(NamedTuple):
    """What a run under nsys leaves: its report, the export with the run's description, and the device's own record."""

    report: Path
    export: Path
    own_record: Path
    metadata: Mapping[str, Any]


def record_into(folder: Path, spec: RunSpec, on_progress: Callable[[str], None]) -> Recorded:
    """Run `spec` under `nsys profile` and return what that leaves in a folder.

    Args:
        folder: Empty folder.
        spec: What to run; it must be able to start.
        on_progress: Called with a line about what happens now.

    Raises:
        CptraceError: As `capture`.
    """
    device_kind = CUDA if spec.device == CUDA_DEVICE else CPU_EMULATED
    tool = require_nsys(spec, device_kind)
    report, export, own_record = (
        folder / f"report{REPORT_SUFFIX}",
        folder / "export.sqlite",
        folder / "own.sqlite",
    )
    command = command_of(tool, spec, device_kind, report, own_record)
    on_progress("starting under nsys")
    outcome = run_child(
        _with_parent([*command, *FOLLOWED, "--parent-pid", "0"]),
        own_record,
        on_progress,
        _temporary_files_in(folder / "tmp"),
    )
    on_progress("nsys export")
    _export(report, export)
    has_ranges = _has_ranges(export)
    if not has_ranges and device_kind == CPU_EMULATED:
        raise RunError(_no_ranges(tool))
    metadata = _metadata(outcome, tool, device_kind, has_ranges=has_ranges)
    add_run_metadata(export, metadata)
    return Recorded(report, export, own_record, metadata)


def original_of(output: Path) -> Path:
    """Return where the report of nsys itself lies, beside its export."""
    return output.with_name(output.name + REPORT_SUFFIX)


def require_nsys(spec: RunSpec, device_kind: str) -> NsysTool:
    """Return the `nsys` that can record a run.

    Args:
        spec: What to run.
        device_kind: `cuda` or `cpu-emulated`.

    Raises:
        UsageError: Its clock has times that nsys cannot see, or its processes run already.
        RunError: There is none, or it would record no ranges.
    """
    launched = find_launched(os.environ)
    if launched is not None:
        raise UsageError(_around_launcher(launched.by, device_kind))
    if device_kind == CPU_EMULATED and spec.clock == _VIRTUAL:
        raise UsageError(
            "--profiler nsys --clock virtual: nsys sees the machine's time, and virtual times are computed; use --clock"
            " paced, or --profiler recorder"
        )
    tool = find_nsys()
    if isinstance(tool, NoNsys):
        raise RunError(
            f"--profiler nsys needs Nsight Systems, and {tool.reason}; {tool.mend}, or use --profiler recorder"
        )
    reason = lost_ranges(nvtx_version(), tool)
    if reason is not None and device_kind == CPU_EMULATED:
        raise RunError(reason)
    return tool


def _around_launcher(launcher: str, device_kind: str) -> str:
    """Return why nsys cannot record processes that run already, and the command that gives one report per node."""
    flags = " ".join(flag.text for flag in FLAGS if device_kind in flag.devices and not flag.is_optional)
    return (
        f"--profiler nsys: {launcher} has started this process already; put nsys around the launcher, once per node:"
        f" nsys profile {flags} --output=report-node%q{{SLURM_NODEID}} torchrun ... cptrace run --profiler recorder"
        " (NODE_RANK in place of SLURM_NODEID where that is set)"
    )


def command_of(tool: NsysTool, spec: RunSpec, device_kind: str, report: Path, recorded: Path) -> list[str]:
    """Return the whole command of a run under nsys.

    Args:
        tool: The `nsys` that shall record it.
        spec: What to run.
        device_kind: `cuda` or `cpu-emulated`.
        report: Report that nsys writes.
        recorded: Where the run writes what it recorded itself.
    """
    asked = [] if device_kind == CPU_EMULATED else ["--profiler", NAME]
    return nsys_command(tool, device_kind, report, [*child_command(spec, recorded), *asked])


def nvtx_version() -> str | None:
    """Return the version of the Python package nvtx, None where it is not installed."""
    try:
        return importlib.metadata.version("nvtx")
    except importlib.metadata.PackageNotFoundError:
        return None


def add_run_metadata(export: Path, metadata: Mapping[str, Any]) -> None:
    """Add what a run says about itself to an export of ours.

    Args:
        export: Export that this run made.
        metadata: The run's description, schema `cptrace.run/1`.
    """
    text = json.dumps(metadata, separators=(",", ":"), allow_nan=False)
    try:
        with closing(sqlite3.connect(export, isolation_level=None)) as connection:
            connection.execute(f"CREATE TABLE IF NOT EXISTS {_RUN_TABLE} (name TEXT NOT NULL, value TEXT)")
            connection.execute(
                f"INSERT INTO {_RUN_TABLE} (name, value) VALUES (?, ?)", (RUN_METADATA_KEY, text)
            )
    except sqlite3.Error as error:
        raise RenderError(f"cannot add the run's description to the export: {error}") from error


def _with_parent(command: list[str]) -> list[str]:
    return [sys.executable, "-c", _WITH_PARENT, str(os.getpid()), *command]


def _temporary_files_in(folder: Path) -> dict[str, str]:
    """Return what makes nsys keep its temporary files in a folder of the run's own, so that they go with that.

    Ended by force, while it still makes a report of minutes of recording that nobody wants, it would leave them.
    """
    if len(os.fsencode(folder)) > _LONGEST_TEMPORARY:
        return {}
    folder.mkdir()
    return {"TMPDIR": str(folder)}


def _export(report: Path, export: Path) -> None:
    if not report.exists():
        raise RunError(
            "nsys ended without a report; run the command that --dry-run prints to see what it says"
        )
    export_report(report, export)


def _has_ranges(export: Path) -> bool:
    """Return whether a report has ranges of ours: of the domain that only we use."""
    with closing(sqlite3.connect(export)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        if "NVTX_EVENTS" not in tables:
            return False
        query = (
            "SELECT 1 FROM NVTX_EVENTS d JOIN NVTX_EVENTS r ON r.domainId = d.domainId AND r.eventType = 59"
            " WHERE d.eventType = 75 AND d.text = ? LIMIT 1"
        )
        return connection.execute(query, (DOMAIN,)).fetchone() is not None


def _no_ranges(tool: NsysTool) -> str:
    return (
        f"nsys {tool.version} recorded none of the run's NVTX ranges (Python nvtx {nvtx_version()}), so its report"
        " shows nothing of the run; pip install 'nvtx==0.2.11', or use --profiler recorder"
    )


def _metadata(
    outcome: Mapping[str, Any], tool: NsysTool, device_kind: str, *, has_ranges: bool
) -> dict[str, Any]:
    """Return the run's description with the processes as nsys saw them, and how they were recorded."""
    metadata = dict(outcome["run"])
    pids = outcome.get("pids") or []
    ranks = metadata["ranks"]
    if len(pids) == len(ranks):  # one process for each rank
        metadata["ranks"] = [{**rank, "pid": pid} for rank, pid in zip(ranks, pids, strict=True)]
    effects = [flag.effect for flag in flags_for(tool, device_kind) if flag.effect]
    metadata["capture"] = {
        "profiler": NAME,
        "tool_version": tool.version,
        "flags": [flag.text for flag in flags_for(tool, device_kind)],
        "observer_effects": effects,
        "has_ranges": has_ranges,
    }
    return metadata


def _move(source: Path, target: Path) -> None:
    """Put a file into its place, whole or not at all, from another file system too."""
    partial = target.with_name(f".{target.name}.partial")
    try:
        partial.write_bytes(source.read_bytes())
        os.replace(partial, target)
    except OSError as error:
        raise RenderError(f"cannot write the report {target}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
