"""Runs the command line in this process, as a shell would see it."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple
from unittest import mock

from cptrace.cli.main import main


class Outcome(NamedTuple):
    """What a command left behind."""

    exit_code: int
    out: str
    err: str


def cptrace(*arguments: object) -> Outcome:
    """Run `cptrace` with arguments; an exception other than the exit is the caller's to see, like a traceback."""
    out, err = io.StringIO(), io.StringIO()
    argv = ["cptrace", *map(str, arguments)]
    with mock.patch.object(sys, "argv", argv), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    return Outcome(code, out.getvalue(), err.getvalue())


def check_refused(outcome: Outcome, exit_code: int | tuple[int, ...], *words: str) -> None:
    """Check that a command was refused in one line that says all words, with nothing on standard output."""
    codes = exit_code if isinstance(exit_code, tuple) else (exit_code,)
    assert outcome.exit_code in codes, outcome
    assert outcome.out == ""
    assert outcome.err.startswith("cptrace: "), outcome.err
    assert outcome.err.count("\n") == 1, outcome.err
    assert outcome.err.endswith("\n")
    assert "Traceback" not in outcome.err
    for word in words:
        assert word in outcome.err, outcome.err
