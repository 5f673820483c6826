"""The plain-Python account against pictures, single nanoseconds counted one by one, and published figures."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plain_account import (
    COMM,
    COMPUTE,
    COPY,
    WITH_GRAPHS,
    Account,
    Op,
    Rank,
    account,
    accounts,
    connect,
    kernel_totals,
    read_ops,
)
from tests.support.shared_traces import require_trace

RANK = Rank(pid=1, device=0)
ULYSSES = "nsys/nsys-2026.2-ulysses-2gpu.sqlite"


def op(role: str, start: int, end: int) -> Op:
    """Return an op of the one rank used here."""
    return Op(RANK, role, role, start, end)


PICTURE = (
    op(COMPUTE, 0, 6),
    op(COMPUTE, 4, 10),
    op(COMM, 8, 14),
    op(COPY, 13, 17),
    op(COPY, 2, 3),
    op(COMPUTE, 19, 20),
)
"""
            0         5         10        15        20
compute     [==========[========)                  [=)      0-6 and 4-10 overlap; 19-20
comm                        [============)                  8-14
copy            [=)                   [=======)             2-3, 13-17
"""


def test_the_picture_divides_into_its_parts():
    expected = Account(
        window_ns=20, compute_ns=11, comm_ns=6, overlapped_comm_ns=2, exposed_copy_ns=3, idle_ns=2
    )
    assert account(PICTURE) == expected
    assert (expected.exposed_comm_ns, expected.comm_share, expected.exposed_comm_share) == (4, 0.3, 0.2)


def test_ops_that_cross_the_edge_of_a_window_are_clipped():
    clipped = account(PICTURE, [(9, 12), (11, 16)])
    assert clipped == Account(7, compute_ns=1, comm_ns=5, overlapped_comm_ns=1, exposed_copy_ns=2, idle_ns=0)


def test_overlap_does_not_apply_without_communication():
    assert account([op(COMPUTE, 0, 5)]).overlap is None


def test_an_op_that_ends_before_it_starts_is_refused(tmp_path):
    path = tmp_path / "reversed.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.executescript(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (globalPid, deviceId, start, end);"
            "INSERT INTO CUPTI_ACTIVITY_KIND_MEMSET VALUES (16777216, 0, 5, 4);"
        )
    with pytest.raises(ValueError, match="ends at 4 ns, before its start at 5 ns"):
        read_ops(path)


spans = st.tuples(st.integers(0, 30), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair)))
ops_strategy = st.lists(
    st.builds(lambda role, span: op(role, *span), st.sampled_from([COMPUTE, COMM, COPY]), spans), max_size=8
)


@given(ops=ops_strategy, windows=st.lists(spans, min_size=1, max_size=3))
def test_the_walk_equals_counting_single_nanoseconds(ops, windows):
    def ticks(role: str) -> set[int]:
        return {tick for each in ops if each.role == role for tick in range(each.start, each.end)} & window

    window = {tick for start, end in windows for tick in range(start, end)}
    compute, comm, copy = ticks(COMPUTE), ticks(COMM), ticks(COPY)
    assert account(ops, windows) == Account(
        window_ns=len(window),
        compute_ns=len(compute),
        comm_ns=len(comm),
        overlapped_comm_ns=len(comm & compute),
        exposed_copy_ns=len(copy - compute - comm),
        idle_ns=len(window - compute - comm - copy),
    )


def count(relative: str, query: str) -> int:
    """Return the one number that a query over a public trace gives."""
    with closing(connect(require_trace(relative))) as connection:
        return connection.execute(query).fetchone()[0]


TABLE_COUNTS = (
    ("2021.2-no-meta", "CUPTI_ACTIVITY_KIND_KERNEL", 12),
    ("2021.2-no-meta", "CUPTI_ACTIVITY_KIND_MEMCPY", 48),
    ("2022.1-stream-waits", "CUPTI_ACTIVITY_KIND_KERNEL WHERE streamId IN (7, 13)", 46),
    ("2022.1-stream-waits", "CUPTI_ACTIVITY_KIND_KERNEL WHERE streamId NOT IN (7, 13)", 0),
    ("2022.1-stream-waits", "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", 68),
    ("2022.1-stream-waits", "CUPTI_ACTIVITY_KIND_CUDA_EVENT", 58),
    (
        "2022.1-stream-waits",
        "CUPTI_ACTIVITY_KIND_RUNTIME JOIN StringIds ON id = nameId WHERE value LIKE 'cudaStreamWaitEvent%'",
        40,
    ),
    (
        "2022.1-stream-waits",
        """CUPTI_ACTIVITY_KIND_SYNCHRONIZATION AS wait
           WHERE streamId <> 4294967295 AND eventId <> 4294967295 AND EXISTS (
               SELECT 1 FROM CUPTI_ACTIVITY_KIND_CUDA_EVENT AS record
               JOIN CUPTI_ACTIVITY_KIND_RUNTIME AS call USING (correlationId)
               WHERE record.globalPid = wait.globalPid AND record.contextId = wait.contextId
               AND record.eventId = wait.eventId AND call.end <= wait.start)""",
        40,
    ),
    ("2023.3-one-kernel", "CUPTI_ACTIVITY_KIND_KERNEL", 1),
    ("2023.3-one-kernel", "CUPTI_ACTIVITY_KIND_CUDA_EVENT", 2),
    ("no-kernels", "sqlite_master WHERE name = 'CUPTI_ACTIVITY_KIND_KERNEL'", 0),
    ("2025.5-cuda-events", "CUPTI_ACTIVITY_KIND_CUDA_EVENT", 4000),
    ("2025.5-cuda-events", "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", 2005),
    ("2025.5-cuda-events", "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION WHERE eventId <> 4294967295", 2000),
    (
        "2025.5-cuda-events",
        """CUPTI_ACTIVITY_KIND_SYNCHRONIZATION AS sync JOIN CUPTI_ACTIVITY_KIND_CUDA_EVENT AS record
           USING (globalPid, eventSyncId) WHERE sync.eventId = record.eventId""",
        2000,
    ),
    ("2026.2-ulysses-2gpu", "CUPTI_ACTIVITY_KIND_KERNEL", 4010),
    ("2026.2-ulysses-2gpu", "sqlite_master WHERE name = 'TARGET_INFO_GPU'", 0),
    ("2026.2-ulysses-2gpu", "CUPTI_ACTIVITY_KIND_CUDA_EVENT", 0),
    (
        "2026.2-ulysses-2gpu",
        "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION WHERE streamId <> 4294967295 AND eventId <> 4294967295",
        200,
    ),
)


@pytest.mark.parametrize(("trace", "table", "n_rows"), TABLE_COUNTS)
def test_public_traces_hold_the_published_rows(trace, table, n_rows):
    assert count(f"nsys/nsys-{trace}.sqlite", f"SELECT count(*) FROM {table}") == n_rows


def test_two_processes_of_the_ulysses_trace_share_correlation_ids():
    shared = """(SELECT correlationId FROM CUPTI_ACTIVITY_KIND_RUNTIME
                 GROUP BY correlationId HAVING count(DISTINCT globalTid >> 24) = 2)"""
    assert count(ULYSSES, f"SELECT count(*) FROM {shared}") == 264


def test_the_graph_trace_hides_its_kernels():
    trace = "nsys/nsys-2024.6-graph-trace.sqlite"
    (each,) = accounts(require_trace(trace)).values()
    assert (each.compute_ns, each.exposed_copy_ns) == (78_270, 0)
    (each,) = accounts(require_trace(trace), tables=WITH_GRAPHS).values()
    assert (each.compute_ns, each.exposed_copy_ns) == (78_270, 7_811_141_695)
    assert count(trace, 'SELECT sum("end" - start) FROM CUPTI_ACTIVITY_KIND_GRAPH_TRACE') == 7_811_141_695


def test_the_trace_without_kernels_has_no_account():
    assert accounts(require_trace("nsys/nsys-no-kernels.sqlite")) == {}


def test_the_ulysses_trace_gives_the_published_account():
    assert accounts(require_trace(ULYSSES)) == {
        Rank(144, 0): Account(299_848_812, 253_690_832, 17_172_652, 0, 2_954_303, 26_031_025),
        Rank(145, 1): Account(298_661_551, 256_095_624, 8_229_100, 0, 2_951_192, 31_385_635),
    }


def test_the_ulysses_trace_gives_the_published_transfers():
    totals = kernel_totals(require_trace(ULYSSES))
    transfers = {
        rank: total for (rank, name), total in totals.items() if name.startswith("ncclDevKernel_SendRecv")
    }
    assert {rank: n for rank, (n, _) in transfers.items()} == {Rank(144, 0): 33, Rank(145, 1): 33}
    assert sum(total_ns for _, total_ns in transfers.values()) == 25_401_752
    elsewhere = """CUPTI_ACTIVITY_KIND_KERNEL JOIN StringIds ON id = shortName
                   WHERE value LIKE 'ncclDevKernel%' AND streamId NOT IN (7, 15)"""
    assert count(ULYSSES, f"SELECT count(*) FROM {elsewhere}") == 0
