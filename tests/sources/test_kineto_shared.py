"""Public traces of the PyTorch profiler: the published figures, and a second account in plain Python."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

import cptrace
from cptrace import schema
from cptrace.dependencies.pairs import find_pairs
from cptrace.launches import find_launches
from cptrace.requests import AnalyzeOptions, ScopeRequest, WindowRequest
from cptrace.sources import read_trace
from tests.support import plain_kineto
from tests.support.command_line import cptrace as run
from tests.support.shared_traces import require_trace

DLRM = [f"kineto/dlrm_8rank/worker{rank}.json.gz" for rank in range(8)]
FOUR_STREAMS = "kineto/nccl-4-streams.json.gz"
EVENT_SYNC = "kineto/cuda-event-sync-multi-stream.json.gz"
DEEP_EP = "kineto/deepep-all-to-all.json.gz"
ALL = (*DLRM, FOUR_STREAMS, EVENT_SYNC, DEEP_EP)
TIMES = (
    "window_ns",
    "compute_ns",
    "comm_ns",
    "overlapped_comm_ns",
    "exposed_comm_ns",
    "exposed_copy_ns",
    "idle_ns",
)


def report(*names: str):
    """Return what the command line says about public traces, from the first to the last op."""
    outcome = run("analyze", *map(require_trace, names), "--format", "json", "--window", "all")
    assert (outcome.exit_code, outcome.err) == (0, "")
    return json.loads(outcome.out)


def test_the_eight_ranks_of_dlrm():
    found = report(*DLRM)
    assert [row["rank"] for row in found["ranks"]] == list(range(8))
    comm = [row["comm_ns"] for row in found["ranks"]]
    assert comm == [1000 * us for us in (5798, 11336, 3492, 9774, 6587, 6251, 3558, 1746)]
    overlapped = [row["overlapped_comm_ns"] for row in found["ranks"]]
    assert overlapped == [1000 * us for us in (261, 280, 275, 324, 37, 40, 269, 166)]
    kinds = [(row["rank"], row["kind"], row["count"]) for row in found["collectives"]]
    assert sorted(kinds) == sorted(
        (rank, *kind) for rank in range(8) for kind in (("all_to_all", 5), ("all_reduce", 3))
    )


def test_the_files_of_a_job_may_come_in_any_order():
    assert [row["rank"] for row in report(DLRM[5], DLRM[0])["ranks"]] == [0, 5]
    one, other = report(*DLRM), report(*reversed(DLRM))
    in_order = {"inputs", "coverage", "schemes"}  # they name files
    assert {key: one[key] for key in one.keys() - in_order} == {
        key: other[key] for key in other.keys() - in_order
    }


def test_some_files_of_a_job_do_not_tell_who_came_last():
    """Rank 7 did, in most collectives; without it another rank would be blamed."""
    found = report(*DLRM[:7])
    (reason,) = [entry["reason"] for entry in found["not_applicable"] if entry["analysis"] == "peer_wait"]
    assert "the job has 8 ranks, and 7 of them are here" in reason
    assert {row["peer_wait_ns"] for row in found["ranks"]} == {None}
    assert "peer-wait" not in {row["code"] for row in found["findings"]}


def test_four_streams():
    found = report(FOUR_STREAMS)
    (rank,) = found["ranks"]
    known = {
        "window_ns": 660551005,
        "compute_ns": 115655847,
        "comm_ns": 46876493,
        "overlapped_comm_ns": 7317025,
    }
    assert {name: rank[name] for name in known} == known
    sizes = {row["kind"]: (row["count"], row["bytes"]) for row in found["collectives"]}
    assert sizes == {"all_reduce": (15, 306684384), "broadcast": (6, 638712)}
    assert found["coverage"]["n_launches_missing"] == 0


def test_deep_ep():
    found = report(DEEP_EP)
    (rank,) = found["ranks"]
    known = {"comm_ns": 113440000, "compute_ns": 124310000, "overlapped_comm_ns": 109250000}
    assert {name: rank[name] for name in known} == known
    kernels = [row for row in found["kernels"] if row["kind"] == "kernel"]
    assert sum(row["count"] for row in kernels) == 963
    assert sum(row["count"] for row in kernels if row["role"] == "comm") == 36


def test_synchronisations_are_no_device_work():
    trace = read_trace(require_trace(EVENT_SYNC))
    assert trace.ops["kind"].astype(str).value_counts().to_dict() == {"kernel": 3, "memset": 3}
    assert sorted(trace.ops["stream"].unique().tolist()) == [20, 24, 28]
    assert trace.syncs["kind"].astype(str).value_counts().to_dict() == {
        "event": 3,
        "stream_wait": 1,
        "context": 1,
    }
    (rank,) = report(EVENT_SYNC)["ranks"]
    assert (rank["compute_ns"], rank["exposed_copy_ns"], rank["comm_ns"]) == (369_000, 3_000, 0)


def test_a_stream_wait_finds_its_record():
    trace = read_trace(require_trace(EVENT_SYNC))
    pairs = find_pairs(trace)
    (wait,) = pairs.waits.tolist()
    assert pairs.of_waits.is_named.tolist() == [True]
    record = trace.event_records.iloc[int(pairs.of_waits.record[0])]
    assert (record["correlation_id"], record["stream"], record["event_id"]) == (1385, 20, 19)
    assert trace.syncs.iloc[wait][["stream", "event_id", "correlation_id"]].tolist() == [24, 19, 1389]
    assert pairs.record_ns[int(pairs.of_waits.record[0])] == 1712867402367666_000


@pytest.mark.parametrize("name", ALL)
def test_every_account_equals_the_plain_one(name):
    path = require_trace(name)
    options = AnalyzeOptions(scope=ScopeRequest(window=WindowRequest(is_all=True)))
    rows = cptrace.analyze(path, options).rows("ranks")
    expected = plain_kineto.accounts(path)
    assert {(row["pid"], row["device"]) for row in rows} == {tuple(rank) for rank in expected}
    for row in rows:
        account = expected[row["pid"], row["device"]]
        assert {time: row[time] for time in TIMES} == {time: getattr(account, time) for time in TIMES}


@pytest.mark.parametrize("name", ALL)
def test_every_op_finds_the_launch_that_the_plain_reader_finds(name):
    path = require_trace(name)
    trace = read_trace(path)
    launches = find_launches(trace.ops, trace.api_calls)
    start = trace.api_calls["start_ns"].to_numpy()[launches.call]
    called = [int(s) if known else None for s, known in zip(start, launches.is_known, strict=True)]
    found = zip(trace.ops["start_ns"].tolist(), called, strict=True)
    assert sorted(found, key=lambda pair: (pair[0], pair[1] or 0)) == plain_kineto.launches(path)


@pytest.mark.parametrize("name", ALL)
def test_tables_are_whole_and_the_file_is_left_alone(name):
    path = require_trace(name)
    before = hashlib.sha256(path.read_bytes()).digest(), sorted(path.parent.iterdir())
    trace = read_trace(path)
    for table in schema.TABLES:
        schema.check_frame(table, getattr(trace, table.name))
    assert len(trace.ops) == len(plain_kineto.events_of(path, plain_kineto.DEVICE_WORK))
    assert len(trace.api_calls) == len(plain_kineto.events_of(path, plain_kineto.API_CALLS))
    assert len(trace.ranges) >= len(plain_kineto.events_of(path, ("user_annotation",)))
    assert np.all(np.diff(trace.ops["start_ns"]) >= 0)
    assert (trace.meta.format, trace.meta.schema_version, trace.meta.notes) == ("kineto_json", "1", ())
    assert (hashlib.sha256(path.read_bytes()).digest(), sorted(path.parent.iterdir())) == before


@pytest.mark.parametrize(
    ("name", "start"),
    [(FOUR_STREAMS, 1711964646000000000), (DEEP_EP, 0), (DLRM[0], 0)],
)
def test_time_0_is_told_where_times_are_relative(name, start):
    assert read_trace(require_trace(name)).meta.session_start_utc_ns == start


def test_steps_are_those_of_the_profiler():
    found = cptrace.analyze(require_trace(FOUR_STREAMS))
    assert [row["name"] for row in found.rows("steps")] == [
        "ProfilerStep#4",
        "ProfilerStep#5",
        "ProfilerStep#6",
    ]
    assert found.rows("ranks")[0]["window_basis"] == "steps"
