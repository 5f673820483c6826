"""A report without device work is read from the ranges in which an emulated device says its own.

host    step  [0                                                100)
        send  [10   30)  attention [30    40)
        calls  12..14 c1, record 16..18, wait 20..22   32..34 c2
stream 7      .          execute c2    [40         80)
stream 13     execute c1 [15               50)
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import cptrace
from cptrace.labels import MIRRORED, format_label
from tests.support.command_line import cptrace as command
from tests.support.tiny_export import TinyExport

DOMAIN = 3
HOST, COMPUTE, COMM = 100, 107, 113
KERNEL = "cptrace_cpu::flash_attention_forward"
SEND = "cptrace_cpu::gloo_SendRecv"


def said(
    export: TinyExport,
    start: int,
    end: int | None,
    label: str,
    payload: int,
    thread: int = HOST,
    pid: int = 100,
):
    """Add a range of the domain `cptrace`."""
    return export.range(label, start, end, pid=pid, thread=thread, domain=DOMAIN, payload=payload)


def emulated(*, pid: int = 100, device: int = 0, export: TinyExport | None = None) -> TinyExport:
    """Return an export of one process that says what the picture shows."""
    export = export or TinyExport()
    export.domain(DOMAIN, "cptrace", pid=pid)

    def say(start: int, end: int, label: str, payload: int, thread: int = HOST) -> None:
        said(export, start, end, label, payload, thread, pid)

    say(0, 100, "step", 0)
    say(10, 30, "send_recv pass=forward layer=0 hop=0 tensor=kv bytes=64 peers=1", 0)
    say(30, 40, "attention pass=forward layer=0 hop=0", 0)
    say(12, 14, "call api=cuLaunchKernelEx", 1)
    say(16, 18, "record api=cudaEventRecord_v3020 stream=13 event=4 event_sync_id=9", 2)
    say(20, 22, "wait api=cudaStreamWaitEvent_v3020 stream=7 event=4 event_sync_id=9", 3)
    say(32, 34, "call api=cudaLaunchKernel_v7000", 4)
    say(90, 95, "wait api=cudaDeviceSynchronize_v3020", 5)
    say(15, 50, f"execute kind=kernel device={device} stream=13 name={SEND}", 1, COMM)
    say(40, 80, f"execute kind=kernel device={device} stream=7 name={KERNEL}", 4, COMPUTE)
    return export


@pytest.fixture
def report(tmp_path: Path) -> Path:
    return emulated().write(tmp_path / "lanes.sqlite")


def test_ops_are_the_execute_ranges_of_stream_threads(report: Path) -> None:
    ops = cptrace.open_trace(report).ops
    columns = ["start_ns", "end_ns", "device", "stream", "correlation_id", "kind", "name"]
    assert ops[columns].to_numpy().tolist() == [
        [15, 50, 0, 13, 1, "kernel", SEND],
        [40, 80, 0, 7, 4, "kernel", KERNEL],
    ]
    assert ops["bytes"].isna().all()


def test_calls_events_and_waits_are_tables_again(report: Path) -> None:
    trace = cptrace.open_trace(report)
    assert trace.api_calls["correlation_id"].tolist() == [1, 2, 3, 4, 5]
    assert trace.api_calls["name"].tolist()[:2] == ["cuLaunchKernelEx", "cudaEventRecord_v3020"]
    assert trace.event_records[
        ["stream", "event_id", "event_sync_id", "correlation_id"]
    ].to_numpy().tolist() == [[13, 4, 9, 2]]
    assert trace.syncs["kind"].tolist() == ["stream_wait", "context"]
    assert trace.syncs["event_sync_id"].tolist()[0] == 9


def test_only_labels_of_the_host_remain_ranges(report: Path) -> None:
    names = cptrace.open_trace(report).ranges["name"].astype(str).tolist()
    assert [name.split(" ")[0] for name in names] == ["step", "send_recv", "attention"]


def test_the_account_is_that_of_the_lanes_and_is_marked_as_emulated(report: Path) -> None:
    done = cptrace.analyze(report)
    (row,) = done.rows("ranks")
    assert (row["window_ns"], row["compute_ns"], row["comm_ns"], row["overlapped_comm_ns"]) == (
        65,
        40,
        35,
        10,
    )
    assert done.inputs[0]["device_kind"] == "cpu-emulated"
    (note,) = (note for note in done.coverage["notes"] if note["code"] == "nvtx-lanes")
    assert "no device work" in note["text"]
    assert note["count"] == 2


def test_text_and_json_say_that_no_figure_is_a_gpus(report: Path) -> None:
    assert "CPU EMULATION" in command("analyze", report).out
    assert (
        json.loads(command("analyze", "--format", "json", report).out)["inputs"][0]["device_kind"]
        == "cpu-emulated"
    )


def test_ranks_go_by_process_and_by_what_the_run_recorded(tmp_path: Path) -> None:
    export = emulated(pid=200, device=1, export=emulated(pid=100, device=0))
    export.run(
        device_kind="cpu-emulated",
        clock="paced",
        ranks=[{"rank": 1, "pid": 100, "device": 0}, {"rank": 0, "pid": 200, "device": 1}],
    )
    ranks = cptrace.open_trace(export.write(tmp_path / "two.sqlite")).ranks
    assert ranks[["rank", "pid", "device"]].to_numpy().tolist() == [[0, 200, 1], [1, 100, 0]]
    assert ranks["is_recorded"].all()


def test_ops_that_never_ended_are_left_out_and_counted(tmp_path: Path) -> None:
    export = said(emulated(), 85, None, f"execute kind=kernel device=0 stream=7 name={KERNEL}", 6, COMPUTE)
    trace = cptrace.open_trace(export.write(tmp_path / "open.sqlite"))
    assert len(trace.ops) == 2
    assert [(note.code, note.count) for note in trace.meta.notes] == [("nvtx-lanes", 2), ("dropped-rows", 1)]


def test_with_device_work_ranges_stay_ranges(tmp_path: Path) -> None:
    path = emulated().kernel("ncclDevKernel_SendRecv", 20, 40, launch=4).write(tmp_path / "cuda.sqlite")
    trace = cptrace.open_trace(path)
    assert trace.ops["name"].tolist() == ["ncclDevKernel_SendRecv"]
    assert trace.meta.device_kind == "cuda"
    assert len(trace.ranges) == 10


def test_such_ranges_of_another_domain_are_nobodys_ops(tmp_path: Path) -> None:
    export = TinyExport().range(f"execute kind=kernel device=0 stream=7 name={KERNEL}", 1, 2)
    assert cptrace.open_trace(export.write(tmp_path / "other.sqlite")).ops.empty


@pytest.mark.parametrize("name", MIRRORED)
def test_every_mirrored_label_is_read_by_a_table(name: str, tmp_path: Path) -> None:
    label = format_label(name, api="f", kind="memcpy", device=0, stream=7, event=1, bytes=8)
    export = said(emulated(), 200, 210, label, 50)
    trace = cptrace.open_trace(export.write(tmp_path / "one.sqlite"))
    tables = (trace.ops, trace.api_calls, trace.syncs, trace.event_records)
    assert any(50 in table["correlation_id"].tolist() for table in tables)
    assert len(trace.ranges) == 3
