"""What is read from Nsight Systems exports of every layout, and what is not."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import sqlite3
from contextlib import closing

import numpy as np
import pandas as pd
import pytest

import cptrace
from cptrace import schema
from cptrace.errors import SourceError, TraceError
from cptrace.launches import find_launches
from cptrace.requests import ReadOptions
from cptrace.sources import read_trace
from tests.support.shared_traces import nsys_traces, require_trace
from tests.support.tiny_export import (
    CUDA_EVENT,
    GRAPH,
    KERNEL,
    MARK,
    MEMCPY,
    NONE,
    NVTX,
    RUNTIME,
    START_END,
    SYNCHRONIZATION,
    TinyExport,
    edit,
    global_pid,
    global_tid,
)

TABLES = ("ops", "api_calls", "syncs", "event_records", "ranges", "ranks")

SHARED_COUNTS = {
    "nsys-2021.2-no-meta.sqlite": {
        "kernel": 12, "memcpy": 48, "memset": 12, "api_calls": 111, "syncs": 15, "event_records": 0, "ranges": 0,
    },
    "nsys-2022.1-stream-waits.sqlite": {
        "kernel": 46, "memcpy": 12, "memset": 4, "api_calls": 279, "syncs": 68, "event_records": 58,
    },
    "nsys-2023.3-one-kernel.sqlite": {
        "kernel": 1, "memcpy": 2, "api_calls": 13, "syncs": 1, "event_records": 2, "ranges": 0,
    },
    "nsys-no-kernels.sqlite": {"ops": 0, "api_calls": 5497, "syncs": 1177, "event_records": 0, "ranges": 0, "ranks": 0},
    "nsys-2024.6-graph-trace.sqlite": {"kernel": 30, "graph": 10, "api_calls": 62, "syncs": 2},
    "nsys-2025.5-cuda-events.sqlite": {
        "kernel": 2102, "memcpy": 4, "memset": 4, "api_calls": 10245, "syncs": 2005, "event_records": 4000,
    },
    "nsys-2026.2-ulysses-2gpu.sqlite": {
        "kernel": 4010, "memcpy": 1020, "memset": 269, "api_calls": 7466, "syncs": 366, "event_records": 0, "ranks": 2,
    },
}  # fmt: skip


def counts(trace):
    kinds = trace.ops["kind"].astype(str).value_counts().to_dict()
    return {**kinds, **{name: len(getattr(trace, name)) for name in TABLES}}


@pytest.mark.parametrize("name", SHARED_COUNTS)
def test_shared_traces_are_read_whole(name):
    trace = read_trace(require_trace(f"nsys/{name}"))
    found = counts(trace)
    assert {key: found.get(key, 0) for key in SHARED_COUNTS[name]} == SHARED_COUNTS[name]
    for table in schema.TABLES:
        schema.check_frame(table, getattr(trace, table.name))
    assert (trace.ops["end_ns"] >= trace.ops["start_ns"]).all()


@pytest.mark.parametrize("path", nsys_traces(), ids=lambda path: path.name)
def test_ops_of_the_shared_traces_find_their_launch(path):
    """Read by hand: the earliest call of the op's process with its correlation id, where the capture has it."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as connection:
        first: dict[tuple[int, int], int] = {}
        for thread, correlation, start in connection.execute(
            f"SELECT globalTid, correlationId, start FROM {RUNTIME}"
        ):
            key = (thread >> 24 << 24, correlation)
            first[key] = min(start, first.get(key, start))
    trace = read_trace(path)
    launches = find_launches(trace.ops, trace.api_calls)
    start = trace.api_calls["start_ns"].to_numpy()[launches.call]
    found = [int(s) if known else None for s, known in zip(start, launches.is_known, strict=True)]
    keys = zip(trace.ops["process"].tolist(), trace.ops["correlation_id"].tolist(), strict=True)
    assert found == [first.get(key) for key in keys]
    assert np.count_nonzero(launches.is_known) * 2 >= len(trace.ops)


@pytest.mark.parametrize("path", nsys_traces(), ids=lambda path: path.name)
def test_sync_kinds_of_the_shared_traces_agree_with_the_call_that_made_them(path):
    """The rule goes by stream and event; the API's own name is the witness."""
    trace = read_trace(path)
    calls = {
        key: name
        for *key, name in trace.api_calls[["process", "correlation_id", "name"]].itertuples(index=False)
        for key in [tuple(key)]
    }
    words = {
        "stream_wait": ("WaitEvent",),
        "event": ("EventSynchronize", "EventQuery"),
        "stream": ("StreamSynchronize",),
    }
    for kind, process, correlation in trace.syncs[["kind", "process", "correlation_id"]].itertuples(
        index=False
    ):
        name = calls.get((process, correlation))
        if name is not None and kind in words:
            assert any(word in name for word in words[kind]), (kind, name)


