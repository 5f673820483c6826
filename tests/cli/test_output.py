"""Output files: never overwritten unasked, never half written, never an input."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from cptrace.cli.main import VERBS
from cptrace.cli.output import has_color, terminal_width, write_output
from cptrace.errors import RenderError
from cptrace.exports import EXPORTS
from tests.support.command_line import check_refused, cptrace
from tests.support.tiny_export import TinyExport

IS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


@pytest.fixture
def path(tmp_path):
    return TinyExport().kernel("nvjet", 0, 50).write(tmp_path / "t.sqlite")


def test_a_new_file_gets_what_the_terminal_would(path, tmp_path):
    out = tmp_path / "report.json"
    outcome = cptrace("analyze", path, "--format", "json", "-o", out)
    assert outcome == (0, "", "")
    assert out.read_text() == cptrace("analyze", path, "--format", "json").out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.json", "t.sqlite"]
    text = tmp_path / "report.txt"
    assert cptrace("analyze", path, "--output", text).exit_code == 0
    assert text.read_text() == cptrace("analyze", path).out
    assert "\x1b" not in text.read_text()


def test_permissions_are_what_the_user_gives_new_files(path, tmp_path):
    before = os.umask(0o027)
    try:
        cptrace("analyze", path, "-o", tmp_path / "out")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o640


def test_an_existing_file_is_kept_unless_forced(path, tmp_path):
    out = tmp_path / "out.txt"
    out.write_text("precious")
    check_refused(cptrace("analyze", path, "-o", out), 5, "exists", "--force")
    assert out.read_text() == "precious"
    assert cptrace("analyze", path, "-o", out, "--force").exit_code == 0
    assert out.read_text().startswith(str(path))


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_an_input_is_never_written_to(force, path, tmp_path):
    content = path.read_bytes()
    (tmp_path / "link").symlink_to(path)
    os.link(path, tmp_path / "hard")
    for out in (path, tmp_path / "." / "t.sqlite", tmp_path / "link", tmp_path / "hard"):
        check_refused(cptrace("analyze", path, "-o", out, *force), 5, "cannot write")
    check_refused(cptrace("analyze", tmp_path / "link", "-o", path, *force), 5, "cannot write")
    other = TinyExport().kernel("nvjet", 0, 50).write(tmp_path / "other.sqlite")
    check_refused(cptrace("analyze", other, path, "-o", path, *force), 5, "cannot write")
    assert path.read_bytes() == content


@pytest.mark.parametrize("force", [[], ["--force"]])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        (".", ["folder"]),
        ("", ["folder"]),
        ("no/such/out.txt", ["no folder", "make it"]),
        ("t.sqlite/out", ["no folder"]),
    ],
)
def test_places_that_cannot_be(name, words, force, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_refused(cptrace("analyze", path, "-o", name, *force), 5, *words)
    assert [p.name for p in tmp_path.iterdir()] == ["t.sqlite"]


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_a_name_that_is_too_long(force, path, tmp_path):
    check_refused(cptrace("analyze", path, "-o", tmp_path / ("x" * 300), *force), 5, "cannot write", "long")


def test_a_name_of_the_greatest_length_works(path, tmp_path):
    out = tmp_path / ("x" * 255)
    assert cptrace("analyze", path, "-o", out) == (0, "", "")
    assert out.is_file()


def test_devices_and_pipes_are_never_replaced_by_a_file(path, tmp_path):
    """Run as root, replacing /dev/null would break the machine."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for out in (pipe, "/dev/null"):
        before = os.stat(out)
        check_refused(cptrace("analyze", path, "-o", out, "--force"), 5, "not a regular file")
        assert os.stat(out).st_rdev == before.st_rdev
        assert stat.S_IFMT(os.stat(out).st_mode) == stat.S_IFMT(before.st_mode)


