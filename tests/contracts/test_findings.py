"""The list of findings: complete, explained, known to `--fail-on`, and met by every fault."""

from __future__ import annotations

import pytest

from cptrace.faults import FAULTS
from cptrace.findings import FINDINGS, Diagnosis
from cptrace.findings.finding import CONFIDENCES, SEVERITIES
from cptrace.gates import CODES, FORMS

PROMISED = {
    "shared-stream": (), "missing-event": ("host-sync", "race"), "single-buffer": (),
    "required-order": ("data-flow", "transfer-bound"), "late-launch": ("in-steps", "between-steps"),
    "peer-wait": ("straggler", "slow-link", "skew"), "shared-communicator": (), "queue-order": (),
    "imbalance": ("schedule", "work"), "cp-off": (), "padding": (), "graph-hidden": (),
    "low-coverage": ("unclassified", "launches", "waits"),
}  # fmt: skip
"""Codes are stable: scripts and CI go by them. More may come; none may go or change."""
EACH = pytest.mark.parametrize("diagnosis", FINDINGS, ids=lambda diagnosis: diagnosis.code)


def test_every_code_is_there_once_with_its_forms() -> None:
    assert len({diagnosis.code for diagnosis in FINDINGS}) == len(FINDINGS)
    assert {diagnosis.code: diagnosis.forms for diagnosis in FINDINGS} == PROMISED


def test_fail_on_knows_every_code_and_form() -> None:
    assert dict(FORMS) == {diagnosis.code: diagnosis.forms for diagnosis in FINDINGS}
    assert tuple(FORMS) == CODES


@EACH
def test_every_finding_is_explained(diagnosis: Diagnosis) -> None:
    explanation = diagnosis.explanation
    texts = (explanation.what, explanation.detected, explanation.looks, explanation.fix)
    assert all(len(text) > 10 for text in texts[:3])
    assert all(text.endswith(".") for text in texts)
    assert diagnosis.title
    assert not diagnosis.title.endswith(".")
    for form in diagnosis.forms:
        assert form in " ".join(texts).lower(), f"form {form} is not explained"


@EACH
def test_what_is_mended_is_a_form_of_the_finding(diagnosis: Diagnosis) -> None:
    forms = [fix.form for fix in diagnosis.fixes]
    assert len(set(forms)) == len(forms)
    assert {form for form in forms if form is not None} <= set(diagnosis.forms)


def test_gains_are_predicted_for_what_can_be_mended_in_the_program() -> None:
    assert {diagnosis.code for diagnosis in FINDINGS if not diagnosis.fixes} == {
        "required-order", "cp-off", "padding", "graph-hidden", "low-coverage",
    }  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_has_its_finding(fault) -> None:
    forms = PROMISED[fault.finding]
    assert fault.form is None or fault.form in forms


def test_levels_are_ordered_for_people() -> None:
    assert SEVERITIES == ("error", "warning", "info")
    assert CONFIDENCES == ("low", "medium", "high")