def test_stream_waits_of_2022_1():
    trace = read_trace(require_trace("nsys/nsys-2022.1-stream-waits.sqlite"))
    assert sorted(trace.ops.loc[trace.ops["kind"] == "kernel", "stream"].unique().tolist()) == [7, 13]
    waits = trace.syncs[trace.syncs["kind"] == "stream_wait"]
    assert len(waits) == 40
    keys = ["process", "context", "event_id"]
    records = set(map(tuple, trace.event_records[keys].values.tolist()))
    assert set(map(tuple, waits[keys].values.tolist())) <= records


def test_event_syncs_of_2025_5_pair_by_event_sync_id():
    trace = read_trace(require_trace("nsys/nsys-2025.5-cuda-events.sqlite"))
    syncs = trace.syncs[trace.syncs["kind"] == "event"]
    records = set(zip(trace.event_records["process"], trace.event_records["event_sync_id"], strict=True))
    assert len(trace.event_records) == 4000
    assert set(zip(syncs["process"], syncs["event_sync_id"], strict=True)) <= records


def test_ulysses_ids_repeat_between_processes():
    trace = read_trace(require_trace("nsys/nsys-2026.2-ulysses-2gpu.sqlite"))
    ids = trace.api_calls.groupby("process")["correlation_id"].agg(set)
    assert len(set.intersection(*ids)) == 264
    assert trace.ranks["device_name"].isna().all()
    assert "TARGET_INFO_GPU" in trace.meta.missing_tables
    assert "CUPTI_ACTIVITY_KIND_CUDA_EVENT" in trace.meta.missing_tables


@pytest.mark.parametrize("path", nsys_traces(), ids=lambda path: path.name)
def test_files_and_their_folders_are_left_as_they_are(path, tmp_path):
    copy = tmp_path / path.name
    shutil.copyfile(path, copy)
    copy.chmod(0o444)
    tmp_path.chmod(0o555)
    before = (
        hashlib.sha256(copy.read_bytes()).hexdigest(),
        copy.stat().st_mtime_ns,
        sorted(os.listdir(tmp_path)),
    )
    try:
        cptrace.analyze(copy)
    finally:
        tmp_path.chmod(0o755)
    after = (
        hashlib.sha256(copy.read_bytes()).hexdigest(),
        copy.stat().st_mtime_ns,
        sorted(os.listdir(tmp_path)),
    )
    assert after == before


def mixed_export() -> TinyExport:
    """Return an export with rows in every table, two processes, two devices, and ties."""
    export = TinyExport().domain(1, "cptrace").domain(1, "NCCL", pid=200).domain(2, "x", is_registered=True)
    for pid, device in ((100, 0), (200, 1)):
        where = {"pid": pid, "device": device}
        export.kernel("flash_fwd_kernel", 100, 200, launch=10, **where)
        export.kernel("nvjet", 100, 200, launch=12, stream=9, **where)
        export.kernel("ncclDevKernel_SendRecv()", 150, 300, launch=14, stream=13, **where)
        export.copy(310, 320, kind=1, size=10, launch=16, **where).copy(310, 320, kind=10, size=20, **where)
        export.memset(330, 331, launch=18, **where).graph(400, 500, launch=20, **where)
        export.sync(21, 22, pid=pid).sync(21, 22, stream=7, pid=pid).sync(23, 24, stream=7, event=3, pid=pid)
        export.record(3, event_sync=5, correlation=90, pid=pid).record(
            3, event_sync=6, correlation=91, pid=pid
        )
        export.range("step", 5, 15, pid=pid, domain=1, payload=0).range(
            "step", 15, 30, pid=pid, domain=1, payload=1
        )
        export.range("send_recv bytes=10", 13, 15, pid=pid, domain=1).range("other", 0, None, pid=pid)
        export.range("same", 7, 9, pid=pid, is_registered=True).range(
            "mark", 8, None, pid=pid, event_type=MARK
        )
    return export


def normal(frame):
    return frame.astype({name: object for name, dtype in frame.dtypes.items() if str(dtype) == "category"})


def assert_same_trace(a, b):
    for table in TABLES:
        pd.testing.assert_frame_equal(normal(getattr(a, table)), normal(getattr(b, table)))