WRITERS = (
    ("analyze", "t.sqlite"),
    ("compare", "t.sqlite", "t.sqlite"),
    ("whatif", "t.sqlite", "--fix", "single-buffer"),
    *(("export", "t.sqlite", "--to", export.name) for export in EXPORTS),
    ("run",),
)


def test_every_command_with_an_output_is_among_the_writers():
    found = {
        verb.name
        for verb in VERBS
        if any("--output" in option.opts for option in getattr(import_module(verb.module), verb.name).params)
    }
    assert found == {words[0] for words in WRITERS}


@pytest.mark.parametrize("force", [[], ["--force"]])
@pytest.mark.parametrize("words", WRITERS, ids=" ".join)
def test_a_dash_is_not_taken_for_a_file(words, force, path, tmp_path, monkeypatch):
    """Other tools mean standard output by it; a file of that name would be found by nobody."""
    monkeypatch.chdir(tmp_path)
    has_stdout = words[0] in ("analyze", "compare", "whatif")
    advice = "leave -o out for standard output" if has_stdout else "name a file"
    check_refused(cptrace(*words, "-o", "-", *force), 2, "-o -", advice)
    assert [p.name for p in tmp_path.iterdir()] == ["t.sqlite"]


def test_a_link_stays_a_link(path, tmp_path):
    """The file that a link points to is replaced, as with every other tool."""
    (tmp_path / "data").mkdir()
    target = tmp_path / "data" / "real.txt"
    target.write_text("old")
    link = tmp_path / "link.txt"
    link.symlink_to(target)
    assert cptrace("analyze", path, "-o", link, "--force").exit_code == 0
    assert link.is_symlink()
    assert target.read_text().startswith(str(path))
    assert [p.name for p in target.parent.iterdir()] == ["real.txt"]


@pytest.mark.skipif(IS_ROOT, reason="root may write everywhere")
def test_places_without_permission(path, tmp_path):
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o555)
    check_refused(cptrace("analyze", path, "-o", folder / "out"), 5, "permission denied")
    existing = tmp_path / "existing"
    existing.write_text("x")
    existing.chmod(0o444)
    check_refused(cptrace("analyze", path, "-o", existing, "--force"), 5, "permission denied")


def test_the_place_is_checked_before_any_work_is_done(path, tmp_path):
    """A bad input and a bad output: the output is known to be wrong without reading anything."""
    check_refused(cptrace("analyze", tmp_path / "missing.sqlite", "-o", tmp_path), 5, "folder")


def test_nothing_is_written_where_the_input_is_bad(tmp_path):
    (tmp_path / "bad.sqlite").write_bytes(b"")
    check_refused(cptrace("analyze", tmp_path / "bad.sqlite", "-o", tmp_path / "out"), 3, "empty")
    assert [p.name for p in tmp_path.iterdir()] == ["bad.sqlite"]


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.write_text("old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(RenderError, match="No space left on device"):
        write_output("new", out)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert out.read_text() == "old"


def test_files_are_utf8_whatever_the_locale(tmp_path):
    write_output("内核 😀\n", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == "内核 😀\n".encode()


@pytest.mark.parametrize(
    ("is_tty", "env", "color"),
    [
        (False, {}, False),
        (True, {}, True),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (True, {"TERM": "dumb"}, False),
        (False, {"FORCE_COLOR": "1"}, False),
    ],
)
def test_has_color(is_tty, env, color, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_tty, raising=False)
    assert has_color() is color


@pytest.mark.parametrize(("columns", "width"), [(None, 80), ("100", 100), ("x", 80), ("0", 80)])
def test_terminal_width(columns, width, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)
    assert terminal_width() == width


def test_a_closed_standard_output_is_one_line_and_no_traceback(tmp_path):
    path = TinyExport().kernel("k", 0, 10).write(tmp_path / "t.sqlite")
    command = f'exec "{sys.executable}" -m cptrace analyze "{path}" >&-'
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (5, 1)
    assert "closed" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_every_command_says_that_a_disk_is_full():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "cptrace", "schemes"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr.count("\n")) == (5, 1)
