"""What counts as a step, and where it lies on the device."""

from __future__ import annotations

import re

import pytest

import cptrace
from cptrace.analyses.steps import DEFAULT_PATTERN
from cptrace.errors import UsageError
from cptrace.requests import AnalyzeOptions, ScopeRequest
from tests.support.plain_account import account, read_ops
from tests.support.shared_traces import require_trace
from tests.support.tiny_export import MARK, START_END, TinyExport

ACCEPTED = (
    "step", "Step", "step 12", "step_12", "step-12", "step:12", "step 5/100", "Step #3", "STEP 0", "step=7", "step12",
    "Iteration: 3", "iteration 3", "iteration", "iter 5", "iter_5", "ProfilerStep#7", "ProfilerStep#7, op_id = 3",
    "step 3, loss 1.5",
)  # fmt: skip
REFUSED = (
    "step_optimizer", "stepping", "Optimizer.step#AdamW.step", "steps", "optimizer step", "step_12a",
    "step_1_optimizer", "warmup", "warmup 3", "training step 3", "iterator 3", "iterations", "ProfilerStepper",
    "stepwise 3", "", " step", "lr_scheduler step 3", "multistep", "footstep 4",
)  # fmt: skip


def steps_of(export, path, pattern=None):
    scope = ScopeRequest(step_pattern=re.compile(pattern) if pattern else None)
    return cptrace.analyze(export.write(path), AnalyzeOptions(scope=scope))


def bounds(report):
    return [
        (row["rank"], row["step"], row["name"], row["start_ns"], row["end_ns"], row["n_ops"])
        for row in report.rows("steps")
    ]


@pytest.mark.parametrize("name", ACCEPTED + REFUSED)
def test_names_of_steps(name):
    assert (DEFAULT_PATTERN.fullmatch(name) is not None) == (name in ACCEPTED)


def test_names_of_steps_in_a_trace(tmp_path):
    """What finds steps looks at names in two passes: both must agree with the pattern."""
    export = TinyExport()
    for number, name in enumerate(ACCEPTED + REFUSED):
        export.range(name, 10 * number, 10 * number + 5)
        export.kernel("nvjet", 1_000 + 10 * number, 1_005 + 10 * number, launch=10 * number + 1)
    report = steps_of(export, tmp_path / "t.sqlite")
    assert [row["name"] for row in report.rows("steps")] == list(ACCEPTED)
    assert report.rows("ranks")[0]["window_ns"] == 5 * len(ACCEPTED)


def test_warmup_is_left_out_of_the_window(tmp_path):
    """
    host    warmup[0..10)  step[10..20)  step[20..30)
    device      W[12..40)     S[40..60)    S[60..80)     T[90..95) launched after all steps
    """
    export = TinyExport().domain(1, "cptrace").range("warmup", 0, 10, domain=1, payload=0)
    export.range("step", 10, 20, domain=1, payload=0).range("step", 20, 30, domain=1, payload=1)
    for start, end, launch in ((12, 40, 5), (40, 60, 15), (60, 80, 25), (90, 95, 35)):
        export.kernel("nvjet", start, end, launch=launch)
    report = steps_of(export, tmp_path / "t.sqlite")
    assert bounds(report) == [(0, 0, "step", 40, 60, 1), (0, 1, "step", 60, 80, 1)]
    (row,) = report.rows("ranks")
    assert (row["window_basis"], row["window_start_ns"], row["window_end_ns"], row["window_ns"]) == (
        "steps",
        40,
        80,
        40,
    )


def test_time_between_steps_is_not_in_the_window(tmp_path):
    """The window is the union of the steps: the evaluation between them counts for nothing."""
    export = TinyExport().range("step 0", 0, 10).range("step 1", 20, 30)
    for start, end, launch in ((10, 20, 5), (20, 50, 15), (50, 60, 25)):
        export.kernel("nvjet", start, end, launch=launch)
    (row,) = steps_of(export, tmp_path / "t.sqlite").rows("ranks")
    assert (row["window_start_ns"], row["window_end_ns"], row["window_ns"], row["compute_ns"]) == (
        10,
        60,
        20,
        20,
    )


def test_backward_launches_of_another_thread_belong_to_the_step(tmp_path):
    """
    main thread       step [0 ............. 20)      step [20 ......
    backward thread           launch 12                     launch 22
    other process             launch 12
    """
    export = TinyExport().range("step", 0, 20).range("step", 20, 40)
    export.kernel("flash_fwd", 10, 15, launch=3).kernel("flash_bwd", 30, 45, launch=12, thread=7)
    export.kernel("flash_bwd", 50, 60, launch=22, thread=7)
    export.kernel("other", 0, 100, launch=12, pid=200, device=1)
    report = steps_of(export, tmp_path / "t.sqlite")
    assert bounds(report) == [(0, 0, "step", 10, 45, 2), (0, 1, "step", 50, 60, 1)]


def test_of_nested_matches_the_outermost_counts(tmp_path):
    export = TinyExport().range("ProfilerStep#3", 0, 20).range("step 0", 1, 10).range("step 1", 10, 20)
    export.range("step", 2, 9, thread=7)
    export.kernel("nvjet", 10, 20, launch=3).kernel("nvjet", 30, 40, launch=15)
    assert bounds(steps_of(export, tmp_path / "t.sqlite")) == [(0, 0, "ProfilerStep#3", 10, 40, 2)]