def test_order_of_rows_and_columns_and_extra_columns_do_not_matter(tmp_path):
    plain = mixed_export().write(tmp_path / "t.sqlite")
    expected, trace = cptrace.analyze(plain).to_json(), read_trace(plain)
    for seed in range(6):
        plain.unlink()
        extra = ("aaa_note:TEXT", "zzz", "rank") if seed % 2 else ()
        mixed_export().write(plain, order=random.Random(seed), extra_columns=extra, is_strict=seed % 3 > 0)
        edit(
            plain,
            f"CREATE INDEX i ON {KERNEL}(start)",
            f"CREATE UNIQUE INDEX j ON {RUNTIME}(start, globalTid)",
        )
        edit(plain, "CREATE TABLE notes (id INTEGER, text TEXT)", "CREATE VIEW v AS SELECT 1")
        assert cptrace.analyze(plain).to_json() == expected
        assert_same_trace(read_trace(plain), trace)


@pytest.mark.parametrize(
    "name",
    ["nsys-2022.1-stream-waits.sqlite", "nsys-2025.5-cuda-events.sqlite", "nsys-2026.2-ulysses-2gpu.sqlite"],
)
def test_shuffled_rows_of_real_exports_give_the_same_bytes(name, tmp_path):
    path = tmp_path / name
    shutil.copyfile(require_trace(f"nsys/{name}"), path)
    expected = cptrace.analyze(path).to_json()
    present = read_trace(path).meta.missing_tables
    for table in {KERNEL, MEMCPY, RUNTIME, NVTX, SYNCHRONIZATION, "StringIds"}.difference(present):
        edit(
            path,
            f"CREATE TABLE shuffled AS SELECT * FROM {table} ORDER BY random()",
            f"DROP TABLE {table}",
            f"ALTER TABLE shuffled RENAME TO {table}",
        )
    assert cptrace.analyze(path).to_json() == expected


@pytest.mark.parametrize(
    "table", [KERNEL, MEMCPY, "CUPTI_ACTIVITY_KIND_MEMSET", GRAPH, RUNTIME, SYNCHRONIZATION, CUDA_EVENT, NVTX,
              "META_DATA_EXPORT"],
)  # fmt: skip
def test_any_table_may_be_absent_or_empty(table, tmp_path):
    for number, statement in enumerate((f"DROP TABLE {table}", f"DELETE FROM {table}")):
        path = mixed_export().write(tmp_path / f"{number}.sqlite")
        trace = read_trace(edit(path, statement))
        assert (table in trace.meta.missing_tables) == (table in cptrace_expected())
        report = cptrace.analyze(path)
        assert report.rows("ranks")
        report.to_json()


def cptrace_expected():
    from cptrace.sources.nsys_sqlite import EXPECTED_TABLES

    return EXPECTED_TABLES


@pytest.mark.parametrize(
    ("table", "column"),
    [
        (KERNEL, "greenContextId"), (KERNEL, "graphNodeId"), (KERNEL, "correlationId"), (KERNEL, "shortName"),
        (MEMCPY, "copyCount"), (MEMCPY, "srcDeviceId"), (MEMCPY, "bytes"), (SYNCHRONIZATION, "eventSyncId"),
        (SYNCHRONIZATION, "correlationId"), (CUDA_EVENT, "eventSyncId"), (CUDA_EVENT, "timestamp"),
        (NVTX, "text"), (NVTX, "textId"), (NVTX, "domainId"), (NVTX, "int64Value"), (NVTX, "uint64Value"),
        (RUNTIME, "callchainId"),
    ],
)  # fmt: skip
def test_columns_that_versions_lack_may_be_absent(table, column, tmp_path):
    path = mixed_export().write(tmp_path / "t.sqlite")
    edit(path, f"ALTER TABLE {table} DROP COLUMN {column}")
    read_trace(path)
    assert len(cptrace.analyze(path).rows("ranks")) == 2


@pytest.mark.parametrize("column", ["start", "end", "deviceId", "streamId", "contextId", "demangledName"])
def test_device_work_without_its_core_columns_is_refused(column, tmp_path):
    path = mixed_export().write(tmp_path / "t.sqlite")
    edit(path, f'ALTER TABLE {KERNEL} DROP COLUMN "{column}"')
    with pytest.raises((SourceError, TraceError), match=KERNEL):
        read_trace(path)


def test_payloads_that_are_null_for_the_first_100_000_rows(tmp_path):
    """A reader that takes a column's type from its first batch must not lose what comes later."""
    n_rows = 100_000
    export = TinyExport().kernel("nvjet", 0, 10, launch=n_rows + 1)
    path = export.range("first", 0, 1).write(tmp_path / "t.sqlite")
    tid = global_tid(100)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executemany(
            f'INSERT INTO {NVTX} (start, "end", eventType, globalTid, text) VALUES (?, ?, 59, {tid}, NULL)',
            ((i, i + 1) for i in range(1, n_rows)),
        )
        connection.execute(
            f'INSERT INTO {NVTX} (start, "end", eventType, globalTid, text, int64Value, domainId)'
            f" VALUES ({n_rows}, {n_rows + 5}, 59, {tid}, 'step', 7, 0)"
        )
    ranges = read_trace(path).ranges
    assert len(ranges) == n_rows + 1
    last = ranges.iloc[-1]
    assert (last["name"], last["payload"], last["end_ns"]) == ("step", 7, n_rows + 5)
    assert ranges["payload"].isna().sum() == n_rows
    assert ranges["name"].isna().sum() == n_rows - 1
    assert cptrace.analyze(path).rows("steps")[0]["n_ops"] == 1


