"""Which profiler a run is recorded with, why, and what it would run."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from cptrace.capture import nsys_capture, profilers
from cptrace.capture.nsys_command import NoNsys, NsysTool
from cptrace.capture.profilers import (
    KINETO,
    NSYS,
    PROFILERS,
    RECORDER,
    Choice,
    Profiler,
    choose_profiler,
    describe_plan,
)
from cptrace.capture.run_spec import RunSpec
from cptrace.errors import UsageError
from cptrace.labels import CPU_EMULATED, CUDA
from tests.support.command_line import cptrace

NO_NSYS = NoNsys("nsys is not on PATH", "install it", is_there=False)
TOOL = NsysTool("/opt/nsys", "2025.5.1", "", False)


def test_names_are_unique_and_each_has_a_device() -> None:
    assert len({profiler.name for profiler in PROFILERS}) == len(PROFILERS)
    assert all(profiler.devices and profiler.summary for profiler in PROFILERS)


def test_an_emulated_device_records_itself() -> None:
    choice = choose_profiler("auto", CPU_EMULATED)
    assert choice.profiler is RECORDER
    assert "records itself" in choice.reason


def test_a_gpu_is_recorded_with_nsys_where_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profilers, "find_nsys", lambda: TOOL)
    monkeypatch.setattr(nsys_capture, "nvtx_version", lambda: "0.2.17")
    assert choose_profiler("auto", CUDA).profiler is NSYS


def test_ranks_of_a_launcher_record_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    choice = choose_profiler("auto", CUDA)
    assert choice.profiler is RECORDER
    assert "around the launcher" in choice.reason


@pytest.mark.parametrize(("tool", "nvtx"), [(NO_NSYS, "0.2.11"), (replace(TOOL, version="2022.4"), "0.2.17")])
def test_a_gpu_is_recorded_with_torchs_profiler_where_nsys_cannot(
    tool: NsysTool | NoNsys, nvtx: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profilers, "find_nsys", lambda: tool)
    monkeypatch.setattr(nsys_capture, "nvtx_version", lambda: nvtx)
    choice = choose_profiler("auto", CUDA)
    assert choice.profiler is KINETO
    assert "because Nsight Systems cannot" in choice.reason


def test_what_cannot_record_a_device_is_refused_with_what_can() -> None:
    with pytest.raises(UsageError, match=r"kineto cannot record a cpu-emulated device; use one of: recorder"):
        choose_profiler("kineto", CPU_EMULATED)
    with pytest.raises(UsageError, match="choose one of auto, recorder, nsys, kineto"):
        choose_profiler("perf", CPU_EMULATED)


def test_a_dry_run_prints_a_command_that_runs_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = cptrace("run", "--dry-run", "--seq-len", "256")
    assert done.exit_code == 0, done.err
    comment, command = done.out.splitlines()
    assert comment == "# profiler recorder: an emulated device records itself, exactly"
    words = shlex.split(command)
    assert words[1:5] == [
        "-P",
        "-m",
        "instrumented.run",
        "--spec",
    ]  # no module of the current folder is taken
    assert RunSpec.from_json(words[5]) == RunSpec(seq_len=256)
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_of_nsys_prints_its_whole_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(nsys_capture, "find_nsys", lambda: TOOL)
    monkeypatch.setattr(nsys_capture, "nvtx_version", lambda: "0.2.17")
    done = cptrace("run", "--dry-run", "--profiler", "nsys", "-o", "my.sqlite")
    assert done.exit_code == 0, done.err
    words = shlex.split(done.out.splitlines()[1])
    assert words[:3] == ["/opt/nsys", "profile", "--trace=nvtx"]
    assert "--output=my" in words
    assert json.loads(words[words.index("--spec") + 1])["scheme"] == "ring"


@pytest.mark.parametrize("profiler", PROFILERS, ids=lambda profiler: profiler.name)
def test_a_plan_is_one_command_and_says_what_pasting_it_leaves_out(
    profiler: Profiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line but the command is a comment to the shell; a command that writes the report itself needs no more."""
    monkeypatch.setattr(nsys_capture, "find_nsys", lambda: TOOL)
    monkeypatch.setattr(nsys_capture, "nvtx_version", lambda: "0.2.11")
    choice = Choice(profiler, "as asked for")
    head, command, *rest = describe_plan(
        choice, RunSpec(), Path("my.sqlite"), profiler.devices[0]
    ).splitlines()
    assert head == f"# profiler {profiler.name}: as asked for"
    assert shlex.split(command, comments=True)
    assert len(rest) == (0 if profiler is RECORDER else 1)
    for line in rest:
        assert line.startswith("# cptrace then ")
        assert "my.sqlite" in line
        assert "the command alone leaves " in line


def test_a_plan_of_nsys_names_its_report_and_what_that_lacks() -> None:
    assert NSYS.rest is not None
    said = NSYS.rest(Path("runs/my.sqlite"))
    for words in (
        "exports runs/my.nsys-rep to runs/my.sqlite",
        "neither the description of the run nor its exact clock",
    ):
        assert words in said
