"""`cptrace doctor` as a user calls it."""

from __future__ import annotations

import json

import pytest

from cptrace import doctor
from cptrace.doctor import BROKEN, MISSING, OK, Finding
from tests.support.command_line import cptrace

FINDINGS = [
    Finding("torch", OK, "2.13.0"),
    Finding("cuda", MISSING, "no CUDA in this torch", "runs use the emulated device", "install a CUDA build"),
    Finding("nsys", BROKEN, "2022.4: no importer", "no --profiler nsys", "link it"),
]


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: FINDINGS)


def test_text_has_a_line_each_and_what_to_do_about_lacks() -> None:
    done = cptrace("doctor")
    assert (done.exit_code, done.err) == (0, "")
    lines = [line.strip() for line in done.out.splitlines()]
    assert lines == [
        "ok      torch  2.13.0",
        "missing cuda   no CUDA in this torch",
        "costs: runs use the emulated device",
        "mend:  install a CUDA build",
        "broken  nsys   2022.4: no importer",
        "costs: no --profiler nsys",
        "mend:  link it",
    ]


def test_long_answers_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "one word after another " * 9
    monkeypatch.setattr(doctor, "examine", lambda: [Finding("nsys", BROKEN, words, words, words)])
    out = cptrace("doctor").out
    assert out.split().count("word") == 27
    assert max(map(len, out.splitlines())) <= 80


def test_json_holds_the_same() -> None:
    document = json.loads(cptrace("doctor", "--format", "json").out)
    assert document["schema"] == "cptrace.doctor/1"
    assert [Finding(**row) for row in document["findings"]] == FINDINGS
