"""Values that no export has, but a damaged file may: refused or counted, never silently another figure."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import cptrace
from cptrace.errors import SourceError, TraceError
from cptrace.requests import AnalyzeOptions, ReadOptions
from tests.support.tiny_export import KERNEL, NVTX, TinyExport

LOOSE = AnalyzeOptions(read=ReadOptions(drop_invalid=True))


def export(path: Path) -> Path:
    built = (
        TinyExport()
        .range("step 0", 0, 50)
        .kernel("flash", 100, 300, launch=10)
        .kernel("flash", 300, 400, launch=20)
    )
    return built.write(path, is_strict=False)


def edit(path: Path, statement: str) -> Path:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(statement)
        connection.commit()
    return path


@pytest.mark.parametrize("column", ["deviceId", "contextId", "streamId", "globalPid", "start", "end"])
def test_a_kernel_that_is_nowhere_is_refused_or_left_out(column: str, tmp_path: Path) -> None:
    path = edit(export(tmp_path / "t.sqlite"), f'UPDATE {KERNEL} SET "{column}" = NULL WHERE start = 300')
    with pytest.raises(TraceError, match="1 of 2 rows"):
        cptrace.analyze(path)
    report = cptrace.analyze(path, LOOSE)
    assert [(row["rank"], row["compute_ns"]) for row in report.rows("ranks")] == [(0, 200)]
    (note,) = report.coverage["notes"]
    lost = "how long they took is not known" if column in ("start", "end") else "100 ns of device time"
    assert (note["count"], note["text"].split(" (")[1]) == (1, f"{lost}) were left out")


def test_a_range_without_a_start_is_left_out_and_counted(tmp_path: Path) -> None:
    path = edit(export(tmp_path / "t.sqlite"), f"UPDATE {NVTX} SET start = NULL")
    report = cptrace.analyze(path)
    assert report.rows("ranks")[0]["window_basis"] == "all"
    assert [note["code"] for note in report.coverage["notes"]] == ["dropped-rows"]


@pytest.mark.parametrize("statement", ["DELETE FROM StringIds", "DROP TABLE StringIds"])
def test_kernels_without_names_are_refused(statement: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="communication cannot be told from compute"):
        cptrace.analyze(edit(export(tmp_path / "t.sqlite"), statement))


def test_a_schema_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = export(tmp_path / "t.sqlite")
    name = b"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL"
    content = path.read_bytes()
    for damaged in (
        b"CREATE TABL\xa2 CUPTI_ACTIVITY_KIND_KERNEL",
        b"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNE\xa2",
    ):
        path.write_bytes(content.replace(name, damaged, 1))
        with pytest.raises(SourceError, match="damaged"):
            cptrace.analyze(path)
