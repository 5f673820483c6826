"""A window that cuts steps: only whole steps are steps, the account of the window stays, and what was cut is said."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import cptrace
from cptrace.analyses import make_scope
from cptrace.findings import make_case
from cptrace.outcome import NotApplicable
from cptrace.renderers import RenderOptions, find_renderer
from cptrace.report import Report
from cptrace.requests import AnalyzeOptions, ScopeRequest, WindowRequest, parse_window
from cptrace.what_if import WhatIfOptions, whatif
from tests.support.plain_account import account, read_ops
from tests.support.simulated_run import write
from tests.support.simulated_schemes import Ring
from tests.support.tiny_export import TinyExport

SUMMED = ("compute_ns", "exposed_comm_ns", "exposed_copy_ns", "idle_ns")


def skewed(path: Path) -> Path:
    """
    time      0         100       200       300       400       500
    rank 0    [step 0  80)        [step 2  280)
                        [step 1  180)         [step 3  380)
    rank 1       [step 0 110)        [step 2 310)                         30 later
                           [step 1  210)         [step 3  410)
    """
    export = TinyExport()
    for rank, late in ((0, 0), (1, 30)):
        where: dict[str, Any] = {"pid": 100 + rank, "device": rank}
        for step in range(4):
            start = 100 * step + late
            export.range(f"step {step}", 10 * step, 10 * step + 10, pid=100 + rank)
            export.kernel("flash_fwd_kernel", start, start + 50, launch=10 * step + 1, **where)
            export.kernel(
                "ncclDevKernel_SendRecv()", start + 40, start + 80, stream=13, launch=10 * step + 3, **where
            )
    return export.write(path)


def analyzed(path: Path, window: str | None = None, *ranks: int) -> Report:
    request = ScopeRequest(window=None if window is None else parse_window(window), ranks=ranks)
    return cptrace.analyze(path, AnalyzeOptions(scope=request))


def steps_of(report: Report) -> dict[int, list[int]]:
    """Return the ranks of each step."""
    found: dict[int, list[int]] = {}
    for row in report.rows("steps"):
        found.setdefault(row["step"], []).append(row["rank"])
    return found


def cut_of(report: Report) -> tuple[str, int] | None:
    """Return what a report says of steps that its window cuts beside whole ones."""
    notes = [note for note in report.coverage["notes"] if note["code"] == "cut-steps"]
    assert len(notes) <= 1
    return (notes[0]["text"].split(":")[0], notes[0]["count"]) if notes else None


def why_none(report: Report) -> str:
    """Return why a report has no steps."""
    (entry,) = [entry for entry in report.not_applicable if entry.analysis == "steps"]
    return entry.reason


@pytest.mark.parametrize(
    ("window", "ranks", "whole", "cut"),
    [
        ("0ns:410ns", (), [0, 1, 2, 3], None),
        ("all", (), [0, 1, 2, 3], None),
        ("100ns:310ns", (), [1, 2], "step 0 and step 3"),  # one on rank 1 alone, one on rank 0
        ("110ns:310ns", (), [2], "step 1 and step 3"),  # step 0 ends where the window starts
        ("100ns:309ns", (), [1], "step 0, step 2 and step 3"),  # step 2 is whole on rank 0 alone
        ("100ns:309ns", (0,), [1, 2], "step 3"),
        ("100ns:309ns", (1,), [1], "step 0 and step 2"),
        ("150ns:", (), [2, 3], "step 1"),
        (":379ns", (), [0, 1, 2], "step 3"),
        (":300ns", (), [0, 1], "step 2"),  # step 3 begins on rank 0 where the window ends
        ("0ns:290ns", (), [0, 1], "step 2"),
    ],
)
def test_only_steps_that_are_whole_on_every_rank_are_steps(
    window: str, ranks: tuple[int, ...], whole: list[int], cut: str | None, tmp_path: Path
) -> None:
    report = analyzed(skewed(tmp_path / "t.sqlite"), window, *ranks)
    assert steps_of(report) == {step: list(ranks or (0, 1)) for step in whole}
    assert cut_of(report) == (None if cut is None else (f"the window cuts {cut}", cut.count("step ")))
    assert not [entry for entry in report.not_applicable if entry.analysis == "steps"]


def test_whole_steps_are_the_same_as_without_a_window_and_the_window_is_exact(tmp_path: Path) -> None:
    """Random windows: every step is one that the whole trace has, and each rank's account is the plain one."""
    path = skewed(tmp_path / "t.sqlite")
    known = analyzed(path).rows("steps")
    rng = random.Random(7)
    for _ in range(40):
        start = rng.randrange(400)
        end = rng.randrange(start + 1, 440)
        report = analyzed(path, f"{start}ns:{end}ns")
        assert all(row in known for row in report.rows("steps"))
        for row in report.rows("ranks"):
            plain = account([op for op in read_ops(path) if op.rank.device == row["rank"]], [(start, end)])
            assert (row["window_ns"], row["compute_ns"], row["comm_ns"]) == (
                end - start, plain.compute_ns, plain.comm_ns,
            )  # fmt: skip
            assert (row["window_basis"], row["window_ns"]) == ("option", sum(row[name] for name in SUMMED))


