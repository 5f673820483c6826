"""What a run can be recorded with, and which one to take. `PROFILERS` is the list that help and tests go by."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cptrace.capture import kineto_capture, nsys_capture
from cptrace.capture.launched import find_launched
from cptrace.capture.launcher import RunOutcome, child_command
from cptrace.capture.launcher import run as record
from cptrace.capture.nsys_command import REPORT_SUFFIX, NoNsys, find_nsys, lost_ranges
from cptrace.capture.run_spec import RunSpec
from cptrace.errors import UsageError
from cptrace.labels import CPU_EMULATED, CUDA

AUTO: Final = "auto"

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Profiler:
    """A way to record a run.

    Attributes:
        name: What `--profiler` calls it.
        summary: One line for help.
        devices: Kinds of device that it can record.
        capture: Runs a spec and writes its report.
        plan: Returns the command that `capture` would run.
        rest: Says what `capture` does with what that command leaves, and what the command alone lacks; None where it
            writes the report itself.
    """

    name: str
    summary: str
    devices: tuple[str, ...]
    capture: Callable[[RunSpec, Path, Progress], RunOutcome]
    plan: Callable[[RunSpec, Path, str], list[str]]
    rest: Callable[[Path], str] | None = None


def _plan_recorder(spec: RunSpec, output: Path, _device_kind: str) -> list[str]:
    return child_command(spec, output)


def _plan_nsys(spec: RunSpec, output: Path, device_kind: str) -> list[str]:
    tool = nsys_capture.require_nsys(spec, device_kind)
    recorded = output.with_name(f"{output.stem}.recorder{output.suffix}")
    return nsys_capture.command_of(tool, spec, device_kind, output.with_suffix(REPORT_SUFFIX), recorded)


def _rest_of_nsys(output: Path) -> str:
    original = output.with_suffix(REPORT_SUFFIX)
    return (
        f"cptrace then exports {original} to {output} and adds the run's description, with its clock, to that; the"
        " command alone leaves a report that has neither the description of the run nor its exact clock"
    )


def _plan_kineto(spec: RunSpec, output: Path, _device_kind: str) -> list[str]:
    return kineto_capture.command_of(spec, output)


def _rest_of_kineto(output: Path) -> str:
    return (
        f"cptrace then makes {output} of the rank*.json that torch's profiler leaves beside it, and adds how it was"
        " recorded; the command alone leaves the run's own record there"
    )


RECORDER: Final = Profiler(
    "recorder",
    "the device's own record; on an emulated device exact, on CUDA by events around each operation",
    (CPU_EMULATED, CUDA),
    record,
    _plan_recorder,
)
NSYS: Final = Profiler(
    nsys_capture.NAME,
    "Nsight Systems; of an emulated device it records the ranges in which that says what it does",
    (CPU_EMULATED, CUDA),
    nsys_capture.capture,
    _plan_nsys,
    _rest_of_nsys,
)
KINETO: Final = Profiler(
    kineto_capture.NAME,
    "torch's own profiler, its traces converted to the schema of Nsight Systems",
    (CUDA,),
    kineto_capture.capture,
    _plan_kineto,
    _rest_of_kineto,
)
PROFILERS: Final[tuple[Profiler, ...]] = (RECORDER, NSYS, KINETO)
NAMES: Final = (AUTO, *(profiler.name for profiler in PROFILERS))


@dataclass(frozen=True, slots=True)
class Choice:
    """A profiler, and why it was taken."""

    profiler: Profiler
    reason: str


def choose_profiler(name: str, device_kind: str) -> Choice:
    """Return the profiler to record a run with.

    Args:
        name: `auto`, or the name of one of `PROFILERS`.
        device_kind: `cuda` or `cpu-emulated`.

    Raises:
        UsageError: There is none of that name, or it cannot record that kind of device.
    """
    if name == AUTO:
        return _choose(device_kind)
    for profiler in PROFILERS:
        if profiler.name == name:
            if device_kind not in profiler.devices:
                able = ", ".join(each.name for each in PROFILERS if device_kind in each.devices)
                raise UsageError(
                    f"--profiler {name} cannot record a {device_kind} device; use one of: {able}"
                )
            return Choice(profiler, "as asked for")
    raise UsageError(f"--profiler {name}: choose one of {', '.join(NAMES)}")


def _choose(device_kind: str) -> Choice:
    if device_kind == CPU_EMULATED:
        return Choice(RECORDER, "an emulated device records itself, exactly")
    launched = find_launched(os.environ)
    if launched is not None:
        return Choice(
            RECORDER, f"{launched.by} has started the ranks, and a profiler must be around the launcher"
        )
    tool = find_nsys()
    reason = tool.reason if isinstance(tool, NoNsys) else lost_ranges(nsys_capture.nvtx_version(), tool)
    if reason is None:
        return Choice(NSYS, "Nsight Systems is here, and records ranges")
    return Choice(KINETO, f"torch's profiler, because Nsight Systems cannot: {reason}")


def describe_plan(choice: Choice, spec: RunSpec, output: Path, device_kind: str) -> str:
    """Return what would be run, as lines for a shell.

    Args:
        choice: What it would be recorded with.
        spec: What would be run.
        output: Where the report would go.
        device_kind: `cuda` or `cpu-emulated`.
    """
    command = shlex.join(choice.profiler.plan(spec, output, device_kind))
    rest = "" if choice.profiler.rest is None else f"\n# {choice.profiler.rest(output)}"
    return f"# profiler {choice.profiler.name}: {choice.reason}\n{command}{rest}"
