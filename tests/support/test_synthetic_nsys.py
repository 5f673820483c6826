"""The synthetic export keeps what a real one keeps."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from contextlib import closing
from itertools import pairwise

import pytest

from tests.support.nsys_tables import SCHEMA
from tests.support.plain_account import accounts, connect, pid_of
from tests.support.shared_traces import require_trace
from tests.support.synthetic_nsys import main, write_synthetic

SIZE = {"n_kernels": 3_001, "n_api_calls": 3_300, "n_ranges": 601}
LAYOUT = {"n_processes": 2, "n_streams": 3, "n_steps": 4, "seed": 7}


# Two public traces share the job, because the newer one was cut down and lacks most TARGET_INFO tables.
NEWER = {name for name in SCHEMA if not name.startswith("TARGET_INFO") or name.endswith("START_TIME")}


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    path = tmp_path_factory.mktemp("synthetic") / "export.sqlite"
    write_synthetic(path, **SIZE, **LAYOUT)
    return path


def query(path, statement):
    """Return all rows of a query."""
    with closing(connect(path)) as connection:
        return connection.execute(statement).fetchall()


def rows_of(path):
    """Return the rows of every table, sorted, without the two columns that number rows as written."""
    skip = {"gridId"}
    tables = {}
    for table in SCHEMA:
        names = [name for _, name, *_ in query(path, f"PRAGMA table_info({table})") if name not in skip]
        quoted = ", ".join(f'"{name}"' for name in names)
        tables[table] = sorted(query(path, f"SELECT {quoted} FROM {table}"), key=repr)
    return tables


def test_it_has_as_many_rows_as_asked(export):
    counts = {
        name: query(export, f"SELECT count(*) FROM {table}")[0][0]
        for name, table in (
            ("n_kernels", "CUPTI_ACTIVITY_KIND_KERNEL"),
            ("n_api_calls", "CUPTI_ACTIVITY_KIND_RUNTIME"),
            ("n_ranges", "NVTX_EVENTS"),
        )
    }
    assert counts == SIZE


@pytest.mark.parametrize("table", sorted(NEWER))
def test_its_columns_are_those_of_a_real_export(export, table):
    real = require_trace("nsys/nsys-2026.2-ulysses-2gpu.sqlite")
    assert query(export, f"PRAGMA table_info({table})") == query(real, f"PRAGMA table_info({table})")


@pytest.mark.parametrize("table", sorted(set(SCHEMA) - NEWER))
def test_its_target_columns_are_those_of_a_real_export(export, table):
    real = require_trace("nsys/nsys-2025.5-cuda-events.sqlite")
    assert query(export, f"PRAGMA table_info({table})") == query(real, f"PRAGMA table_info({table})")


def test_the_same_arguments_give_the_same_bytes(export, tmp_path):
    write_synthetic(tmp_path / "again.sqlite", **SIZE, **LAYOUT)
    assert (tmp_path / "again.sqlite").read_bytes() == export.read_bytes()


def test_shuffling_changes_the_order_of_rows_and_nothing_else(export, tmp_path):
    path = tmp_path / "shuffled.sqlite"
    write_synthetic(path, **SIZE, **LAYOUT, is_shuffled=True)
    assert rows_of(path) == rows_of(export)
    starts = [start for (start,) in query(path, "SELECT start FROM CUPTI_ACTIVITY_KIND_KERNEL")]
    assert starts != sorted(starts)
    starts = [start for (start,) in query(export, "SELECT start FROM CUPTI_ACTIVITY_KIND_KERNEL")]
    assert starts == sorted(starts)


DEVICE_WORK = """
    SELECT globalPid, streamId, start, "end", correlationId FROM CUPTI_ACTIVITY_KIND_KERNEL
    UNION ALL SELECT globalPid, streamId, start, "end", correlationId FROM CUPTI_ACTIVITY_KIND_MEMCPY
