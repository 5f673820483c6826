"""Runs in a process of their own: what comes back, and that nothing is left when they are stopped."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from cptrace.capture import launcher
from cptrace.capture.launcher import RunInterrupted, RunOutcome
from cptrace.capture.run_spec import RunSpec
from cptrace.doctor import torch_facts
from cptrace.errors import RunError, UsageError

SMALL = RunSpec(cp_size=2, seq_len=64, heads=2, kv_heads=2, head_dim=8, steps=1, warmup=0, clock="virtual")
LONG = replace(SMALL, steps=1000, clock="paced", link_gbps=0.01)
"""Takes minutes: every hop of 4 KiB lasts 3 ms."""

PROGRAM = """
import sys
from pathlib import Path
from cptrace.capture.launcher import run
from cptrace.capture.run_spec import RunSpec
from cptrace.errors import CptraceError
try:
    run(RunSpec.from_json(sys.argv[1]), Path(sys.argv[2]), lambda text: print(text, flush=True))
except CptraceError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    sys.exit(error.exit_code)
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunOutcome, list[str]]:
    """Return a finished run and the progress it reported."""
    seen: list[str] = []
    path = tmp_path_factory.mktemp("run") / "report.sqlite"
    return launcher.run(replace(SMALL, steps=2, warmup=1), path, seen.append), seen


def test_a_run_writes_its_report_and_passes(outcome: tuple[RunOutcome, list[str]]) -> None:
    done, _ = outcome
    assert done.report.exists()
    assert done.has_passed
    assert done.failed_parity == []
    assert done.metadata["scheme"] == "ring"
    assert len(done.metadata["checks"]["parity"]) == 2 * 4


@pytest.fixture
def hostile_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, whose files have the names of modules that a run needs."""
    for name in ("cptrace", "instrumented"):
        (tmp_path / name).mkdir()
    for name in ("cptrace/__init__", "random", "torch", "profile"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the user, not the module')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_the_users_folder_holds_takes_no_module_s_place(hostile_folder: Path) -> None:
    done = launcher.run(SMALL, hostile_folder / "report.sqlite")
    assert done.has_passed
    assert "error" not in torch_facts()


def test_a_run_says_what_it_does(outcome: tuple[RunOutcome, list[str]]) -> None:
    assert outcome[1] == [
        "warmup 1 of 1",
        "step 1 of 2",
        "step 2 of 2",
        "checking layer 1 of 1 against float64",
    ]


def test_a_failed_check_is_not_a_pass(outcome: tuple[RunOutcome, list[str]]) -> None:
    checks = outcome[0].metadata["checks"]
    bad_row = {**checks["parity"][0], "passed": False}
    damaged = {"checks": {**checks, "parity": [bad_row]}}
    assert RunOutcome(Path("x"), damaged).failed_parity == [bad_row]
    assert not RunOutcome(Path("x"), damaged).has_passed
    unhealthy = {**outcome[0].metadata, "checks": {**checks, "running_max": {"passed": False}}}
    assert not RunOutcome(Path("x"), unhealthy).has_passed


def test_options_are_checked_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher.subprocess, "Popen", None)
    with pytest.raises(UsageError, match="--steps 0"):
        launcher.run(replace(SMALL, steps=0), tmp_path / "report.sqlite")


def test_a_missing_torch_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    with pytest.raises(RunError, match=r"needs the package torch.*pip install 'cptrace\[run\]'"):
        launcher.run(SMALL, tmp_path / "report.sqlite")


def test_a_child_that_dies_is_explained_by_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_MODULE", "no_such_module")
    with pytest.raises(
        RunError, match=r"ended without an outcome, exit code 1: .*No module named no_such_module"
    ):
        launcher.run(SMALL, tmp_path / "report.sqlite")


def test_an_error_of_the_child_comes_back_as_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(launcher.RenderError, match="cannot write the report"):
        launcher.run(SMALL, tmp_path / "no-such-folder" / "report.sqlite")


class Started:
    """A launcher in a process of its own, with ranks at work."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        arguments = [sys.executable, "-c", PROGRAM, LONG.to_json(), str(folder / "report.sqlite")]
        environment = {**os.environ, "TMPDIR": str(self.temporary)}
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        while "step 2" not in self.process.stdout.readline():  # the ranks are in the middle of their work
            assert self.process.poll() is None
        self.descendants = psutil.Process(self.process.pid).children(recursive=True)

    def rank_processes(self) -> list[psutil.Process]:
        """Return the grandchildren: the child's own children."""
        return [p for p in self.descendants if p.ppid() != self.process.pid]

    def wait_until_gone(self) -> list[psutil.Process]:
        """Return the descendants that are still there after ten seconds."""
        _, alive = psutil.wait_procs(self.descendants, timeout=10)
        return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]

    def files(self) -> list[str]:
        """Return what lies in the folder, without the temporary folder itself."""
        return sorted(str(p.relative_to(self.folder)) for p in self.folder.rglob("*") if p != self.temporary)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    """Return a run that is under way; whatever is left of it at the end is killed."""
    run = Started(tmp_path)
    yield run
    for process in (*run.descendants, run.process):
        if process.is_running() if isinstance(process, psutil.Process) else process.poll() is None:
            process.kill()
    run.process.communicate()


def test_interrupt_leaves_no_process_and_no_file(started: Started) -> None:
    assert len(started.descendants) == 3
    started.process.send_signal(signal.SIGINT)
    output, _ = started.process.communicate(timeout=20)
    assert output.splitlines()[-1] == "RunInterrupted: interrupted; all ranks were ended"
    assert started.process.returncode == RunInterrupted.exit_code == 130
    assert started.wait_until_gone() == []
    assert started.files() == []


def test_killing_the_launcher_takes_all_ranks_with_it(started: Started) -> None:
    started.process.kill()
    started.process.wait(timeout=10)
    assert started.wait_until_gone() == []
    assert started.files() == []


def test_killing_the_child_takes_its_ranks_with_it(started: Started) -> None:
    (child,) = [process for process in started.descendants if process.ppid() == started.process.pid]
    child.kill()
    output, _ = started.process.communicate(timeout=20)
    assert "RunError: the run ended without an outcome, exit code -9" in output
    assert started.wait_until_gone() == []


def test_a_killed_rank_ends_the_run_within_seconds_and_is_named(started: Started) -> None:
    started.rank_processes()[1].kill()
    begin = time.monotonic()
    output, _ = started.process.communicate(timeout=20)
    assert time.monotonic() - begin < 5
    line = output.splitlines()[-1]
    assert line.startswith("RunError: rank ")
    assert line.endswith("failed: ended by SIGKILL (out of memory?); all ranks were ended")
    assert started.process.returncode == 6
    assert started.wait_until_gone() == []
    assert started.files() == []
