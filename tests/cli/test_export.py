"""`cptrace export` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cptrace.exports import EXPORTS
from tests.support.command_line import check_refused, cptrace
from tests.support.tiny_export import TinyExport


@pytest.fixture
def report(tmp_path: Path) -> Path:
    export = (
        TinyExport()
        .kernel("flash_fwd_kernel", 10, 30, launch=2)
        .kernel("ncclDevKernel_SendRecv", 20, 40, launch=4)
    )
    return export.write(tmp_path / "report.sqlite")


@pytest.mark.parametrize("export", EXPORTS, ids=lambda export: export.name)
def test_every_format_is_written_and_leaves_nothing_else(report: Path, export, tmp_path: Path) -> None:
    before = report.read_bytes()
    target = tmp_path / "out.json"
    done = cptrace("export", report, "--to", export.name, "-o", target)
    assert (done.exit_code, done.out, done.err) == (0, "", "")
    assert target.is_dir() == export.is_folder
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "report.sqlite"]
    assert report.read_bytes() == before
    check_refused(cptrace("export", report, "--to", export.name, "-o", target), 5, "it exists", "--force")
    assert cptrace("export", report, "--to", export.name, "-o", target, "--force").exit_code == 0


def test_what_was_written_is_read_again(report: Path, tmp_path: Path) -> None:
    cptrace("export", report, "--to", "kineto", "-o", tmp_path / "trace.json.gz")
    rows = [
        json.loads(cptrace("analyze", path, "--format", "json").out)["ranks"][0]
        for path in (report, tmp_path / "trace.json.gz")
    ]
    assert rows[0] == rows[1]
    assert rows[0]["overlapped_comm_ns"] == 10


def test_one_rank_may_be_asked_for(report: Path, tmp_path: Path) -> None:
    target = tmp_path / "rank0.json"
    assert cptrace("export", report, "--to", "kineto", "--rank", 0, "-o", target).exit_code == 0
    assert json.loads(target.read_text())["distributedInfo"]["rank"] == 0
    refused = cptrace("export", report, "--to", "kineto", "--rank", 7, "-o", tmp_path / "rank7.json")
    check_refused(refused, 2, "--rank 7", "its ranks are 0")
    assert not (tmp_path / "rank7.json").exists()


def test_an_input_is_never_written_to(report: Path) -> None:
    check_refused(cptrace("export", report, "--to", "kineto", "-o", report, "--force"), 5, "it is an input")


def test_a_folder_with_other_files_is_not_removed(report: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "notes.txt").write_text("keep")
    refused = cptrace("export", report, "--to", "parquet", "-o", folder, "--force")
    check_refused(refused, 5, "holds other files too, such as notes.txt")
    assert (folder / "notes.txt").read_text() == "keep"


def test_a_missing_folder_and_a_missing_format_are_refused(report: Path, tmp_path: Path) -> None:
    for name in ("kineto", "parquet"):
        refused = cptrace("export", report, "--to", name, "-o", tmp_path / "none" / "x.json")
        check_refused(refused, 5, "there is no folder")
    check_refused(cptrace("export", report, "--to", "svg", "-o", tmp_path / "x"), 2, "svg")
