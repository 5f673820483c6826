"""The processes of a run are found and ended wherever they went, and those of nobody else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from cptrace.capture import launcher
from cptrace.capture.marked import end_marked, marked, new_mark, wait_for_end

# Leaves its group and its parent, as the agent of nsys does, and says its id.
STRAY = """
import os, signal, sys, time
if os.fork():
    os._exit(0)
os.setsid()
if sys.argv[1] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(sys.argv[2], "w") as file:
    file.write(f"{os.getpid()}\\n")
os.closerange(1, 3)  # who reads what the run says does not wait for this
time.sleep(120)
"""
STARTS_ONE = """
import json, subprocess, sys
subprocess.run([sys.executable, "-c", *sys.argv[1:]], check=True)
print(json.dumps({"status": "ok"}), flush=True)
"""


@pytest.fixture
def said(tmp_path: Path) -> Iterator[Callable[[str], int]]:
    """Return what waits for the process that writes its id into a file of some name; all are ended afterwards."""

    def pid_in(name: str) -> int:
        file, end = tmp_path / name, time.monotonic() + 30
        while not (file.exists() and file.read_text().endswith("\n")):
            assert time.monotonic() < end
            time.sleep(0.02)
        return int(file.read_text())

    yield pid_in
    for file in tmp_path.iterdir():
        with suppress(ValueError, OSError):
            os.kill(int(file.read_text()), 9)


def start(kind: str, file: Path, mark: tuple[str, str]) -> None:
    """Start a stray process that carries a mark."""
    command = [sys.executable, "-c", STRAY, kind, str(file)]
    subprocess.run(command, env={**os.environ, mark[0]: mark[1]}, check=True)


def lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("kind", ["polite", "deaf"])
def test_only_what_carries_the_mark_is_ended(kind: str, tmp_path: Path, said: Callable[[str], int]) -> None:
    ours, others = new_mark(), new_mark()
    start(kind, tmp_path / "ours", ours)
    start(kind, tmp_path / "others", others)
    mine, theirs = said("ours"), said("others")
    assert (marked(ours), marked(others)) == ([mine], [theirs])
    assert not wait_for_end(ours, 0.1)
    end_marked(ours, 0.5)
    assert wait_for_end(ours, 30.0)
    assert (lives(mine), lives(theirs)) == (False, True)


def test_marks_differ_and_nothing_carries_a_new_one() -> None:
    assert new_mark() != new_mark()
    assert marked(new_mark()) == []
    assert wait_for_end(new_mark(), 0.0)


def test_a_run_leaves_no_process_that_left_its_group(
    tmp_path: Path, said: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_GRACE_S", "_FORCE_S"):
        monkeypatch.setattr(launcher, name, 0.5)
    command = [sys.executable, "-c", STARTS_ONE, STRAY, "deaf", str(tmp_path / "stray")]
    launcher.run_child(command, tmp_path / "report.sqlite", lambda _text: None)
    assert not lives(said("stray"))