def test_ids_that_are_null_for_the_first_100_000_rows(tmp_path):
    n_rows = 100_000
    path = TinyExport().kernel("a", 0, 1).write(tmp_path / "t.sqlite", is_strict=False)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executemany(
            f'INSERT INTO {KERNEL} (start, "end", deviceId, contextId, streamId, globalPid, demangledName)'
            f" VALUES (?, ?, 0, 1, 7, {global_pid(100)}, 1)",
            ((i, i + 1) for i in range(1, n_rows)),
        )
        connection.execute(
            f'INSERT INTO {KERNEL} (start, "end", deviceId, contextId, streamId, globalPid, demangledName,'
            " correlationId)"
            f" VALUES ({n_rows}, {n_rows + 1}, 0, 1, 7, {global_pid(100)}, 1, 77)"
        )
    correlation = read_trace(path).ops["correlation_id"]
    assert correlation.isna().sum() == n_rows
    assert correlation.iloc[-1] == 77


def test_rowids_with_wide_gaps(tmp_path):
    """What is left of a table after a tool deleted most rows keeps its rowids."""
    path = TinyExport().kernel("a", 0, 1).kernel("b", 2, 3).kernel("c", 4, 5).write(tmp_path / "t.sqlite")
    edit(
        path,
        f"UPDATE {KERNEL} SET rowid = 3000000 WHERE rowid = 2",
        f"UPDATE {KERNEL} SET rowid = -5 WHERE rowid = 3",
    )
    assert read_trace(path).ops["name"].tolist() == ["a", "b", "c"]


def test_texts_written_out_and_registered_in_one_file(tmp_path):
    export = (
        TinyExport().range("written", 0, 1).range("registered", 2, 3, is_registered=True).range(None, 4, 5)
    )
    export.range("", 6, 7).range(b"caf\xe9 \xff", 8, 9).range("日本 😀", 10, 11).range(
        "written", 12, 13, is_registered=True
    )
    export.add(NVTX, start=14, end=15, eventType=59, globalTid=global_tid(100), textId=4_000_000)
    export.add(
        NVTX,
        start=16,
        end=17,
        eventType=59,
        globalTid=global_tid(100),
        textId=export.text_id("id"),
        text="own",
    )
    ranges = read_trace(export.write(tmp_path / "t.sqlite")).ranges
    names = ranges["name"].astype(object).where(ranges["name"].notna(), None).tolist()
    assert names == [
        "written", "registered", None, None, "caf\N{REPLACEMENT CHARACTER} \N{REPLACEMENT CHARACTER}", "日本 😀",
        "written", None, "own",
    ]  # fmt: skip
    assert ranges["name"].iloc[0] == ranges["name"].iloc[6]


def test_registered_text_that_is_not_utf8(tmp_path):
    path = TinyExport().kernel("good", 0, 1).kernel("bad", 2, 3).write(tmp_path / "t.sqlite")
    edit(path, "UPDATE StringIds SET value = CAST(x'6261ff64' AS TEXT) WHERE value = 'bad'")
    assert read_trace(path).ops["name"].tolist() == ["good", "ba\N{REPLACEMENT CHARACTER}d"]


def test_kernels_without_any_names_are_refused(tmp_path):
    """Nothing could be told: every kernel would count as compute, and communication as none."""
    path = mixed_export().write(tmp_path / "t.sqlite")
    with pytest.raises(SourceError, match="nothing in the table StringIds"):
        read_trace(edit(path, "DROP TABLE StringIds"))


def test_unknown_names_are_marked_and_never_dropped(tmp_path):
    path = (
        TinyExport()
        .kernel("good", 0, 1)
        .kernel("lost", 2, 3)
        .kernel("void", 4, 5)
        .write(tmp_path / "t.sqlite")
    )
    edit(
        path,
        "DELETE FROM StringIds WHERE value = 'lost'",
        "UPDATE StringIds SET value = '' WHERE value = 'void'",
    )
    assert read_trace(path).ops["name"].tolist() == ["good", "(unnamed kernel)", "(unnamed kernel)"]
    coverage = cptrace.analyze(path).coverage
    assert {"name": "(unnamed kernel)", "count": 2, "total_ns": 2} in coverage["unclassified"]


