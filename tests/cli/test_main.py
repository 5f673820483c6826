"""The command as a whole: help, unknown words, exit codes, pipes, and no traceback for anything a user can cause."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import cptrace as package
from cptrace.cli import main as module
from cptrace.cli.main import VERBS
from tests.support.command_line import check_refused, cptrace
from tests.support.tiny_export import TinyExport


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    export = (
        TinyExport()
        .kernel("内核 😀", 0, 50, launch=2)
        .kernel("ncclDevKernel_SendRecv()", 20, 80, stream=13, launch=4)
    )
    return export.range("step", 0, 10).write(tmp_path_factory.mktemp("cli") / "t.sqlite")


def shell(*arguments, stdout=subprocess.PIPE, **env):
    """Run the command in a process of its own, warnings being errors."""
    command = [sys.executable, "-W", "error", "-m", "cptrace", *map(str, arguments)]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")
    } | env
    return subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, env=environment, timeout=60, check=False
    )


def test_version():
    assert cptrace("--version") == (0, f"cptrace, version {package.__version__}\n", "")


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_names_every_verb(option):
    outcome = cptrace(option)
    assert (outcome.exit_code, outcome.err) == (0, "")
    assert all(verb.name in outcome.out and verb.summary[:30] in outcome.out for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_help_of_every_verb(verb):
    for option in ("--help", "-h"):
        outcome = cptrace(verb.name, option)
        assert (outcome.exit_code, outcome.err) == (0, "")
        assert verb.name in outcome.out


def test_no_arguments_shows_help_and_is_no_success():
    outcome = cptrace()
    assert outcome.exit_code == 2
    assert "Commands" in outcome.out + outcome.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["analyse"], ["there is no command 'analyse'", "analyze"]),
        (["analyse", "--help"], ["there is no command 'analyse'"]),
        (["--verbose"], ["--verbose"]),
        (["analyze"], ["PATH", "--help"]),
        (["analyze", "--nothing", "x"], ["--nothing", "--help"]),
        (["analyze", "x", "--format"], ["--format"]),
        (["analyze", "x", "--format", "xml"], ["xml", "text", "json"]),
        (["analyze", "x", "--rank", "first"], ["first", "--rank"]),
        (["analyze", "x", "--window"], ["--window"]),
    ],
)
def test_usage_errors_are_one_line_and_exit_code_2(arguments, words):
    check_refused(cptrace(*arguments), 2, *words)


@pytest.mark.parametrize("arguments", [[], *([verb.name] for verb in VERBS)])
def test_help_fits_80_columns(arguments):
    lines = cptrace(*arguments, "--help").out.splitlines()
    assert max(len(line) for line in lines if "  cptrace " not in line) <= 80  # a command stays in one line


@pytest.mark.parametrize("verb", ["schemes", "explain"])
def test_lists_fit_80_columns(verb):
    assert max(map(len, cptrace(verb).out.splitlines())) <= 80


@pytest.mark.parametrize(
    "arguments", [["analyse"], ["analyze", "missing.sqlite"], ["analyze", "x", "--window", "5"]]
)
def test_a_process_of_its_own_shows_no_traceback_either(arguments):
    done = shell(*arguments)
    assert done.returncode in (2, 3)
    assert done.stdout == b""
    assert done.stderr.count(b"\n") == 1
    assert b"Traceback" not in done.stderr


def test_output_is_plain_where_no_terminal_is(path):
    for env in ({"NO_COLOR": "1"}, {"FORCE_COLOR": "1", "CLICOLOR_FORCE": "1", "TERM": "xterm-256color"}):
        done = shell("analyze", path, **env)
        assert (done.returncode, done.stderr) == (0, b""), done.stderr
        assert b"\x1b" not in done.stdout
        assert max(map(len, done.stdout.decode().splitlines())) <= max(80, len(str(path)))


@pytest.mark.parametrize("columns", ["120", "1", "wide"])
def test_columns(columns, path):
    done = shell("analyze", path, COLUMNS=columns)
    assert (done.returncode, done.stderr) == (0, b""), done.stderr
    bars = [line for line in done.stdout.decode().splitlines() if "█" in line and "compute" not in line]
    if columns == "120":
        assert len(bars[0]) == 119


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
@pytest.mark.parametrize("form", ["text", "json"])
def test_terminals_that_are_not_utf8(encoding, form, path):
    details = ["--details"] if form == "text" else []
    done = shell("analyze", path, "--format", form, *details, PYTHONIOENCODING=encoding, PYTHONUTF8="0")
    assert (done.returncode, done.stderr) == (0, b""), done.stderr
    assert b"ncclDevKernel_SendRecv" in done.stdout


def test_a_reader_that_has_seen_enough_is_no_error(path):
    """As with `| head -1`: the pipe is closed before the report is written."""
    for form in ("text", "json"):
        read, write = os.pipe()
        os.close(read)
        with os.fdopen(write, "wb") as pipe:
            done = shell("analyze", path, "--format", form, stdout=pipe)
        assert (done.returncode, done.stderr) == (0, b""), done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_said_in_one_line(path):
    with open("/dev/full", "wb") as full:
        done = shell("analyze", path, stdout=full)
    assert done.returncode == 5
    assert done.stderr.startswith(b"cptrace: cannot write")
    assert done.stderr.count(b"\n") == 1


def test_interrupting_is_exit_code_130(monkeypatch):
    def interrupt(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.cli, "main", interrupt)
    check_refused(cptrace("analyze"), 130, "interrupted")


def test_a_bug_is_not_dressed_up_as_a_user_error(monkeypatch):
    """What is no CptraceError keeps its traceback: it is ours to mend."""

    def fail(**_):
        raise ZeroDivisionError

    monkeypatch.setattr(module.cli, "main", fail)
    with pytest.raises(ZeroDivisionError):
        cptrace("analyze")
