"""Reports that lost part of what orders device work: what rests on it is not said, and the report says so."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import cptrace
from cptrace.report import Report
from tests.support.diagnosed import findings, not_looked_for
from tests.support.nsys_tables import NONE
from tests.support.simulated_run import write
from tests.support.simulated_schemes import COMPUTE, KV, Ring
from tests.support.tiny_export import TinyExport, global_pid

NO_SYNCS = "DROP TABLE CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
NO_RECORDS = "DROP TABLE CUPTI_ACTIVITY_KIND_CUDA_EVENT"
NO_CALLS = "DROP TABLE CUPTI_ACTIVITY_KIND_RUNTIME"
SOUND = Ring(n_steps=3)
IN_TURN = SOUND.but(dkv_stream=KV, transfer_ns=(800_000,))
BOUND = ("required-order", "transfer-bound")
RACE = "missing-event (race)"
RESTS_ON_WAITS = {"missing-event (race)", "single-buffer", "queue-order"}


def lost(ring: Ring, folder: Path, *statements: str) -> Report:
    """Return the report of a run of which rows were deleted."""
    path = write(ring.hosts(), folder / f"{len(list(folder.iterdir()))}.sqlite")
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()
    return cptrace.analyze(path)


@pytest.mark.parametrize("statements", [(NO_SYNCS,), (NO_RECORDS,), (NO_SYNCS, NO_RECORDS)])
def test_a_sound_run_without_its_waits_is_not_called_a_race(
    tmp_path: Path, statements: tuple[str, ...]
) -> None:
    """The calls to cudaStreamWaitEvent are there; what they waited for is not."""
    report = lost(SOUND, tmp_path, *statements)
    assert not {code for code, _ in findings(report)} & {"missing-event", "single-buffer", "queue-order"}
    assert ("low-coverage", "waits") in findings(report)
    assert not_looked_for(report).keys() >= RESTS_ON_WAITS


@pytest.mark.parametrize("every", [2, 25])
@pytest.mark.parametrize("n_buffers", [1, 2])
def test_a_wait_whose_record_is_lost_is_not_paired_with_another(
    tmp_path: Path, every: int, n_buffers: int
) -> None:
    """
    record e (id 1)   record e (id 2: lost)   wait e (id 2)      the first record is not what it waited for
    """
    ring = SOUND.but(n_buffers=n_buffers)
    statement = f"DELETE FROM CUPTI_ACTIVITY_KIND_CUDA_EVENT WHERE rowid % {every} = 0"
    report = lost(ring, tmp_path, statement)
    whole, part = (r.coverage["dependencies"][0] for r in (lost(ring, tmp_path), report))
    assert whole["n_waits_paired"] == whole["n_waits"] == part["n_waits"]
    assert part["n_waits"] - part["n_waits_paired"] == pytest.approx(whole["n_waits"] / every, rel=0.3)
    assert ("missing-event", "race") not in findings(report)
    assert "missing-event (race)" in not_looked_for(report)


def test_one_buffer_cannot_be_excluded_without_records(tmp_path: Path) -> None:
    assert ("single-buffer", None) in findings(lost(SOUND.but(n_buffers=1), tmp_path))
    report = lost(SOUND.but(n_buffers=1), tmp_path, NO_RECORDS)
    assert "have no record in the trace" in not_looked_for(report)["single-buffer"]


@pytest.mark.parametrize("has_row", [True, False])
def test_what_may_have_waited_has_no_cause(tmp_path: Path, has_row: bool) -> None:
    """
    stream 7     [gemm][gemm] ... [gemm]
    stream 13                                wait e      [transfer]       100 us behind all that is recorded
    """
    export = TinyExport()
    for number in range(20):
        export.kernel("gemm", 1_000 * number + 100, 1_000 * (number + 1), launch=number)
    export.call("cudaStreamWaitEvent_v3020", 30, 31, correlation=99)
    if has_row:
        export.sync(30, 31, stream=13, event=5)
    export.kernel("ncclDevKernel_SendRecv", 120_000, 130_000, stream=13, launch=40)
    report = cptrace.analyze(export.write(tmp_path / "t.sqlite"))
    causes = {row["role"]: row["cause"] for row in report.rows("start_causes")}
    assert causes["comm"] == "unknown"


@pytest.mark.parametrize("name", ["cudaEventSynchronize", "hipStreamSynchronize", "cudaDeviceSynchronize"])
def test_a_blocking_call_without_its_record_still_blocks(tmp_path: Path, name: str) -> None:
    """As the PyTorch profiler records it by default: the call, and nothing of what it waited for."""
    ring = SOUND.but(blocks_host=True)
    rename = f"UPDATE StringIds SET value = '{name}_v3020' WHERE value LIKE '%Synchronize%'"  # whatever it is called
    whole = findings(lost(ring, tmp_path))[("missing-event", "host-sync")]
    found = findings(lost(ring, tmp_path, rename, NO_SYNCS))[("missing-event", "host-sync")]
    assert whole["confidence"] == "high"
    assert found["confidence"] == "low"
    assert found["predicted_step_ns"] + found["recoverable_ns"] == pytest.approx(
        whole["predicted_step_ns"] + whole["recoverable_ns"]
    )
    assert found["recoverable_ns"] > 0


def test_a_call_that_returns_long_after_all_work_waited_for_something_else(tmp_path: Path) -> None:
    """The same calls, but kernels end 10 ms before they return: what they waited for is not in the trace."""
    late = "UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET end = end + 10000000 WHERE nameId IN (SELECT id FROM StringIds"
    report = lost(
        SOUND.but(blocks_host=True), tmp_path, NO_SYNCS, f"{late} WHERE value LIKE '%Synchronize%')"
    )
    assert ("missing-event", "host-sync") not in findings(report)


def test_stream_order_needs_no_records(tmp_path: Path) -> None:
    """Transfers and attention in one stream: that is seen without any event."""
    ring = SOUND.but(kv_stream=COMPUTE, dkv_stream=COMPUTE, attention_first=True)
    row = findings(lost(ring, tmp_path, NO_SYNCS, NO_RECORDS))[("shared-stream", None)]
    assert row["confidence"] == "medium"


def test_transfers_are_not_surely_the_bound_where_waits_are_lost(tmp_path: Path) -> None:
    """One buffer makes transfers wait; without its events they seem to be what takes so long."""
    found = findings(lost(SOUND.but(n_buffers=1), tmp_path, NO_RECORDS))
    assert found[("required-order", "transfer-bound")]["confidence"] == "low"
    found = findings(lost(SOUND.but(transfer_ns=(900_000,)), tmp_path))
    assert found[("required-order", "transfer-bound")]["confidence"] == "high"


def without_calls(name: str, every: int) -> str:
    """Return the statement that deletes every so many API calls of some name, `%` for all of them."""
    return (
        f"DELETE FROM CUPTI_ACTIVITY_KIND_RUNTIME WHERE rowid % {every} = 0"
        f" AND nameId IN (SELECT id FROM StringIds WHERE value LIKE '{name}')"
    )


@pytest.mark.parametrize("statement", [NO_SYNCS, NO_RECORDS])
def test_turns_at_a_communicator_cannot_be_excluded_without_waits(tmp_path: Path, statement: str) -> None:
    """
    stream 13   [kv 0][dkv 0][kv 1][dkv 1]      that kv 1 is behind dkv 0 is seen; how early it could start is not
    """
    assert ("shared-communicator", None) in findings(lost(IN_TURN, tmp_path))
    report = lost(IN_TURN, tmp_path, statement)
    assert ("shared-communicator", None) not in findings(report)
    assert "have no record in the trace" in not_looked_for(report)["shared-communicator"]
    # In streams of their own none is behind another, whatever they wait for.
    assert "shared-communicator" not in not_looked_for(lost(SOUND, tmp_path, statement))


def test_without_calls_nobody_knows_whether_the_host_blocks(tmp_path: Path) -> None:
    name = "missing-event (host-sync)"
    assert "100.0 % of the ops" in not_looked_for(lost(SOUND.but(blocks_host=True), tmp_path, NO_CALLS))[name]
    assert name not in not_looked_for(lost(SOUND, tmp_path))
    assert name not in not_looked_for(lost(SOUND, tmp_path, without_calls("%", 100)))


@pytest.mark.parametrize(
    ("name", "what"), [("%", "of the ops"), ("cudaEventRecord%", "of the event records")]
)
def test_order_cannot_be_excluded_where_much_of_it_is_unknown(tmp_path: Path, name: str, what: str) -> None:
    """Behind which op an event is recorded is known by the calls alone: without them, a transfer waits for nothing."""
    report = lost(SOUND.but(n_buffers=1), tmp_path, without_calls(name, 2))
    assert ("single-buffer", None) not in findings(report)
    for code in ("single-buffer", "missing-event (host-sync)", "shared-communicator", "shared-stream"):
        assert what in not_looked_for(report)[code]
    assert RACE in not_looked_for(report)
    assert findings(report)[BOUND]["confidence"] == "low"


@pytest.mark.parametrize("name", ["%", "cudaEventRecord%"])
def test_a_few_lost_calls_make_the_order_less_sure(tmp_path: Path, name: str) -> None:
    """
    record e (its call lost)   wait e   [transfer]      a replay cannot take this wait away: it gains less than is there
    """
    ring = SOUND.but(n_buffers=1, transfer_ns=(700_000,))
    whole, part = (findings(r) for r in (lost(ring, tmp_path), lost(ring, tmp_path, without_calls(name, 61))))
    for key in (("single-buffer", None), BOUND):
        assert (whole[key]["confidence"], part[key]["confidence"]) == ("high", "medium")
    assert part["single-buffer", None]["recoverable_ns"] < whole["single-buffer", None]["recoverable_ns"]


@pytest.mark.parametrize("every", [1, 2, 7])
@pytest.mark.parametrize("ring", [SOUND, SOUND.but(n_buffers=1), IN_TURN])
def test_a_sound_run_that_lost_rows_of_waits_is_not_called_a_race(
    tmp_path: Path, ring: Ring, every: int
) -> None:
    """
    call         record e   wait e   launch attention      the call to wait is there: for what, only its lost row tells
    """
    rows = (
        f"DELETE FROM CUPTI_ACTIVITY_KIND_SYNCHRONIZATION WHERE rowid % {every} = 0 AND EXISTS (SELECT 1 FROM"
        " CUPTI_ACTIVITY_KIND_RUNTIME r JOIN StringIds s ON s.id = r.nameId WHERE s.value LIKE 'cudaStreamWait%'"
        " AND r.correlationId = CUPTI_ACTIVITY_KIND_SYNCHRONIZATION.correlationId"
        " AND r.globalTid >> 24 = CUPTI_ACTIVITY_KIND_SYNCHRONIZATION.globalPid >> 24)"
    )
    whole, part = lost(ring, tmp_path), lost(ring, tmp_path, rows)
    counts = [report.coverage["dependencies"][0] for report in (whole, part)]
    assert counts[1]["n_waits"] == counts[0]["n_waits"]
    assert counts[1]["n_waits_paired"] < counts[0]["n_waits"]
    assert ("missing-event", "race") not in findings(part)
    assert RACE in not_looked_for(part)
    assert RACE not in not_looked_for(whole)


@pytest.mark.parametrize(("has_syncs", "n_waits"), [(True, 0), (False, 1)])
def test_our_device_records_every_wait_that_waits(tmp_path: Path, has_syncs: bool, n_waits: int) -> None:
    """
    host         wait e (never recorded: waits for nothing)   launch   synchronize (blocks)
    """
    export = TinyExport().run(device_kind="cpu-emulated", clock="paced", scheme="ring")
    export.kernel("cptrace_cpu::flash_attention_forward", 10, 100, launch=5)
    export.call("cudaStreamWaitEvent_v3020", 1, 2, correlation=98)
    export.call("cudaStreamSynchronize_v3020", 20, 110, correlation=99)
    if has_syncs:
        export.add(
            "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", start=20, end=110, deviceId=0, contextId=1, greenContextId=0,
            streamId=7, correlationId=99, globalPid=global_pid(100), syncType=3, eventId=NONE, eventSyncId=None,
        )  # fmt: skip
    report = cptrace.analyze(export.write(tmp_path / "t.sqlite"))
    assert report.coverage["dependencies"][0]["n_waits"] == n_waits
    assert (("low-coverage", "waits") in findings(report)) == (n_waits > 0)