@pytest.mark.parametrize(
    ("window", "words"),
    [
        ("20ns:60ns", "it cuts 1 step (step 0)"),
        ("120ns:190ns", "it cuts 1 step (step 1)"),
        ("150ns:250ns", "it cuts 2 steps (step 1 and step 2)"),
        ("0ns:100ns", "it cuts 1 step (step 0)"),  # whole on rank 0 alone
    ],
)
def test_parts_of_steps_are_the_window_and_no_steps(window: str, words: str, tmp_path: Path) -> None:
    path = skewed(tmp_path / "t.sqlite")
    report = analyzed(path, window)
    assert report.rows("steps") == ()
    assert words in why_none(report)
    assert cut_of(report) is None, "it is said already"
    start, end = parse_window(window).start_ns, parse_window(window).end_ns
    assert start is not None
    assert end is not None
    text = find_renderer("text").render(report, RenderOptions())
    assert f"{end - start}.0 ns window" in text or f"{end - start} ns window" in text
    assert " step (median" not in text
    assert words in " ".join(text.split())


def test_the_window_that_is_proposed_has_what_was_cut(tmp_path: Path) -> None:
    path = skewed(tmp_path / "t.sqlite")
    for window in ("20ns:60ns", "150ns:250ns", "100ns:309ns", "150ns:"):
        report = analyzed(path, window)
        said = " ".join([*(entry.reason for entry in report.not_applicable), *map(str, _notes(report))])
        proposed = said.split("--window ")[1].split(";")[0].split("'")[0]
        cut = [step for step in range(4) if f"step {step}" in said]
        assert set(cut) <= set(steps_of(analyzed(path, proposed)))


def _notes(report: Report) -> list[str]:
    return [note["text"] for note in report.coverage["notes"]]


def test_a_window_between_steps(tmp_path: Path) -> None:
    """
    stream 7   [step 0 0..10)   [k 20..30)   [step 1 40..50)
    """
    export = TinyExport().range("step", 0, 3).range("step", 6, 9)
    for start, launch in ((0, 1), (20, 4), (40, 7)):
        export.kernel("nvjet", start, start + 10, launch=launch)
    report = analyzed(export.write(tmp_path / "t.sqlite"), "15ns:35ns")
    assert report.rows("steps") == ()
    assert "holds no whole step, nor a part of one" in why_none(report)
    assert report.rows("ranks")[0]["compute_ns"] == 10


def test_steps_whose_names_have_no_number_are_told_apart_and_many_are_counted(tmp_path: Path) -> None:
    """Six steps that overlap on the device, all cut by one window."""
    export = TinyExport()
    for number in range(6):
        export.range("step", 10 * number, 10 * number + 10)
        export.kernel("nvjet", 100 + number, 200 + number, stream=number, launch=10 * number + 1)
    report = analyzed(export.write(tmp_path / "t.sqlite"), "120ns:150ns")
    assert "it cuts 6 steps (step 0, step 1, step 2 and 3 more)" in why_none(report)


def test_ops_of_a_cut_step_belong_to_no_whole_one(tmp_path: Path) -> None:
    """A slow transfer of step 0 still runs while step 1 computes; the window ends within step 1.

    stream 7    [step 0 20..30)      [step 1 40 ..... 70)
    stream 13      [step 0 25 ........... 60)
    """
    export = TinyExport().range("step 0", 0, 10).range("step 1", 10, 20)
    export.kernel("nvjet", 20, 30, launch=1).kernel("ncclDevKernel_SendRecv()", 25, 60, launch=2, stream=13)
    export.kernel("nvjet", 40, 70, launch=11)
    path = export.write(tmp_path / "t.sqlite")
    trace = cptrace.open_trace(path)
    for window, end in ((None, None), (WindowRequest(end_ns=65), 60)):
        case = make_case(make_scope(trace, ScopeRequest(window=window)))
        of_first = case.steps.op[case.steps.step == 0]
        assert case.end_ns[of_first].tolist() == [30, 60]
        assert end is None or case.steps.op.tolist() == of_first.tolist()
    (row,) = analyzed(path, ":65ns").rows("steps")
    assert (row["start_ns"], row["end_ns"]) == (20, 60)


def test_findings_and_predictions_are_of_whole_steps(tmp_path: Path) -> None:
    """A ring of four steps; a window from the middle of the first to the end has the other three."""
    path = write(Ring(n_steps=4, syncs_after_step=True, n_buffers=1).hosts(), tmp_path / "t.sqlite")
    steps = [row for row in analyzed(path).rows("steps") if row["rank"] == 0]
    middle = (steps[0]["start_ns"] + steps[0]["end_ns"]) // 2
    window = WindowRequest(start_ns=middle)
    scope = make_scope(cptrace.open_trace(path), ScopeRequest(window=window))
    case = make_case(scope)
    assert not isinstance(scope.steps, NotApplicable)
    assert set(case.steps.step.tolist()) == {1, 2, 3}
    assert (case.start_ns[case.steps.op] >= min(row["start_ns"] for row in steps[1:])).all()
    predicted = whatif(path, WhatIfOptions(fixes=("single-buffer",), scope=ScopeRequest(window=window)))
    everywhere = whatif(path, WhatIfOptions(fixes=("single-buffer",)))
    assert predicted.n_steps == 3
    assert predicted.recorded_step_ns == pytest.approx(everywhere.recorded_step_ns, rel=0.01)
    report = analyzed(path, f"{middle}ns:")
    (row,) = [row for row in report.rows("findings") if row["code"] == "single-buffer"]
    assert row["predicted_step_ns"] + row["recoverable_ns"] == predicted.recorded_step_ns
    within = make_case(
        make_scope(
            cptrace.open_trace(path), ScopeRequest(window=WindowRequest(start_ns=middle, end_ns=middle + 9))
        )
    )
    assert not within.has_steps
    assert set(within.steps.step.tolist()) == {0}


def test_a_trace_without_steps_says_why_and_not_that_the_window_has_none(tmp_path: Path) -> None:
    report = analyzed(TinyExport().kernel("nvjet", 0, 10, launch=1).write(tmp_path / "t.sqlite"), "2ns:8ns")
    assert "no NVTX ranges" in why_none(report)
