"""The command line of `nsys profile` that `cptrace run --profiler nsys` uses, flag by flag.

Source: "CLI Profile Command Switch Options" in the Nsight Systems user guide, and `nsys profile --help` of 2022.4.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from cptrace.capture.marked import end_marked, new_mark
from cptrace.labels import CPU_EMULATED, CUDA

REPORT_SUFFIX: Final = ".nsys-rep"

_ANSWER_S: Final = 30.0
_VERSION_ANSWER_S: Final = 10.0  # it only says its version, and a user waits
_FORCE_S: Final = 1.0
_GPU_METRICS: Final = "--gpu-metrics-device"
# From this version of Python's nvtx on, ranges do not reach Nsight Systems up to that version (measured).
_FIRST_LOST_NVTX: Final = (0, 2, 12)
_LAST_DEAF_NSYS: Final = (2023, 4)


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of `nsys profile`.

    Attributes:
        text: As it stands in the command.
        purpose: Why it is there.
        devices: Kinds of device that it is for.
        effect: What it changes about the run that it observes; empty where nothing is known of.
        is_optional: Only where this version of nsys names it in its help.
    """

    text: str
    purpose: str
    devices: tuple[str, ...] = (CPU_EMULATED, CUDA)
    effect: str = ""
    is_optional: bool = False


FLAGS: Final[tuple[Flag, ...]] = (
    Flag("--trace=nvtx", "our ranges, in which an emulated device says all that it does", (CPU_EMULATED,)),
    Flag("--trace=cuda,nvtx", "kernels, copies, CUDA calls, synchronisations and our ranges", (CUDA,)),
    Flag("--sample=none", "no samples of host stacks, which are not read"),
    Flag("--cpuctxsw=none", "no switches of host threads, which are not read"),
    Flag("--force-overwrite=true", "the report goes to a folder of this run's own"),
    Flag(
        "--cuda-graph-trace=node",
        "the kernels inside CUDA graphs, not each graph as a whole",
        (CUDA,),
        "launching a CUDA graph takes longer",
    ),
    Flag(
        "--cuda-event-trace=false",
        "events without their time on the device, which would make streams wait that do not wait otherwise",
        (CUDA,),
        is_optional=True,
    ),
    Flag("--capture-range=cudaProfilerApi", "the measured steps alone", (CUDA,)),
    Flag("--capture-range-end=stop", "after them the run goes on, to check its results", (CUDA,)),
)
"""Flags of every run; SM activity is asked for in addition where the driver permits it."""

METRICS_FLAG: Final = Flag(
    f"{_GPU_METRICS}=all",
    "SM and tensor core activity, sampled",
    (CUDA,),
    "the GPU's counters are sampled at 10 kHz",
)


@dataclass(frozen=True, slots=True)
class NsysTool:
    """The `nsys` of this machine.

    Attributes:
        path: The program.
        version: Its version as it says it.
        help_text: What it says about the options of `profile`.
        has_gpu_metrics: Whether GPUs can be sampled for metrics here.
    """

    path: str
    version: str
    help_text: str
    has_gpu_metrics: bool

    @property
    def year_and_number(self) -> tuple[int, int]:
        """The version as a pair that can be compared; (0, 0) where it is of another form."""
        match = re.match(r"(\d+)\.(\d+)", self.version)
        return (int(match[1]), int(match[2])) if match else (0, 0)


@dataclass(frozen=True, slots=True)
class NoNsys:
    """Why there is no `nsys` that runs.

    Attributes:
        reason: What was found, in a few words.
        mend: How to mend it.
        is_there: Whether a program of that name is on PATH.
    """

    reason: str
    mend: str
    is_there: bool


