"""The command of `nsys profile`: which flags, for which device and version, and when ranges would be lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cptrace.capture import nsys_capture, nsys_command
from cptrace.capture.nsys_command import FLAGS, NoNsys, NsysTool, find_nsys, flags_for, lost_ranges
from cptrace.capture.run_spec import RunSpec
from cptrace.errors import RunError, UsageError
from cptrace.labels import CPU_EMULATED, CUDA

OLD = NsysTool("/opt/nsys", "2022.4.2.1-df9881f", "\t--cuda-graph-trace=\n\t--gpu-metrics-device=\n", False)
NEW = NsysTool("/opt/nsys", "2025.5.1.121", OLD.help_text + "\t--cuda-event-trace=\n", True)


def texts(tool: NsysTool, device_kind: str) -> list[str]:
    return [flag.text for flag in flags_for(tool, device_kind)]


def test_without_a_gpu_only_ranges_are_traced() -> None:
    assert texts(NEW, CPU_EMULATED) == [
        "--trace=nvtx",
        "--sample=none",
        "--cpuctxsw=none",
        "--force-overwrite=true",
    ]


def test_on_a_gpu_graph_nodes_and_the_measured_steps_are_traced() -> None:
    flags = texts(OLD, CUDA)
    assert flags[0] == "--trace=cuda,nvtx"
    assert {"--cuda-graph-trace=node", "--capture-range=cudaProfilerApi", "--capture-range-end=stop"} <= set(
        flags
    )


@pytest.mark.parametrize("text", ["--cuda-event-trace=false", "--gpu-metrics-device=all"])
def test_what_a_version_or_machine_cannot_do_is_not_asked_of_it(text: str) -> None:
    assert text not in texts(OLD, CUDA)
    assert text in texts(NEW, CUDA)
    assert text not in texts(NEW, CPU_EMULATED)


def test_every_flag_says_why_it_is_there_and_is_one_word() -> None:
    for flag in FLAGS:
        assert flag.purpose
        assert " " not in flag.text
        assert flag.text.startswith("--")


def test_the_command_names_the_report_without_its_suffix() -> None:
    command = nsys_command.nsys_command(OLD, CPU_EMULATED, Path("/a/report.nsys-rep"), ["python", "-m", "x"])
    assert command[:2] == ["/opt/nsys", "profile"]
    assert command[-4:] == ["--output=/a/report", "python", "-m", "x"]


@pytest.mark.parametrize(
    ("nvtx", "nsys", "is_lost"),
    [
        ("0.2.11", "2022.4.2.1", False),
        ("0.2.12", "2022.4.2.1", True),
        ("0.2.17", "2023.4.1.97", True),
        ("0.3.0", "2023.4.1", True),
        ("0.2.17", "2024.1.1.59", False),
        (None, "2025.5.1", True),
    ],
)
def test_ranges_are_lost_between_new_packages_and_old_profilers(
    nvtx: str | None, nsys: str, is_lost: bool
) -> None:
    reason = lost_ranges(nvtx, replace(OLD, version=nsys))
    assert (reason is not None) == is_lost
    if reason is not None:
        assert "pip install 'nvtx==0.2.11'" in reason


def test_without_nsys_a_run_under_it_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    lack = NoNsys("nsys is not on PATH", "install it", is_there=False)
    monkeypatch.setattr(nsys_capture, "find_nsys", lambda: lack)
    with pytest.raises(RunError, match=r"nsys is not on PATH; install it, or use --profiler recorder"):
        nsys_capture.require_nsys(RunSpec(), CPU_EMULATED)


def test_a_package_whose_ranges_are_lost_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsys_capture, "find_nsys", lambda: OLD)
    monkeypatch.setattr(nsys_capture, "nvtx_version", lambda: "0.2.17")
    with pytest.raises(RunError, match=r"records no range of the Python package nvtx 0.2.17.*nvtx==0.2.11"):
        nsys_capture.require_nsys(RunSpec(), CPU_EMULATED)


def test_ranks_that_run_already_need_nsys_around_their_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        UsageError, match=r"nsys profile --trace=cuda,nvtx .*--output=report-node%q\{SLURM_NODEID\}"
    ):
        nsys_capture.require_nsys(RunSpec(), CUDA)


def test_computed_times_are_refused() -> None:
    with pytest.raises(UsageError, match=r"--clock virtual.*--clock paced"):
        nsys_capture.require_nsys(RunSpec(clock="virtual"), CPU_EMULATED)


def test_a_program_that_does_not_run_is_no_nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "nsys"
    fake.write_text("#!/bin/sh\necho broken\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_nsys()
    assert isinstance(found, NoNsys)
    assert found.is_there
    with pytest.raises(RunError, match=r"is on PATH but does not run: .* said 'broken'"):
        nsys_capture.require_nsys(RunSpec(), CPU_EMULATED)


def test_a_program_that_answers_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "nsys"
    fake.write_text("#!/bin/sh\necho 'NVIDIA Nsight Systems version 2024.6.2.225-1'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    tool = find_nsys()
    assert isinstance(tool, NsysTool)
    assert (tool.version, tool.year_and_number) == ("2024.6.2.225-1", (2024, 6))