def test_domains_are_named_per_process(tmp_path):
    """Domain 1 is NCCL in one process and ours in the other; a domain without a creation row has no name."""
    export = (
        TinyExport()
        .domain(1, "NCCL")
        .domain(1, "cptrace", pid=200, is_registered=True)
        .domain(2, "lib", pid=200)
    )
    export.range("a", 0, 1, domain=1).range("b", 2, 3, domain=1, pid=200).range("c", 4, 5, domain=2).range(
        "d", 6, 7
    )
    ranges = read_trace(export.write(tmp_path / "t.sqlite")).ranges
    assert ranges["domain"].astype(object).where(ranges["domain"].notna(), None).tolist() == [
        "NCCL",
        "cptrace",
        None,
        None,
    ]


def test_kinds_of_ranges(tmp_path):
    export = (
        TinyExport()
        .range("pp", 0, 9)
        .range("se", 1, 8, event_type=START_END)
        .range("m", 2, None, event_type=MARK)
    )
    export.range("open", 3, None).range("category", 4, 5, event_type=33).range(
        "future", 6, 7, event_type=4_000_000_000
    )
    export.range("backwards", 9, 8)
    trace = read_trace(export.write(tmp_path / "t.sqlite"))
    assert trace.ranges[["name", "kind"]].astype(str).values.tolist() == [
        ["pp", "push_pop"], ["se", "start_end"], ["m", "mark"], ["open", "push_pop"],
    ]  # fmt: skip
    assert trace.ranges["end_ns"].isna().tolist() == [False, False, True, True]
    assert [(note.code, note.count) for note in trace.meta.notes] == [("dropped-rows", 1)]


@pytest.mark.parametrize("sync_type", [0, 1, 2, 3, 4, 99])
def test_sync_kinds_go_by_stream_and_event_whatever_sync_type_says(sync_type, tmp_path):
    export = TinyExport()
    export.sync(0, 1, sync_type=sync_type).sync(2, 3, stream=7, sync_type=sync_type)
    export.sync(4, 5, event=3, sync_type=sync_type).sync(
        6, 7, stream=0, event=0, event_sync=9, sync_type=sync_type
    )
    syncs = read_trace(export.write(tmp_path / "t.sqlite")).syncs
    assert syncs["kind"].tolist() == ["context", "stream", "event", "stream_wait"]
    for column, expected in (
        ("stream", [None, 7, None, 0]),
        ("event_id", [None, None, 3, 0]),
        ("event_sync_id", [None, None, None, 9]),
    ):
        assert syncs[column].astype(object).where(syncs[column].notna(), None).tolist() == expected


def test_all_ones_mean_none_and_never_minus_one(tmp_path):
    export = (
        TinyExport().kernel("a", 0, 1).record(NONE, stream=NONE, event_sync=NONE).sync(0, 1, event_sync=NONE)
    )
    export.copy(2, 3, src=NONE, dst=NONE)
    trace = read_trace(export.write(tmp_path / "t.sqlite"))
    assert not trace.ops["is_peer_copy"].any()
    assert trace.event_records["event_sync_id"].isna().tolist() == [True]
    for table in TABLES:
        numbers = getattr(trace, table).select_dtypes("number").dropna(axis="columns", how="all")
        assert not (numbers.fillna(0) < 0).any(axis=None), table


@pytest.mark.parametrize("copy_kind", [99, 4_294_967_295, -1])
def test_copy_kinds_of_the_future_are_plain_copies(copy_kind, tmp_path):
    trace = read_trace(TinyExport().copy(0, 10, kind=copy_kind).copy(20, 30).write(tmp_path / "t.sqlite"))
    assert trace.ops["name"].tolist() == [f"memcpy kind {copy_kind}", "memcpy DtoD"]


BAD_TIMES = {
    "reversed": (20, 10),
    "negative": (-20, -10),
    "negative start": (-1, 10),
    "no end": (10, None),
    "no start": (None, 10),
    "neither": (None, None),
    "beyond any clock": (10, 2**63 - 1),
    "far before any clock": (-(2**63), 10),
}


@pytest.mark.parametrize("times", BAD_TIMES.values(), ids=BAD_TIMES.keys())
def test_impossible_times_are_refused_or_left_out_and_counted(times, tmp_path):
    export = TinyExport().kernel("nvjet", 0, 100).kernel("bad", *times).kernel("nvjet", 200, 300)
    path = export.write(tmp_path / "t.sqlite", is_strict=False)
    with pytest.raises(TraceError, match=r"1 of 3 rows of CUPTI_ACTIVITY_KIND_KERNEL .* --drop-invalid"):
        read_trace(path)
    trace = read_trace(path, ReadOptions(drop_invalid=True))
    assert trace.ops["start_ns"].tolist() == [0, 200]
    assert [(note.code, note.count) for note in trace.meta.notes] == [("dropped-rows", 1)]