def test_equal_ranges_of_two_threads_are_one_step(tmp_path):
    export = (
        TinyExport().range("step 0", 0, 20).range("step 0", 0, 20, thread=7).kernel("nvjet", 10, 20, launch=3)
    )
    assert bounds(steps_of(export, tmp_path / "t.sqlite")) == [(0, 0, "step 0", 10, 20, 1)]


def test_a_launch_at_an_edge_belongs_to_the_step_that_starts_there(tmp_path):
    export = TinyExport().range("step 0", 0, 10).range("step 1", 10, 20)
    for launch in (0, 9, 10, 19, 20):
        export.kernel("nvjet", 100 + launch, 101 + launch, launch=launch)
    assert [row[3:] for row in bounds(steps_of(export, tmp_path / "t.sqlite"))] == [
        (100, 110, 2),
        (110, 120, 2),
    ]


def test_steps_may_overlap_on_the_device_and_count_once_in_the_window(tmp_path):
    """A slow transfer of step 0 still runs while step 1 computes."""
    export = TinyExport().range("step 0", 0, 10).range("step 1", 10, 20)
    export.kernel("nvjet", 20, 30, launch=1).kernel("ncclDevKernel_SendRecv()", 25, 60, launch=2, stream=13)
    export.kernel("nvjet", 40, 70, launch=11)
    path = tmp_path / "t.sqlite"
    report = steps_of(export, path)
    assert [row[3:5] for row in bounds(report)] == [(20, 60), (40, 70)]
    (row,) = report.rows("ranks")
    assert (row["window_ns"], row["compute_ns"], row["comm_ns"]) == (50, 40, 35)
    for step in report.rows("steps"):
        plain = account(read_ops(path), [(step["start_ns"], step["end_ns"])])
        assert (step["window_ns"], step["compute_ns"], step["comm_ns"], step["idle_ns"], step["overlap"]) == (
            plain.window_ns, plain.compute_ns, plain.comm_ns, plain.idle_ns, plain.overlap,
        )  # fmt: skip


def test_a_pattern_is_searched_and_sees_every_kind_of_range_but_marks(tmp_path):
    export = TinyExport().range("my train_step 1", 0, 10).range("train_step 2", 10, 20, event_type=START_END)
    export.range("train_step mark", 25, 29, event_type=MARK).range("train_step open", 30, None).range(
        "step 1", 0, 40
    )
    for launch in (5, 15, 26, 35):
        export.kernel("nvjet", 100 + launch, 102 + launch, launch=launch)
    report = steps_of(export, tmp_path / "t.sqlite", pattern="train_step")
    assert [row[2] for row in bounds(report)] == ["my train_step 1", "train_step 2"]


def test_steps_of_every_device_of_a_process(tmp_path):
    export = (
        TinyExport()
        .range("step", 0, 10)
        .kernel("nvjet", 10, 20, launch=1)
        .kernel("nvjet", 15, 30, launch=2, device=1)
    )
    report = steps_of(export, tmp_path / "t.sqlite")
    assert bounds(report) == [(0, 0, "step", 10, 20, 1), (1, 0, "step", 15, 30, 1)]


@pytest.mark.parametrize(
    ("export", "words"),
    [
        (TinyExport().kernel("nvjet", 0, 10, launch=1), ["no NVTX ranges", "range_push"]),
        (
            TinyExport().kernel("nvjet", 0, 10, launch=1).range("epoch 7", 0, 5),
            ["--step-range", "'epoch N' (1x)"],
        ),
        (TinyExport().kernel("nvjet", 0, 10).range("step", 0, 5), ["no launch", "--trace=cuda,nvtx"]),
        (
            TinyExport().kernel("nvjet", 0, 10, launch=1).range("step", 0, None),
            ["no NVTX range is called like a step"],
        ),
        (
            TinyExport().kernel("nvjet", 0, 10, launch=1).range(None, 0, 3),
            ["no NVTX range is called like a step"],
        ),
    ],
    ids=["no ranges", "other names", "no launches", "unclosed", "unnamed"],
)
def test_why_there_are_no_steps(export, words, tmp_path):
    report = steps_of(export, tmp_path / "t.sqlite")
    (entry,) = [entry for entry in report.not_applicable if entry.analysis == "steps"]
    assert all(word in entry.reason for word in words), entry.reason
    assert "nan" not in entry.reason
    assert report.rows("steps") == ()
    assert report.rows("ranks")[0]["window_basis"] == "all"


@pytest.mark.parametrize(
    ("export", "words"),
    [
        (TinyExport().kernel("nvjet", 0, 10, launch=1), "no NVTX ranges"),
        (TinyExport().kernel("nvjet", 0, 10, launch=1).range("epoch 7", 0, 5), "matches no range"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused(export, words, tmp_path):
    with pytest.raises(UsageError, match=words):
        steps_of(export, tmp_path / "t.sqlite", pattern="nothing")


def test_steps_that_launch_nothing_leave_no_row(tmp_path):
    export = TinyExport().kernel("nvjet", 100, 110, launch=15).range("step 0", 0, 10).range("step 1", 10, 20)
    report = steps_of(export, tmp_path / "t.sqlite")
    assert bounds(report) == [(0, 1, "step 1", 100, 110, 1)]


def test_ulysses_marks_no_steps_but_ranges_of_its_own():
    path = require_trace("nsys/nsys-2026.2-ulysses-2gpu.sqlite")
    report = cptrace.analyze(path)
    assert report.rows("steps") or any(entry.analysis == "steps" for entry in report.not_applicable)
