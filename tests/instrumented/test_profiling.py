"""A profiler records the measured steps alone: what it is told, when, and what its trace holds."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

from instrumented import profiling
from instrumented.profiling import KINETO, NSYS, RecordFunctionEmitter, ask_for, is_kineto, measured_steps


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what happens, in order; the environment is as it was afterwards."""
    events: list[str] = []
    for name in ("CPTRACE_PROFILER", "CPTRACE_TRACES"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(profiling, "barrier", lambda: events.append("barrier"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: events.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: events.append("stop"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("synchronize"))
    return events


def test_without_a_profiler_nothing_happens(seen: list[str]) -> None:
    with measured_steps(0):
        seen.append("steps")
    assert seen == ["steps"]
    assert not is_kineto()


def test_nsys_is_told_when_all_ranks_are_ready_and_when_all_have_finished(
    seen: list[str], tmp_path: Path
) -> None:
    ask_for(NSYS, tmp_path)
    with measured_steps(3):
        seen.append("steps")
    assert seen == ["barrier", "start", "barrier", "steps", "barrier", "synchronize", "stop", "barrier"]


@pytest.mark.parametrize(("rank", "n_starts"), [(0, 1), (1, 0)])
def test_ranks_that_are_threads_share_one_recording(
    rank: int, n_starts: int, seen: list[str], tmp_path: Path
) -> None:
    ask_for(NSYS, tmp_path)

    def body() -> None:
        with measured_steps(rank):
            pass

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen.count("start") == seen.count("stop") == n_starts
    assert seen.count("barrier") == 4


def test_torchs_profiler_writes_a_trace_with_our_labels_of_the_steps_alone(tmp_path: Path) -> None:
    ask_for(KINETO, tmp_path)
    assert is_kineto()
    emitter = RecordFunctionEmitter()
    emitter.push("warmup", 0, "warmup")
    emitter.pop()
    with measured_steps(2):
        emitter.push("step", 0, "step")
        emitter.push("attention pass=forward layer=0 hop=0", 0, "attention")
        emitter.pop()
        emitter.pop()
    document = json.loads((tmp_path / "rank2.json").read_text())
    names = [event["name"] for event in document["traceEvents"] if event.get("cat") == "user_annotation"]
    assert sorted(names) == ["attention pass=forward layer=0 hop=0", "step"]
