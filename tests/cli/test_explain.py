"""`cptrace explain`: every code, and commands that show it."""

from __future__ import annotations

import json
import shlex

import pytest
from click.testing import CliRunner

from cptrace.capture.run_spec import RunSpec
from cptrace.cli import run as cli_run
from cptrace.cli.explain import command_of, commands
from cptrace.cli.run import run as run_command
from cptrace.faults import FAULTS, check_faults, find_fault, parse_fault
from cptrace.findings import FINDINGS
from tests.support.command_line import check_refused, cptrace

EACH = pytest.mark.parametrize("diagnosis", FINDINGS, ids=lambda diagnosis: diagnosis.code)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[RunSpec]:
    """Return where the options of runs go, none of which starts."""
    specs: list[RunSpec] = []

    def start(spec: RunSpec, *_: object) -> None:
        specs.append(spec)
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_run, "launch", start)
    return specs


def test_without_a_code_all_are_listed() -> None:
    done = cptrace("explain")
    assert done.exit_code == 0
    for diagnosis in FINDINGS:
        assert f"{diagnosis.code:<20} {diagnosis.title}\n" in done.out
    assert json.loads(cptrace("explain", "--format", "json").out) == [
        json.loads(cptrace("explain", diagnosis.code, "--format", "json").out) for diagnosis in FINDINGS
    ]


@EACH
def test_a_code_is_explained_in_80_columns(diagnosis) -> None:
    done = cptrace("explain", diagnosis.code)
    assert done.exit_code == 0
    lines = done.out.splitlines()
    assert lines[0] == f"{diagnosis.code}: {diagnosis.title}"
    assert max(len(line) for line in lines if "cptrace run" not in line) <= 80
    words = " ".join(done.out.split())
    for text in (diagnosis.explanation.what, diagnosis.explanation.detected, diagnosis.explanation.fix):
        assert text in words
    for form in diagnosis.forms:
        assert form in lines[1]
    for command in commands(diagnosis):
        assert f"  {command}" in lines[lines.index("See it") :]
    assert ("cptrace whatif REPORT --fix" in done.out) == bool(diagnosis.fixes)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_command_of_a_fault_is_a_run_in_which_it_changes_something(fault, asked: list[RunSpec]) -> None:
    words = shlex.split(command_of(fault))
    assert words[:2] == ["cptrace", "run"]
    CliRunner().invoke(run_command, [*words[2:], "-o", "unused.sqlite"])
    (spec,) = asked
    assert find_fault(parse_fault(spec.faults[0]).name) is fault
    check_faults(spec)


def test_every_fault_is_named_by_its_finding() -> None:
    named = [command for diagnosis in FINDINGS for command in commands(diagnosis)]
    assert {command_of(fault) for fault in FAULTS} <= set(named)


@EACH
def test_a_form_shows_its_code(diagnosis) -> None:
    for form in diagnosis.forms:
        assert cptrace("explain", f"{diagnosis.code}:{form}").out == cptrace("explain", diagnosis.code).out
    wrong = cptrace("explain", f"{diagnosis.code}:typo")
    check_refused(wrong, 2, f"{diagnosis.code} has no form 'typo'", ", ".join(diagnosis.forms) or "none")


def test_an_unknown_code_lists_the_codes() -> None:
    check_refused(
        cptrace("explain", "slow"), 2, "there is no finding 'slow'", "single-buffer", "low-coverage"
    )