"""


def test_ops_of_one_stream_do_not_overlap(export):
    queues = defaultdict(list)
    for pid, stream, start, end, _ in query(export, DEVICE_WORK):
        queues[pid, stream].append((start, end))
    assert len(queues) == LAYOUT["n_processes"] * LAYOUT["n_streams"]
    for ops in queues.values():
        assert all(end <= next_start for (_, end), (next_start, _) in pairwise(sorted(ops)))


def test_every_op_has_one_launch_that_ended_before_it_started(export):
    launches = defaultdict(list)
    for tid, correlation, end in query(
        export, 'SELECT globalTid, correlationId, "end" FROM CUPTI_ACTIVITY_KIND_RUNTIME'
    ):
        launches[pid_of(tid), correlation].append(end)
    for pid, _, start, _, correlation in query(export, DEVICE_WORK):
        (launch_end,) = launches[pid_of(pid), correlation]
        assert launch_end <= start


def test_processes_share_correlation_ids(export):
    shared = query(
        export,
        """SELECT correlationId FROM CUPTI_ACTIVITY_KIND_KERNEL
           GROUP BY correlationId HAVING count(DISTINCT globalPid) > 1""",
    )
    assert len(shared) > SIZE["n_kernels"] / 20


def test_transfers_end_together_and_overlap_compute_in_part(export):
    ends = defaultdict(list)
    for pid, end in query(
        export,
        """SELECT globalPid, "end" FROM CUPTI_ACTIVITY_KIND_KERNEL JOIN StringIds ON id = shortName
           WHERE value LIKE 'nccl%' ORDER BY start""",
    ):
        ends[pid].append(end)
    first, second = ends.values()
    assert first == second
    assert all(0.2 < account.overlap < 0.999 for account in accounts(export).values())


def test_a_transfer_starts_after_the_compute_that_its_stream_waited_for(export):
    """The producer of a wait is the last op of the recording stream that was launched before the record."""
    n_checked = 0
    for pid in {pid for (pid,) in query(export, "SELECT DISTINCT globalPid FROM CUPTI_ACTIVITY_KIND_KERNEL")}:
        ops = [row[1:] for row in query(export, DEVICE_WORK) if row[0] == pid]
        waits = query(
            export,
            f"""SELECT wait.correlationId, wait.streamId, record.correlationId, record.streamId
                FROM CUPTI_ACTIVITY_KIND_SYNCHRONIZATION AS wait JOIN CUPTI_ACTIVITY_KIND_CUDA_EVENT AS record
                USING (globalPid, eventSyncId, eventId) WHERE globalPid = {pid}""",
        )
        for wait, wait_stream, record, record_stream in waits:
            assert record < wait
            produced = [end for stream, _, end, call in ops if stream == record_stream and call < record]
            started = [start for stream, start, _, call in ops if stream == wait_stream and call > wait]
            assert max(produced, default=0) <= min(started, default=max(produced, default=0))
            n_checked += bool(produced and started)
    assert n_checked > 50


def test_every_wait_names_a_record(export):
    waits = query(
        export, "SELECT count(*) FROM CUPTI_ACTIVITY_KIND_SYNCHRONIZATION WHERE eventId <> 4294967295"
    )
    paired = query(
        export,
        """SELECT count(*) FROM CUPTI_ACTIVITY_KIND_SYNCHRONIZATION
           JOIN CUPTI_ACTIVITY_KIND_CUDA_EVENT USING (globalPid, eventSyncId, eventId)""",
    )
    assert waits == paired


def test_ranges_nest_in_their_thread_and_steps_hold_all_launches(export):
    by_thread = defaultdict(list)
    for tid, start, end, text in query(export, 'SELECT globalTid, start, "end", text FROM NVTX_EVENTS'):
        by_thread[tid].append((start, -end, text))
    for tid, ranges in by_thread.items():
        open_ends = []
        for start, negative_end, _ in sorted(ranges, key=lambda each: each[:2]):
            open_ends = [end for end in open_ends if end > start]
            assert all(-negative_end <= end for end in open_ends)
            open_ends.append(-negative_end)
        steps = [(start, -end) for start, end, text in ranges if text and text.startswith("step ")]
        assert len(steps) == LAYOUT["n_steps"]
        calls = query(export, f"SELECT start FROM CUPTI_ACTIVITY_KIND_RUNTIME WHERE globalTid = {tid}")
        assert all(any(start <= call < end for start, end in steps) for (call,) in calls)


def test_names_come_in_both_forms(export):
    ((n_text, n_ids, n_both),) = query(
        export, "SELECT count(text), count(textId), sum(text IS NULL = (textId IS NULL)) FROM NVTX_EVENTS"
    )
    assert min(n_text, n_ids) > SIZE["n_ranges"] / 4
    assert n_both == 0


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        ({"n_kernels": 5}, {"n_steps": 4}),
        ({"n_api_calls": 3_000}, {}),
        ({"n_ranges": 4_000}, {}),
        ({}, {"n_streams": 1}),
    ],
)
def test_counts_that_cannot_be_are_refused(tmp_path, size, layout):
    with pytest.raises(ValueError):
        write_synthetic(tmp_path / "none.sqlite", **{**SIZE, **size}, **{**LAYOUT, **layout})


@pytest.mark.parametrize("layout", [{"n_streams": 2}, {"n_processes": 5}, {"n_streams": 6}, {"n_steps": 1}])
def test_other_layouts_work(tmp_path, layout):
    path = tmp_path / "layout.sqlite"
    write_synthetic(path, **SIZE, **{**LAYOUT, **layout})
    assert len(accounts(path)) == {**LAYOUT, **layout}["n_processes"]


def test_without_spare_calls_there_are_only_launches(tmp_path):
    path = tmp_path / "launches.sqlite"
    main([str(path), "--kernels", "500", "--api-calls", "500", "--ranges", "100", "--steps", "3"])
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM CUPTI_ACTIVITY_KIND_SYNCHRONIZATION").fetchone() == (
            0,
        )