def test_each_table_counts_what_was_left_out(tmp_path):
    export = TinyExport().kernel("bad", 20, 10).kernel("bad", 21, 10).copy(5, 1).copy(1, 5).memset(9, 8)
    path = export.write(tmp_path / "t.sqlite")
    trace = read_trace(path, ReadOptions(drop_invalid=True))
    assert trace.ops["name"].tolist() == ["memcpy DtoD"]
    assert sorted(note.count for note in trace.meta.notes) == [1, 1, 2]
    coverage = cptrace.analyze(path, cptrace.AnalyzeOptions(read=ReadOptions(drop_invalid=True))).coverage
    assert sum(note["count"] for note in coverage["notes"]) == 4


def test_when_everything_is_left_out_there_is_no_device_work(tmp_path):
    path = TinyExport().kernel("bad", 20, 10).write(tmp_path / "t.sqlite")
    report = cptrace.analyze(path, cptrace.AnalyzeOptions(read=ReadOptions(drop_invalid=True)))
    assert report.rows("ranks") == ()
    assert {entry.analysis for entry in report.not_applicable} >= {"account", "steps", "kernels"}


@pytest.mark.parametrize("shift", ["-500", 500])
def test_negative_times_are_possible_where_the_export_shifted_them(shift, tmp_path):
    export = TinyExport().kernel("nvjet", -100, -50, launch=-120).kernel("nvjet", -10, 10, launch=-110)
    export.range("step", -130, -105).add("META_DATA_EXPORT", name="EXPORT_CONFIG_TIME_SHIFT", value=shift)
    row = cptrace.analyze(export.write(tmp_path / "t.sqlite")).rows("ranks")[0]
    assert (row["window_start_ns"], row["window_ns"], row["compute_ns"]) == (-100, 110, 70)


def test_an_export_that_was_not_shifted_has_no_negative_times(tmp_path):
    export = TinyExport().kernel("nvjet", -100, -50)
    export.add("META_DATA_EXPORT", name="EXPORT_CONFIG_TIME_SHIFT", value="0")
    with pytest.raises(TraceError, match="negative"):
        read_trace(export.write(tmp_path / "t.sqlite"))


def test_calls_that_end_before_they_start_are_counted(tmp_path):
    export = TinyExport().kernel("nvjet", 5, 6, launch=1).call("cudaFree_v3020", 9, 3)
    trace = read_trace(export.write(tmp_path / "t.sqlite"))
    assert len(trace.api_calls) == 1
    assert [(note.code, note.count) for note in trace.meta.notes] == [("dropped-rows", 1)]


@pytest.mark.parametrize(
    "name",
    ["with space.sqlite", "100%.sqlite", "100%25.sqlite", "what?.sqlite", "a#b.sqlite", "a&mode=rwc.sqlite",
     "日本 é.sqlite",
     "no suffix", "quote'\".sqlite", "semi;colon", "[x].sqlite", "trailing ", "a\nb.sqlite"],
)  # fmt: skip
def test_paths_with_special_characters(name, tmp_path):
    folder = tmp_path / f"dir {name}"
    folder.mkdir()
    path = mixed_export().write(tmp_path / "plain.sqlite")
    shutil.copyfile(path, folder / name)
    trace = read_trace(folder / name)
    assert_same_trace(trace, read_trace(path))
    assert trace.meta.path == str(folder / name)
    assert os.listdir(folder) == [name]


def test_a_path_that_is_not_utf8(tmp_path):
    name = os.fsdecode(b"caf\xe9.sqlite")
    path = mixed_export().write(tmp_path / "plain.sqlite")
    shutil.copyfile(path, tmp_path / name)
    report = cptrace.analyze(tmp_path / name)
    report.to_json().encode()
    assert report.rows("ranks") == cptrace.analyze(path).rows("ranks")


def test_relative_paths_links_and_strings(tmp_path, monkeypatch):
    path = mixed_export().write(tmp_path / "t.sqlite")
    (tmp_path / "link.sqlite").symlink_to(path)
    monkeypatch.chdir(tmp_path)
    expected = cptrace.analyze(path).rows("ranks")
    for name in ("t.sqlite", "./t.sqlite", "link.sqlite", str(path)):
        report = cptrace.analyze(name)
        assert report.rows("ranks") == expected
        assert report.inputs[0]["path"] == (name if name != "./t.sqlite" else "t.sqlite")


