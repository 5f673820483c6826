"""The diagnosis on the screen: what it says, and that it can be read without colour, in 80 columns, in a pipe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len

from cptrace.findings.finding import Finding, importance
from cptrace.gates import CODES
from cptrace.outcome import NotApplicable
from cptrace.renderers import RenderOptions
from cptrace.renderers.text import render
from cptrace.report import Report
from tests.support.diagnosed import report_of
from tests.support.reports import account, report_of_steps
from tests.support.simulated_schemes import COMPUTE, Ring, ulysses

SCHEME = {
    "path": "a.sqlite",
    "scheme": "ring",
    "basis": "label",
    "confidence": "high",
    "evidence": "labels name kv",
}
GAIN = Finding(
    "single-buffer", None, "warning", "16 transfers wait for the only buffer", 1_000_000, "ns", "high", "Use two.",
    recoverable_ns=45_000_000, predicted_step_ns=200_000_000,
    evidence=[
        {
            "what": f"part {number}", "rank": number, "stream": 13, "name": "void f<int>(P)",
            "start_ns": 1_234_567_890, "end_ns": 1_234_667_890, "correlation_id": 40 + number if number else None,
        }
        for number in range(4)
    ],
)  # fmt: skip
RACE = Finding(
    "missing-event", "race", "error", "3 ops use data without waiting for it", 3, "count", "high", "Wait."
)


def report_with(*found: Finding, missing: tuple[NotApplicable, ...] = (), has_steps: bool = True) -> Report:
    rows = tuple(sorted((finding.to_row() for finding in found), key=importance))
    report = report_of_steps([account(100, 80, 40, 20)], schemes=(SCHEME,), findings=rows)
    sections = report.sections if has_steps else {**report.sections, "steps": ()}
    return replace(report, not_applicable=missing, sections=sections)


def screen(report: Report, *, has_details: bool = True, width: int = 80) -> str:
    """Return the text as one line, blanks between words."""
    text = render(report, RenderOptions(width, has_details=has_details))
    assert all(cell_len(line) <= width for line in text.split("\n"))
    return " ".join(text.split())


def test_scheme_findings_gain_evidence_and_advice() -> None:
    text = screen(report_with(GAIN))
    assert "scheme: ring (high confidence): labels name kv" in text
    assert "1 single-buffer step 245 ms -> 200 ms (-18.4 %) (high confidence) 16 transfers wait" in text
    assert "- part 0: f at 1.234568 s for 100 us, rank 0, stream 13, no correlation id" in text
    assert "- part 1: f at 1.234568 s for 100 us, rank 1, stream 13, correlation id 41" in text
    assert "part 2" not in text  # two are enough on a screen
    assert "-> Use two." in text
    assert "`cptrace explain single-buffer`" in text


def test_findings_come_before_the_figures() -> None:
    text = screen(report_with(GAIN))
    assert text.index("single-buffer") < text.index("Time of each rank")


def test_gains_are_of_the_mean_step_where_there_are_several() -> None:
    report = report_with(GAIN)
    steps = tuple({**report.rows("steps")[0], "step": step} for step in range(2))
    text = screen(replace(report, sections={**report.sections, "steps": steps}))
    assert "1 single-buffer mean step 245 ms -> 200 ms" in text


@pytest.mark.parametrize("n_files", [2, 8])
def test_the_same_of_several_files_is_said_once(n_files: int) -> None:
    """As of eight nodes whose hosts are all too slow: one finding in full, and what else is found."""
    found = [replace(GAIN, recoverable_ns=45_000_000 - rank, rank=rank) for rank in range(n_files)]
    text = screen(report_with(*found, RACE), has_details=False)
    assert text.count("single-buffer mean") + text.count("single-buffer step") == 1
    assert text.count("-> Use two.") == 1
    others = {2: "the same in 1 other file: step", 8: "the same in 7 other files: step"}[n_files]
    assert others in text
    assert ("and 4 more" in text) == (n_files == 8)
    assert screen(report_with(*found), has_details=True).count("-> Use two.") == n_files


def test_the_same_of_several_files_in_one_line() -> None:
    codes = ("late-launch", "peer-wait", "queue-order")
    first = [replace(GAIN, code=code, recoverable_ns=90_000_000) for code in codes]
    text = screen(report_with(*first, GAIN, replace(GAIN, rank=1)), has_details=False)
    assert "4 single-buffer in 2 files step 245 ms -> 200 ms" in text


def test_without_steps_the_gain_is_of_the_window() -> None:
    assert "window 245 ms -> 200 ms (-18.4 %)" in screen(report_with(GAIN, has_steps=False))


def test_a_finding_without_a_prediction_says_so() -> None:
    none = replace(GAIN, recoverable_ns=None, predicted_step_ns=None)
    assert "1 single-buffer no gain predicted (high confidence)" in screen(report_with(none))


@pytest.mark.parametrize("has_details", [True, False])
def test_wrong_results_are_said_first_and_without_colour(has_details: bool) -> None:
    text = screen(report_with(GAIN, RACE), has_details=has_details)
    assert "1 missing-event (race) ERROR: RESULTS MAY BE WRONG" in text
    assert text.index("RESULTS MAY BE WRONG") < text.index("single-buffer")


def test_wrong_results_are_said_also_where_many_are_listed() -> None:
    races = [replace(RACE, form=f"race{number}") for number in range(5)]
    text = screen(report_with(*races), has_details=False)
    assert text.count("ERROR: RESULTS MAY BE WRONG") == 3
    assert text.count("ERROR no gain predicted") == 2


def test_one_screen_has_the_first_three_in_full_and_the_others_in_a_line_each() -> None:
    found = [
        replace(GAIN, code=f"code-{number}", recoverable_ns=(9 - number) * 10_000_000, summary="word " * 40)
        for number in range(6)
    ]
    text = render(report_with(*found), RenderOptions(has_details=False))
    assert text.count("-> Use two.") == 3
    lines = [line for line in text.split("\n") if line.startswith((" 4 code-3", " 5 code-4", " 6 code-5"))]
    assert len(lines) == 3
    assert all(cell_len(line) <= 80 and line.endswith("…") for line in lines)
    whole = render(report_with(*found), RenderOptions(has_details=True))
    assert whole.count("-> Use two.") == whole.count("- part 1: f") == 6


def test_no_finding_says_what_was_looked_for_and_what_could_not_be() -> None:
    text = screen(report_with())
    assert "No finding: none of shared-stream, missing-event, single-buffer," in text
    assert "Could not be looked for" not in text
    missing = (NotApplicable("shared-stream, missing-event (race)", "nothing was recorded"),)
    text = screen(report_with(missing=missing))
    assert "No finding: none of missing-event, single-buffer," in text
    assert "Could not be looked for (see Could not tell): shared-stream, missing-event (race)." in text


@pytest.mark.parametrize("code", [code for code in CODES if code != "missing-event"])
@pytest.mark.parametrize("sign", ["-", "_"])
def test_no_code_is_said_to_be_looked_for_and_not_to_be(code: str, sign: str) -> None:
    missing = (NotApplicable(code.replace("-", sign), "nothing was recorded"),)
    looked, rest = screen(report_with(missing=missing)).split(
        "Could not be looked for (see Could not tell): "
    )
    assert f" {code}" not in looked
    assert rest.startswith(f"{code}.")


def test_where_nothing_was_looked_for_nothing_is_said() -> None:
    report = report_of_steps([account(100, 80, 40, 20)])
    assert "Findings" not in screen(report)
    assert "No finding" not in screen(report)


def test_an_unknown_scheme_is_said_with_the_reason() -> None:
    unknown = {
        **SCHEME,
        "scheme": "unknown",
        "confidence": "low",
        "evidence": "no attention kernel was found",
    }
    report = report_with()
    text = screen(replace(report, sections={**report.sections, "schemes": (unknown,)}))
    assert "scheme: not recognised: no attention kernel was found" in text


def test_schemes_of_several_files_are_said_once_where_they_are_the_same() -> None:
    report = report_with()
    same = (SCHEME, {**SCHEME, "path": "b.sqlite"})
    text = screen(replace(report, sections={**report.sections, "schemes": same}))
    assert text.count("ring (high confidence)") == 1
    other = (SCHEME, {**SCHEME, "path": "b.sqlite", "scheme": "ulysses"})
    text = screen(replace(report, sections={**report.sections, "schemes": other}))
    assert "scheme in a.sqlite: ring" in text
    assert "scheme in b.sqlite: ulysses" in text


def test_start_causes_of_few_ranks_and_of_many(tmp_path: Path) -> None:
    two = render(report_of(ulysses(), tmp_path), RenderOptions())
    part = two[two.index("Why communication and attention started") :].split("\n")
    assert part[1].split() == ["rank", "role", "waited", "last", "for", "ops", "exposed"]
    assert [line.split() for line in part[2:6]] == [
        ["0", "comm", "stream-order", "8", "800", "us"],
        ["0", "attention", "stream-order", "2", "0", "ns"],
        ["1", "comm", "stream-order", "8", "800", "us"],
        ["1", "attention", "stream-order", "2", "0", "ns"],
    ]
    many = render(report_of(Ring(n_ranks=8, kv_stream=COMPUTE).hosts(), tmp_path), RenderOptions())
    part = many[many.index("Why communication and attention started") :].split("\n\n")[0].split("\n")
    assert len(part) <= 2 + 12
    assert any(line.startswith("8 ranks") for line in part)


@pytest.mark.parametrize(
    "ring", [Ring(n_buffers=1), Ring(waits=False), Ring(kv_stream=COMPUTE, dkv_stream=COMPUTE)]
)
@pytest.mark.parametrize("width", [60, 80, 120])
def test_real_findings_fit(tmp_path: Path, ring: Ring, width: int) -> None:
    report = report_of(ring.hosts(), tmp_path)
    screen(report, width=width)
    screen(report, width=width, has_details=False)