def find_nsys() -> NsysTool | NoNsys:
    """Return the `nsys` on PATH, or why none of it runs."""
    path = shutil.which("nsys")
    if path is None:
        mend = "install Nsight Systems (developer.nvidia.com/nsight-systems) and put nsys on PATH"
        return NoNsys("nsys is not on PATH", mend, is_there=False)
    answer = answer_of(path, "--version", limit_s=_VERSION_ANSWER_S)
    version = re.search(r"version ([\w.-]+)", answer.said)
    if version is None:
        mend = f"{path} --version shows it; install Nsight Systems again, or put another nsys first on PATH"
        return NoNsys(f"{path} is on PATH but does not run: {_what_it_did(answer)}", mend, is_there=True)
    metrics = ask(path, "profile", f"{_GPU_METRICS}=help")
    has_metrics = (
        re.search(r"(?i)not found|not available|insufficient|error|unrecogni[sz]ed", metrics) is None
    )
    return NsysTool(path, version[1], ask(path, "profile", "--help"), bool(metrics.strip()) and has_metrics)


def _what_it_did(answer: Answer) -> str:
    """Return what a program did that did not say its version."""
    if answer.failure:
        return answer.failure
    lines = [line.strip() for line in answer.said.splitlines() if line.strip()]
    return f"asked for its version, it ended with code {answer.exit_code}" + (
        f" and said {lines[-1]!r}" if lines else " and said nothing"
    )


class Answer(NamedTuple):
    """What a program did that was asked something.

    Attributes:
        said: What it said, on standard output and error.
        exit_code: How it ended; None where it did not start or did not answer.
        failure: Why there is no answer, empty where there is one.
    """

    said: str
    exit_code: int | None
    failure: str = ""


def answer_of(*command: str, limit_s: float = _ANSWER_S) -> Answer:
    """Return what a program does.

    Args:
        *command: Program and arguments.
        limit_s: Seconds to wait for it.
    """
    mark = new_mark()
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, mark[0]: mark[1]},
        )
    except OSError as error:
        return Answer("", None, f"it cannot be started ({error.strerror})")
    said = None
    with child:
        try:
            said = "".join(child.communicate(timeout=limit_s))
        except subprocess.TimeoutExpired:
            return Answer("", None, f"no answer within {limit_s:g} s")
        finally:
            if said is None:
                # What it has started holds the pipes, and would be waited for.
                end_marked(mark, _FORCE_S)
                child.kill()
    return Answer(said, child.returncode)


def ask(*command: str) -> str:
    """Return what a program says, on standard output and error; empty where it cannot be run or does not answer.

    Args:
        *command: Program and arguments.
    """
    return answer_of(*command).said


def flags_for(tool: NsysTool, device_kind: str) -> tuple[Flag, ...]:
    """Return the flags of a run on a kind of device.

    Args:
        tool: The `nsys` that shall record it.
        device_kind: `cuda` or `cpu-emulated`.
    """
    metrics = (METRICS_FLAG,) if tool.has_gpu_metrics else ()
    return tuple(
        flag
        for flag in (*FLAGS, *metrics)
        if device_kind in flag.devices
        and (not flag.is_optional or flag.text.partition("=")[0] in tool.help_text)
    )


def nsys_command(tool: NsysTool, device_kind: str, report: Path, program: Sequence[str]) -> list[str]:
    """Return the command that runs a program under `nsys profile`.

    Args:
        tool: The `nsys` that shall record it.
        device_kind: `cuda` or `cpu-emulated`.
        report: Report to write, with its suffix.
        program: Program and arguments.
    """
    flags = [flag.text for flag in flags_for(tool, device_kind)]
    return [tool.path, "profile", *flags, f"--output={report.with_suffix('')}", *program]


def lost_ranges(nvtx_version: str | None, tool: NsysTool) -> str | None:
    """Return why Python's ranges do not reach nsys, and how to mend it; None where nothing is known against it.

    Args:
        nvtx_version: Version of the Python package nvtx; None where it is not installed.
        tool: The `nsys` that shall record them.
    """
    mend = "pip install 'nvtx==0.2.11'"
    if nvtx_version is None:
        return f"the Python package nvtx is not installed, so the run has no ranges that nsys could record; {mend}"
    numbers = tuple(int(part) for part in re.findall(r"\d+", nvtx_version)[:3])
    if numbers >= _FIRST_LOST_NVTX and tool.year_and_number <= _LAST_DEAF_NSYS:
        return (
            f"nsys {tool.version} records no range of the Python package nvtx {nvtx_version}, without any error;"
            f" {mend}, or install Nsight Systems 2024.1 or newer"
        )
    return None