@pytest.mark.parametrize("is_link", [False, True], ids=["file", "link"])
def test_pending_changes_beside_the_file_are_not_ignored(is_link, tmp_path):
    """Part of the rows are in the journal only: reading the file alone would give wrong figures without any error."""
    (tmp_path / "data").mkdir()
    path = mixed_export().write(tmp_path / "data" / "t.sqlite")
    (tmp_path / "data" / "t.sqlite-wal").write_bytes(b"x" * 100)
    asked = path
    if is_link:
        asked = tmp_path / "link.sqlite"
        asked.symlink_to(path)
    with pytest.raises(SourceError, match="holds changes that are not in the file yet"):
        read_trace(asked)
    (tmp_path / "data" / "t.sqlite-wal").write_bytes(b"")
    read_trace(asked)


@pytest.mark.parametrize("correlation", [2**63 - 1, -1, 2**32 - 1])
def test_absurd_correlation_ids_find_no_launch(correlation, tmp_path):
    export = TinyExport().kernel("nvjet", 10, 20, launch=1).kernel("nvjet", 30, 40, correlation=correlation)
    export.call("cudaFree", 5, 6, correlation=0).call("cudaFree", 6, 7, correlation=-(2**63), pid=300)
    coverage = cptrace.analyze(export.write(tmp_path / "t.sqlite")).coverage
    assert coverage["n_launches_missing"] == 1


@pytest.mark.parametrize(
    ("table", "column"), [(KERNEL, "start"), (KERNEL, "demangledName"), (RUNTIME, "start"), (NVTX, "start"),
                          (NVTX, "textId"),
                          (MEMCPY, "bytes"), (SYNCHRONIZATION, "eventId"), (CUDA_EVENT, "eventId")],
)  # fmt: skip
@pytest.mark.parametrize("value", ["'soon'", "1.5", "x'00ff'"])
def test_columns_of_another_type_are_refused_in_words(table, column, value, tmp_path):
    """In every row, in the first one, which a driver may take the type from, or only later."""
    for where in ("rowid = 2", "rowid = 1", "1"):
        path = mixed_export().write(tmp_path / f"{where}.sqlite")
        edit(path, f'UPDATE {table} SET "{column}" = {value} WHERE {where}')
        with pytest.raises(SourceError, match="export the report again") as caught:
            read_trace(path)
        assert "\n" not in str(caught.value)


def test_what_the_file_says_about_itself(tmp_path):
    export = TinyExport().kernel("nvjet", 0, 10, device=1)
    export.add("TARGET_INFO_GPU", vmId=1, id=0, name="NVIDIA H100", cuDevice=1)
    export.add("TARGET_INFO_GPU", vmId=1, id=1, name="Display", cuDevice=None)
    export.add("TARGET_INFO_SESSION_START_TIME", utcEpochNs=1_790_000_000_000_000_000)
    export.add("DIAGNOSTIC_EVENT", severity=3, text="Dropped\n 5 events").add(
        "DIAGNOSTIC_EVENT", severity=1, text="hello"
    )
    trace = read_trace(export.write(tmp_path / "t.sqlite"))
    meta = trace.meta
    assert (meta.format, meta.tool_version, meta.schema_version) == ("nsys_sqlite", "2026.2.1.210", "3.25.0")
    assert meta.session_start_utc_ns == 1_790_000_000_000_000_000
    assert (meta.device_kind, meta.clock, dict(meta.run)) == ("cuda", None, {})
    assert [(note.code, note.text, note.count) for note in meta.notes] == [
        ("capture-diagnostic", "Nsight Systems said: Dropped 5 events", 1)
    ]
    assert trace.ranks["device_name"].tolist() == ["NVIDIA H100"]


def test_an_export_without_metadata_is_read(tmp_path):
    export = TinyExport().kernel("nvjet", 0, 10)
    del export.rows["META_DATA_EXPORT"]
    meta = read_trace(export.write(tmp_path / "t.sqlite")).meta
    assert (meta.tool_version, meta.schema_version, meta.session_start_utc_ns) == (None, None, None)


def test_odd_metadata_does_no_harm(tmp_path):
    export = TinyExport().kernel("nvjet", 0, 10).add("META_DATA_CAPTURE", name="A", value=5)
    export.add("META_DATA_CAPTURE", name="B", value=b"\xff").add("META_DATA_CAPTURE", name="C", value=None)
    export.add("DIAGNOSTIC_EVENT", severity=3, text=None).add(
        "TARGET_INFO_SESSION_START_TIME", utcEpochNs=None
    )
    path = export.write(tmp_path / "t.sqlite", is_strict=False)
    edit(path, "INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_PRODUCT_VERSION', 2026.5)")
    cptrace.analyze(path).to_json()


