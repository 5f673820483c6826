"""The writer's files, read back with sqlite3."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from cptrace.capture import nsys_sqlite_writer
from cptrace.capture.nsys_sqlite_writer import global_pid, partial_path, write_report
from cptrace.capture.records import (
    ApiCall,
    CopyKind,
    EventRecord,
    Op,
    OpKind,
    ProcessRecord,
    Range,
    Stream,
    Synchronization,
)
from cptrace.errors import RenderError
from tests.support.emulated_report import NONE_ID, query
from tests.support.shared_traces import require_trace

RUN = {"schema": "cptrace.run/1", "scheme": "ring"}


def process(rank: int) -> ProcessRecord:
    """Return a process with one of everything.

    host    [launch 1][copy 2][set 3][record 4][wait 5][event 6][stream 7][device 8]
    stream 7   kernel 1 ── memcpy 2 ── memset 3 ── ● event 1
    stream 13                                        └─ waits
    """
    pid = 1000 + rank
    kernel = Op(OpKind.KERNEL, "space::body<int>", 100, 200, rank, 1, 7, 1)
    copy = Op(OpKind.MEMCPY, "copy", 200, 230, rank, 1, 7, 2, 64, CopyKind.DEVICE_TO_DEVICE, rank, rank)
    clear = Op(OpKind.MEMSET, "set", 230, 240, rank, 1, 7, 3, bytes=32, value=0)
    names = (
        "cudaLaunchKernel_v7000",
        "cudaMemcpyAsync_v3020",
        "cudaMemsetAsync_v3020",
        "cudaEventRecord_v3020",
        "cudaStreamWaitEvent_v3020",
        "cudaEventSynchronize_v3020",
        "cudaStreamSynchronize_v3020",
        "cudaDeviceSynchronize_v3020",
    )
    calls = [ApiCall(name, 10 * i, 10 * i + 5, pid, i) for i, name in enumerate(names, start=1)]
    return ProcessRecord(
        rank=rank,
        pid=pid,
        device=rank,
        device_name="CPU emulation",
        context=1,
        streams=[Stream(1, 13), Stream(1, 7)],
        ops=[clear, copy, kernel],
        api_calls=[*calls, ApiCall("cuLaunchKernelEx", 90, 95, pid, 9)],
        synchronizations=[
            Synchronization(50, 55, 1, 13, 1, 1, 5),
            Synchronization(60, 65, 1, None, 1, 1, 6),
            Synchronization(70, 75, 1, 7, None, None, 7),
            Synchronization(80, 85, 1, None, None, None, 8),
        ],
        event_records=[EventRecord(1, 7, 1, 1, 4)],
        ranges=[
            Range("attention hop=2", 8, 30, pid, "cptrace", "attention", 2),
            Range("step", 0, 100, pid, "cptrace", "step", 0),
        ],
    )


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """Return a report of two processes."""
    path = tmp_path / "report.sqlite"
    write_report(path, [process(1), process(0)], RUN)
    return path


def test_kernels_come_back_with_names_and_places(report: Path) -> None:
    rows = query(
        report,
        "SELECT start, end, deviceId, contextId, streamId, correlationId, globalPid, d.value, s.value "
        "FROM CUPTI_ACTIVITY_KIND_KERNEL JOIN StringIds d ON d.id = demangledName "
        "JOIN StringIds s ON s.id = shortName",
    )
    assert rows == [
        (100, 200, rank, 1, 7, 1, global_pid(1000 + rank), "space::body<int>", "body<int>") for rank in (0, 1)
    ]


def test_copies_and_sets_come_back(report: Path) -> None:
    copies = query(report, "SELECT bytes, copyKind, srcDeviceId, dstDeviceId FROM CUPTI_ACTIVITY_KIND_MEMCPY")
    assert copies == [(64, 8, 0, 0), (64, 8, 1, 1)]
    assert query(report, "SELECT value, bytes FROM CUPTI_ACTIVITY_KIND_MEMSET") == [(0, 32), (0, 32)]


def test_each_synchronization_is_told_by_its_ids_and_its_type(report: Path) -> None:
    rows = query(
        report,
        "SELECT streamId, eventId, eventSyncId, e.label FROM CUPTI_ACTIVITY_KIND_SYNCHRONIZATION "
        "JOIN ENUM_CUPTI_SYNC_TYPE e ON e.id = syncType WHERE deviceId = 1 ORDER BY start",
    )
    assert rows == [
        (13, 1, 1, "Stream wait sync"),
        (NONE_ID, 1, 1, "Event sync"),
        (7, NONE_ID, NONE_ID, "Stream sync"),
        (NONE_ID, NONE_ID, NONE_ID, "Context sync"),
    ]


def test_a_wait_finds_its_record_by_process_and_sync_id(report: Path) -> None:
    rows = query(
        report,
        "SELECT w.streamId, r.streamId FROM CUPTI_ACTIVITY_KIND_SYNCHRONIZATION w "
        "JOIN CUPTI_ACTIVITY_KIND_CUDA_EVENT r USING (globalPid, eventSyncId, eventId) "
        f"WHERE w.streamId != {NONE_ID}",
    )
    assert rows == [(13, 7), (13, 7)]


def test_calls_have_their_class_and_thread(report: Path) -> None:
    rows = query(
        report,
        "SELECT value, eventClass, globalTid FROM CUPTI_ACTIVITY_KIND_RUNTIME JOIN StringIds ON id = nameId "
        "WHERE correlationId IN (1, 9) AND globalTid & 16777215 = 1001",
    )
    thread = global_pid(1001) | 1001
    assert rows == [("cudaLaunchKernel_v7000", 0, thread), ("cuLaunchKernelEx", 1, thread)]


def test_ranges_come_back_with_domain_category_and_payload(report: Path) -> None:
    rows = query(
        report,
        "SELECT s.value, n.start, n.end, n.int64Value, d.text, c.text FROM NVTX_EVENTS n "
        "JOIN StringIds s ON s.id = n.textId "
        "JOIN NVTX_EVENTS d ON d.eventType = 75 AND d.domainId = n.domainId AND d.globalTid = n.globalTid "
        "JOIN NVTX_EVENTS c ON c.eventType = 33 AND c.category = n.category AND c.globalTid = n.globalTid "
        "WHERE n.eventType = 59 AND n.globalTid & 16777215 = 1000 ORDER BY n.start",
    )
    assert rows == [
        ("step", 0, 100, 0, "cptrace", "step"),
        ("attention hop=2", 8, 30, 2, "cptrace", "attention"),
    ]


def test_targets_and_metadata_come_back(report: Path) -> None:
    assert query(report, "SELECT id, name FROM TARGET_INFO_GPU") == [
        (0, "CPU emulation"),
        (1, "CPU emulation"),
    ]
    streams = query(report, "SELECT processId, streamId, flag FROM TARGET_INFO_CUDA_STREAM")
    assert streams == [(1000, 7, 3), (1000, 13, 2), (1001, 7, 3), (1001, 13, 2)]
    export = dict(query(report, "SELECT name, value FROM META_DATA_EXPORT"))
    assert "emulated" in export["EXPORT_PRODUCT_VERSION"]
    assert export["EXPORT_SCHEMA_VERSION"] == "3.24.0"
    ((text,),) = query(report, "SELECT value FROM META_DATA_CAPTURE WHERE name = 'CPTRACE_RUN'")
    assert json.loads(text) == RUN


def test_shuffled_records_give_the_same_bytes(tmp_path: Path, report: Path) -> None:
    again = tmp_path / "again.sqlite"
    shuffled = []
    for record in (process(0), process(1)):
        lists = {
            name: list(reversed(getattr(record, name)))
            for name in ("ops", "api_calls", "synchronizations", "ranges", "streams")
        }
        shuffled.append(ProcessRecord(**{**_fields(record), **lists}))
    write_report(again, shuffled, RUN)
    assert again.read_bytes() == report.read_bytes()


def _fields(record: ProcessRecord) -> dict[str, object]:
    return {name: getattr(record, name) for name in ProcessRecord.__dataclass_fields__}


def test_an_existing_report_is_replaced_and_nothing_else_is_left(tmp_path: Path, report: Path) -> None:
    before = report.read_bytes()
    write_report(report, [process(0)], RUN)
    assert report.read_bytes() != before
    assert [path.name for path in tmp_path.iterdir()] == ["report.sqlite"]


def test_a_failed_write_leaves_the_old_report_and_no_part(
    report: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = report.read_bytes()

    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("disk full")

    monkeypatch.setattr(nsys_sqlite_writer, "_insert", fail)
    with pytest.raises(RenderError, match=r"cannot write the report .*: disk full"):
        write_report(report, [process(0)], RUN)
    assert report.read_bytes() == before
    assert not partial_path(report).exists()


def test_a_missing_folder_is_a_render_error(tmp_path: Path) -> None:
    with pytest.raises(RenderError, match="cannot write the report"):
        write_report(tmp_path / "none" / "report.sqlite", [process(0)], RUN)


@pytest.mark.parametrize(
    "table",
    [
        "CUPTI_ACTIVITY_KIND_KERNEL",
        "CUPTI_ACTIVITY_KIND_MEMCPY",
        "CUPTI_ACTIVITY_KIND_MEMSET",
        "CUPTI_ACTIVITY_KIND_RUNTIME",
        "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
        "CUPTI_ACTIVITY_KIND_CUDA_EVENT",
        "TARGET_INFO_GPU",
        "TARGET_INFO_CUDA_STREAM",
        "TARGET_INFO_CUDA_CONTEXT_INFO",
        "TARGET_INFO_SESSION_START_TIME",
        "StringIds",
    ],
)
def test_columns_are_those_of_the_real_schema_that_is_claimed(report: Path, table: str) -> None:
    real = require_trace("nsys/nsys-2025.5-cuda-events.sqlite")
    assert _columns(report, table) == _columns(real, table)


def _columns(path: Path, table: str) -> list[tuple[str, str, int, int]]:
    with closing(sqlite3.connect(f"file:{path}?immutable=1", uri=True)) as connection:
        rows = connection.execute(f"PRAGMA table_info({table})").fetchall()
    return [(name, kind, not_null, key) for _, name, kind, not_null, _, key in rows]
