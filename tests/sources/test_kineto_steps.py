"""Steps of PyTorch profiler traces: said in the profiler's words, and where they are on the device's side alone."""

from __future__ import annotations

from pathlib import Path

import pytest

import cptrace
from tests.support.command_line import check_refused
from tests.support.command_line import cptrace as run
from tests.support.synthetic_kineto import TinyTrace
from tests.support.tiny_export import TinyExport


def reason_without_steps(path: Path) -> str:
    (entry,) = [entry for entry in cptrace.analyze(path).not_applicable if entry.analysis == "steps"]
    return entry.reason


def trace_of(*ranges: str) -> TinyTrace:
    trace = TinyTrace().kernel("k", 100, 200, launch=10)
    for name in ranges:
        trace.range(name, 0, 50)
    return trace


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        ((), "the trace has no user annotations; mark steps with prof.step()"),
        (("forward",), "no user annotation is called like a step"),
    ],
)
def test_missing_steps_are_said_in_the_words_of_the_profiler(
    ranges: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    reason = reason_without_steps(trace_of(*ranges).write(tmp_path / "t.json"))
    assert words in reason
    assert "NVTX" not in reason
    assert "nvtx" not in reason


def test_missing_steps_of_an_export_are_said_in_the_words_of_nsight_systems(tmp_path: Path) -> None:
    path = TinyExport().kernel("k", 100, 200, launch=10).write(tmp_path / "t.sqlite")
    assert "the trace has no NVTX ranges; mark steps with torch.cuda.nvtx.range_push" in reason_without_steps(
        path
    )


def test_a_step_range_that_cannot_be_is_refused_in_these_words_too(tmp_path: Path) -> None:
    path = trace_of().write(tmp_path / "t.json")
    check_refused(run("analyze", path, "--step-range", "x"), 2, "has no user annotations; record with")


def device_steps(path: Path, *names: str, host: tuple[str, ...] = ()) -> dict[str, int | None]:
    trace = trace_of(*host)
    for name in names:
        trace.span("gpu_user_annotation", name, 100, 200, 0, 7)
    report = cptrace.analyze(trace.write(path / "t.json"))
    return {
        note["code"]: note["count"] for note in report.coverage["notes"] if note["code"] != "counted-ranks"
    }


@pytest.mark.parametrize("name", ["ProfilerStep#3", "step 1", "Iteration: 4", "iter_7", "STEP"])
def test_steps_on_the_side_of_the_device_alone_are_said(name: str, tmp_path: Path) -> None:
    assert device_steps(tmp_path, name, "forward", name) == {"device-side-steps": 2}
    assert device_steps(tmp_path, name, host=("forward",)) == {"device-side-steps": 1}


@pytest.mark.parametrize(
    ("names", "host"),
    [
        ((), ()),
        (("forward", "stepping", "Optimizer.step#SGD.step"), ()),
        (("ProfilerStep#3",), ("ProfilerStep#3",)),
    ],
)
def test_other_annotations_of_the_device_are_silent(
    names: tuple[str, ...], host: tuple[str, ...], tmp_path: Path
) -> None:
    assert device_steps(tmp_path, *names, host=host) == {}