RUN = {"device_kind": "cpu-emulated", "clock": "virtual", "scheme": "ring"}


def test_ranks_recorded_with_the_run_win(tmp_path):
    ranks = [{"rank": 3, "pid": 100, "device": 0}, {"rank": 2, "pid": 200, "device": 1}]
    trace = read_trace(mixed_export().run(**RUN, ranks=ranks).write(tmp_path / "t.sqlite"))
    assert trace.ranks[["rank", "pid", "device", "is_recorded"]].values.tolist() == [
        [2, 200, 1, True],
        [3, 100, 0, True],
    ]
    pid = (trace.ops["process"].to_numpy() >> 24) & 0xFFFFFF
    assert set(zip(trace.ops["rank"], pid, strict=True)) == {(3, 100), (2, 200)}
    assert (trace.meta.device_kind, trace.meta.clock) == ("cpu-emulated", "virtual")


def test_processes_beside_the_recorded_ranks_are_counted_after_them(tmp_path):
    """A helper process that used the GPU too must not cost the ranks their numbers."""
    export = mixed_export().kernel("helper", 0, 5, pid=50).run(ranks=[
        {"rank": 1, "pid": 100, "device": 0}, {"rank": 0, "pid": 200, "device": 1}, {"rank": 2, "pid": 9, "device": 0},
    ])  # fmt: skip
    trace = read_trace(export.write(tmp_path / "t.sqlite"))
    assert trace.ranks[["rank", "pid", "is_recorded"]].values.tolist() == [
        [0, 200, True],
        [1, 100, True],
        [3, 50, False],
    ]


def test_without_a_record_ranks_are_counted_by_device_then_process(tmp_path):
    export = TinyExport()
    for pid, device in ((300, 1), (200, 0), (100, 1), (200, 1)):
        export.kernel("nvjet", 10 * pid, 10 * pid + 5, pid=pid, device=device)
    trace = read_trace(export.write(tmp_path / "t.sqlite"))
    assert trace.ranks[["device", "pid"]].values.tolist() == [[0, 200], [1, 100], [1, 200], [1, 300]]
    assert trace.ranks["rank"].tolist() == [0, 1, 2, 3]
    assert trace.ops["rank"].tolist() == [1, 0, 2, 3]


@pytest.mark.parametrize(
    "value",
    [
        "not json", "[]", "5", "null", '{"schema": "cptrace.run/9"}', "{}",
        '{"schema": "cptrace.run/1", "ranks": 5}',
        '{"schema": "cptrace.run/1", "ranks": [5]}',
        '{"schema": "cptrace.run/1", "ranks": [{"rank": 0}]}',
        '{"schema": "cptrace.run/1", "ranks": [{"rank": "0", "pid": 100, "device": 0}]}',
        '{"schema": "cptrace.run/1", "ranks": [{"rank": -1, "pid": 100, "device": 0}]}',
        '{"schema": "cptrace.run/1", "ranks": [{"rank": 0, "pid": 100, "device": 0},'
        ' {"rank": 0, "pid": 200, "device": 1}]}',
        '{"schema": "cptrace.run/1", "ranks": [{"rank": 0, "pid": 100, "device": 0},'
        ' {"rank": 1, "pid": 100, "device": 0}]}',
    ],
)  # fmt: skip
def test_run_metadata_that_contradicts_itself_is_refused(value, tmp_path):
    export = mixed_export().add("META_DATA_CAPTURE", name="CPTRACE_RUN", value=value)
    with pytest.raises(TraceError, match="CPTRACE_RUN"):
        read_trace(export.write(tmp_path / "t.sqlite"))


def test_ops_of_many_streams_and_contexts_are_kept_apart(tmp_path):
    export = TinyExport()
    for number, (context, stream) in enumerate(((1, 7), (2, 7), (1, 2**31 - 1))):
        export.kernel("nvjet", 10 * number, 10 * number + 5, context=context, stream=stream)
    report = cptrace.analyze(export.write(tmp_path / "t.sqlite"))
    assert [(row["context"], row["stream"], row["busy_ns"]) for row in report.rows("streams")] == [
        (1, 7, 5), (1, 2**31 - 1, 5), (2, 7, 5),
    ]  # fmt: skip


def test_progress_counts_up_to_all_rows(tmp_path):
    seen = []
    path = mixed_export().write(tmp_path / "t.sqlite")
    read_trace(path, ReadOptions(progress=lambda done, total: seen.append((done, total))))
    assert seen
    assert seen[-1][0] == seen[-1][1]
    assert np.all(np.diff([done for done, _ in seen]) >= 0)
