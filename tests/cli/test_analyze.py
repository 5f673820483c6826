"""`cptrace analyze` as users call it: right files and figures, and every kind of wrong file and wrong option."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.support.command_line import check_refused, cptrace
from tests.support.damage import DAMAGES
from tests.support.shared_traces import ROOT, nsys_traces, require_trace
from tests.support.synthetic_nsys import write_synthetic
from tests.support.tiny_export import KERNEL, TinyExport, edit

NO_KERNELS = "nsys/nsys-no-kernels.sqlite"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "good.sqlite"
    write_synthetic(path, 2_000, 2_200, 400, n_steps=3)
    return path


@pytest.fixture
def tiny(tmp_path):
    """
    host      step 1 [0 .. 4)     step 2 [4 ... 8)
    rank 0         [10 == 20)            [30 == 40)
    rank 1         [10 ======== 30)
    """
    export = TinyExport().range("step 1", 0, 4).range("step 2", 4, 8)
    export.kernel("nvjet", 10, 20, launch=1).kernel("nvjet", 30, 40, launch=5)
    return export.kernel("nvjet", 10, 30, pid=200, device=1).write(tmp_path / "tiny.sqlite")


def document(*arguments):
    outcome = cptrace("analyze", "--format", "json", *arguments)
    assert (outcome.exit_code, outcome.err) == (0, ""), outcome.err
    return json.loads(outcome.out)


def without_paths(value):
    """Return a report without what names its files."""
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    if isinstance(value, dict):
        return {key: without_paths(item) for key, item in value.items() if key not in ("inputs", "path")}
    return value


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def n_left_out_or_unknown(report) -> int:
    notes = sum(note["count"] or 0 for note in report["coverage"]["notes"])
    return notes + sum(
        entry["count"] for entry in report["coverage"]["unclassified"] if "unnamed" in entry["name"]
    )


@pytest.mark.parametrize("drop", [[], ["--drop-invalid"]], ids=["", "drop"])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
def test_damaged_files(damage, drop, good, tmp_path):
    """Refused in one line, or an answer that says what it is missing; the file and its folder stay as they are."""
    damage.make(good, tmp_path / "bad.sqlite")
    before = files(tmp_path)
    outcome = cptrace("analyze", "--format", "json", tmp_path / "bad.sqlite", *drop)
    assert files(tmp_path) == before
    if damage.expect == "refused" or outcome.exit_code != 0:
        check_refused(outcome, (3, 4), "bad.sqlite")
        assert any(
            word in outcome.err
            for word in ("export", "copy", "make one", "record", "cptrace reads", "settle")
        )
        assert damage.expect in ("refused", "refused-or-counted", "refused-or-same-answer")
        assert "\x00" not in outcome.err
        return
    report = json.loads(outcome.out)
    if damage.expect == "no-device":
        assert {"account", "steps", "collectives", "streams", "kernels"} <= {
            entry["analysis"] for entry in report["not_applicable"]
        }
    elif damage.expect == "refused-or-counted":
        assert n_left_out_or_unknown(report) > 0
    else:
        assert without_paths(report) == without_paths(document(good))


@pytest.mark.parametrize(
    ("name", "code"),
    [("empty-file", 3), ("truncated-50", 3), ("other-database", 3), ("no-start-column", 3), ("text-in-integers", 3),
     ("reversed-times", 4), ("negative-times", 4), ("null-end", 4), ("huge-times", 4)],
)  # fmt: skip
def test_a_bad_file_is_3_and_contradicting_content_is_4(name, code, good, tmp_path):
    (damage,) = [damage for damage in DAMAGES if damage.name == name]
    damage.make(good, tmp_path / "bad.sqlite")
    assert cptrace("analyze", tmp_path / "bad.sqlite").exit_code == code


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_damaged_file_among_several_gives_no_half_report(form, good, tmp_path):
    bad = tmp_path / "bad.sqlite"
    bad.write_bytes(good.read_bytes()[: good.stat().st_size // 2])
    for paths in ([good, bad], [bad, good]):
        check_refused(cptrace("analyze", "--format", form, *paths), 3, "bad.sqlite")


def test_paths_that_are_no_traces(tmp_path):
    missing = tmp_path / "missing.sqlite"
    check_refused(cptrace("analyze", missing), 3, "missing.sqlite", "No such file", "check the path")
    check_refused(cptrace("analyze", tmp_path), 3, "is a folder")
    check_refused(cptrace("analyze", ""), 3, "is a folder")
    (tmp_path / "notes.txt").write_text("hello, this is text")
    check_refused(cptrace("analyze", tmp_path / "notes.txt"), 3, "not a known trace format", "nsys export")
    (tmp_path / "short").write_bytes(b"SQLite format 3\x00")
    check_refused(cptrace("analyze", tmp_path / "short"), 3, "short")
    check_refused(cptrace("analyze", tmp_path / ("x" * 300)), 3, "cannot be opened")
    check_refused(cptrace("analyze", tmp_path / "notes.txt" / "below"), 3, "cannot be opened")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    check_refused(cptrace("analyze", tmp_path / "loop"), 3, "cannot be opened")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    check_refused(cptrace("analyze", tmp_path / "gone"), 3, "cannot be opened")


def test_a_named_pipe_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe.sqlite")
    check_refused(cptrace("analyze", tmp_path / "pipe.sqlite"), 3, "pipe.sqlite", "not a regular file")


def test_names_in_messages_stay_on_one_line(tmp_path):
    check_refused(cptrace("analyze", tmp_path / "two\nlines"), 3, "two lines")


@pytest.mark.parametrize("suffix", [".nsys-rep", ".qdrep"])
def test_a_report_without_nsys(suffix, tmp_path, monkeypatch):
    path = tmp_path / f"my report{suffix}"
    path.write_bytes(b"whatever")
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ("nsys is not on PATH", "nsys export --type sqlite", f"'{path}'", "'my report.sqlite'")
    check_refused(cptrace("analyze", path), 3, *words)


def fake_nsys(folder: Path, script: str) -> None:
    (folder / "bin").mkdir()
    (folder / "bin" / "nsys").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "bin" / "nsys").chmod(0o755)


def test_a_report_is_exported_to_a_place_of_its_own(good, tmp_path, monkeypatch):
    """The fake `nsys export --type sqlite --output OUT IN` copies a good export."""
    fake_nsys(tmp_path, f'test "$1" = export && cp "{good}" "$5"')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    report = tmp_path / "run 1.nsys-rep"
    report.write_bytes(b"report")
    found = document(report)
    assert without_paths(found) == without_paths(document(good))
    assert (found["inputs"][0]["path"], found["inputs"][0]["format"]) == (str(report), "nsys_rep")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "run 1.nsys-rep"]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'cannot open' >&2; exit 1", ["cannot open"]),
        ("exit 7", ["exit code 7"]),
        ("exit 0", ["not export"]),
    ],
)
def test_a_report_that_nsys_cannot_export(script, words, tmp_path, monkeypatch):
    fake_nsys(tmp_path, script)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    report = tmp_path / "run.nsys-rep"
    report.write_bytes(b"report")
    check_refused(cptrace("analyze", report), 3, "run.nsys-rep", "try by hand", *words)


@pytest.mark.parametrize(
    "window",
    ["", ":", " : ", "5", "5:9", "1ms", "a:b", "1ms:2", "2ms:1ms", "1ms:1ms", "1ms:2ms:3ms", "-1ms:2ms", "1.5ns:2ns",
     "ALL", "99999999999s:", ":99999999999999999999s", "1e3ms:2s", "nan s:1s"],
)  # fmt: skip
def test_windows_that_cannot_be_meant(window, tiny):
    check_refused(cptrace("analyze", tiny, f"--window={window}"), 2)


@pytest.mark.parametrize("window", ["1s:2s", "40ns:", ":10ns", "0ns:10ns", "9000000000s:"])
def test_windows_outside_the_trace(window, tiny):
    check_refused(cptrace("analyze", tiny, "--window", window), 2, "outside the trace", "10 ns", "40 ns")


@pytest.mark.parametrize(
    "window",
    ["15ns:35ns", "0.015us:0.035us", "0.000015ms : 0.000035ms", "0.000000015s:35 ns", "15ns:0.035µs"],
)
def test_units_of_windows(window, tiny):
    ranks = document(tiny, "--window", window)["ranks"]
    assert [(row["window_ns"], row["compute_ns"], row["window_basis"]) for row in ranks] == [
        (20, 10, "option"),
        (20, 15, "option"),
    ]


def test_the_window_is_everything_or_the_steps(tiny):
    assert [row["window_ns"] for row in document(tiny)["ranks"]] == [20, 20]
    assert [row["window_ns"] for row in document(tiny, "--window", "all")["ranks"]] == [30, 20]


def test_ranks(tiny):
    assert [row["rank"] for row in document(tiny, "--rank", "1")["ranks"]] == [1]
    assert [row["rank"] for row in document(tiny, "--rank", "1", "--rank", "0")["ranks"]] == [0, 1]
    for rank in ("2", "-1", "99999999999999999999"):
        check_refused(cptrace("analyze", tiny, "--rank", rank), 2, f"rank {rank} is not in", "0, 1")
    for rank in ("1.5", "one", ""):
        check_refused(cptrace("analyze", tiny, "--rank", rank), 2, "--rank")


def test_step_ranges(tiny):
    assert [row["name"] for row in document(tiny, "--step-range", "step 2")["steps"]] == ["step 2"]
    assert len(document(tiny, "--step-range", "")["steps"]) == 2
    check_refused(cptrace("analyze", tiny, "--step-range", "["), 2, "not a regular expression")
    check_refused(cptrace("analyze", tiny, "--step-range", "(?P<"), 2, "not a regular expression")
    check_refused(cptrace("analyze", tiny, "--step-range", "epoch"), 2, "matches no range", "step N")
    check_refused(cptrace("analyze", require_trace(NO_KERNELS), "--step-range", "x"), 2, "no NVTX ranges")


def test_a_trace_without_device_work_is_no_error():
    outcome = cptrace("analyze", require_trace(NO_KERNELS))
    assert (outcome.exit_code, outcome.err) == (0, "")
    assert "Could not tell" in outcome.out
    check_refused(cptrace("analyze", require_trace(NO_KERNELS), "--rank", "0"), 2, "(none)")


def test_drop_invalid_counts_what_it_leaves_out(tmp_path):
    path = TinyExport().kernel("nvjet", 0, 10).kernel("nvjet", 30, 20).write(tmp_path / "t.sqlite")
    check_refused(cptrace("analyze", path), 4, "1 of 2 rows", "--drop-invalid")
    outcome = cptrace("analyze", path, "--drop-invalid")
    assert outcome.exit_code == 0
    assert "left out (1x)" in " ".join(outcome.out.split())


def test_several_files(tmp_path):
    paths = [TinyExport().kernel("nvjet", 0, 10 * n).write(tmp_path / f"{n}.sqlite") for n in (1, 2, 3)]
    report = document(*paths)
    assert [(row["rank"], row["window_ns"]) for row in report["ranks"]] == [(0, 10), (1, 20), (2, 30)]
    assert [row["path"] for row in report["inputs"]] == [str(path) for path in paths]
    assert document(*paths, "--rank", "2")["ranks"] == report["ranks"][2:]
    check_refused(cptrace("analyze", *paths, "--rank", "3"), 2, "the ranks are 0, 1, 2")


def test_options_may_come_first_or_last_and_paths_may_look_like_options(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(tiny, tmp_path / "--format")
    assert document("--", "--format")["ranks"] == document(tiny)["ranks"]


@pytest.mark.parametrize(
    "path", [*nsys_traces(), *sorted((ROOT / "samples").glob("*.sqlite"))], ids=lambda p: p.name
)
def test_real_traces(path):
    assert document(path)["schema"] == "cptrace.report/1"


def test_known_figures_through_the_command_line():
    report = document(require_trace("nsys/nsys-2026.2-ulysses-2gpu.sqlite"), "--window", "all")
    assert [
        (row["device"], row["window_ns"], row["compute_ns"], row["comm_ns"], row["overlap"], row["idle_ns"])
        for row in report["ranks"]
    ] == [
        (0, 299_848_812, 253_690_832, 17_172_652, 0.0, 26_031_025),
        (1, 298_661_551, 256_095_624, 8_229_100, 0.0, 31_385_635),
    ]
    assert sum(row["count"] for row in report["collectives"]) == 66
    assert sum(row["total_ns"] for row in report["collectives"]) == 25_401_752


@pytest.mark.parametrize(
    ("statement", "code"),
    [
        ("UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET correlationId = 9223372036854775807 WHERE rowid = 1", 0),
        ("UPDATE NVTX_EVENTS SET eventType = 4294967295 WHERE rowid = 1", 0),
        ("UPDATE NVTX_EVENTS SET start = -9223372036854775808 WHERE rowid = 1", 0),
        ("UPDATE NVTX_EVENTS SET text = zeroblob(100000) WHERE rowid = 1", 0),
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET deviceId = 4294967295", 0),
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET deviceId = 9223372036854775807", None),
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET deviceId = -1 WHERE rowid = 1", None),
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET streamId = 9223372036854775807", None),
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET globalPid = -1", None),
        ("UPDATE StringIds SET value = x'00' WHERE rowid = 1", 0),
        ("ALTER TABLE StringIds RENAME value TO text", 3),
        ("INSERT INTO META_DATA_CAPTURE VALUES ('CPTRACE_RUN', '{')", 4),
        ("DELETE FROM CUPTI_ACTIVITY_KIND_RUNTIME", 0),
        ("DROP TABLE NVTX_EVENTS", 0),
    ],
)
def test_odd_values_never_give_a_traceback(statement, code, good, tmp_path):
    path = tmp_path / "odd.sqlite"
    shutil.copyfile(good, path)
    outcome = cptrace("analyze", edit(path, statement))
    if outcome.exit_code:
        check_refused(outcome, (3, 4) if code is None else code)
    else:
        assert code in (0, None)
        assert outcome.err == ""
        assert "NOT EXACT" not in outcome.out


def test_a_file_that_is_replaced_while_it_is_read_is_not_our_problem_to_change(good):
    """The file is opened read-only: its permissions may forbid writing."""
    mode = good.stat().st_mode
    good.chmod(0o444)
    try:
        assert cptrace("analyze", good).exit_code == 0
    finally:
        good.chmod(mode)


def test_one_kernel_table_is_enough(tmp_path):
    path = TinyExport().kernel("nvjet", 0, 10).write(tmp_path / "t.sqlite")
    edit(path, "DROP TABLE META_DATA_EXPORT")
    assert document(path)["ranks"][0]["compute_ns"] == 10
    assert KERNEL not in document(path)["coverage"]["missing_tables"]
