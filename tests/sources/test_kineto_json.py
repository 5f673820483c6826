"""What is read of PyTorch profiler traces: each table, of hand-written events of every kind and layout."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cptrace
from cptrace import schema
from cptrace.errors import TraceError
from cptrace.launches import find_launches
from cptrace.requests import ReadOptions
from cptrace.sources import kineto_text, read_trace, start_reading
from cptrace.sources.kineto_events import as_integer, decode_events
from cptrace.sources.kineto_misfits import Misfits
from cptrace.sources.kineto_text import event_runs, read_document
from tests.support.command_line import cptrace as run
from tests.support.shared_traces import ROOT
from tests.support.synthetic_kineto import COMPACT, PID, STYLES, Number, TinyTrace, dump, write_synthetic

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def training() -> TinyTrace:
    """
    host   ProfilerStep#1 [0 ............. 900)
    s7         [1000 === nvjet 3000)     [4000 = copy 5000)
    s9              [2000 === NCCL 4500)
    """
    trace = TinyTrace().range("ProfilerStep#1", 0, 900)
    trace.kernel("nvjet_tst", 1000, 3000, launch=100).kernel(NCCL, 2000, 4500, stream=9, launch=200)
    trace.call("cudaMemcpyAsync", 300, 310, 77).copy(
        "Memcpy DtoH (Device -> Pageable)", 4000, 5000, correlation=77
    )
    trace.sync("Stream Wait Event", 150, 160, stream=9, correlation=31, wait_on_stream=7,
               wait_on_cuda_event_record_corr_id=30, wait_on_cuda_event_id=4)  # fmt: skip
    return trace.call("cudaEventRecord", 140, 145, 30).call("cudaStreamWaitEvent", 149, 161, 31)


def read(trace: TinyTrace, folder, name="trace.json", **options):
    return read_trace(trace.write(folder / name), ReadOptions(**options))


def column(frame, name):
    return [None if pd.isna(value) else value for value in frame[name].tolist()]


@pytest.mark.parametrize("style", STYLES)
def test_tables_of_a_small_trace(tmp_path, style):
    trace = read_trace(training().write(tmp_path / "trace.json", style))
    ops = trace.ops
    assert list(zip(ops["start_ns"], ops["end_ns"], ops["stream"], ops["kind"], strict=True)) == [
        (1000, 3000, 7, "kernel"),
        (2000, 4500, 9, "kernel"),
        (4000, 5000, 7, "memcpy"),
    ]
    assert column(ops, "name") == ["nvjet_tst", NCCL, "memcpy DtoH"]
    assert set(ops["process"]) == set(trace.api_calls["process"]) == set(trace.ranges["process"]) == {PID}
    launches = find_launches(ops, trace.api_calls)
    assert launches.is_known.tolist() == [True] * 3
    assert trace.api_calls["start_ns"].to_numpy()[launches.call].tolist() == [100, 200, 300]
    assert trace.ranges[["start_ns", "end_ns", "name", "kind"]].values.tolist() == [
        [0, 900, "ProfilerStep#1", "push_pop"]
    ]
    assert trace.ranges["thread"].tolist() == trace.api_calls["thread"].unique().tolist()
    assert trace.syncs[["kind", "stream", "event_id", "event_sync_id"]].values.tolist() == [
        ["stream_wait", 9, 4, 30]
    ]
    assert trace.event_records[["stream", "event_id", "event_sync_id", "correlation_id"]].values.tolist() == [
        [7, 4, 30, 30]
    ]
    for table in schema.TABLES:
        schema.check_frame(table, getattr(trace, table.name))


def test_the_report_of_a_small_trace(tmp_path):
    report = cptrace.analyze(training().write(tmp_path / "trace.json"))
    (rank,) = report.rows("ranks")
    assert rank["window_basis"] == "steps"
    assert (rank["window_ns"], rank["compute_ns"], rank["comm_ns"]) == (4000, 2000, 2500)
    assert (rank["overlapped_comm_ns"], rank["exposed_copy_ns"]) == (1000, 500)
    assert report.inputs[0]["format"] == "kineto_json"


def report_bytes(path) -> str:
    outcome = run("analyze", path, "--format", "json", "--window", "all")
    assert (outcome.exit_code, outcome.err) == (0, "")
    return outcome.out


@pytest.mark.parametrize("seed", range(3))
def test_shuffled_events_and_other_layouts_give_the_same_bytes(tmp_path, seed):
    path = tmp_path / "trace.json"
    many = training()
    for number in range(40):
        many.kernel(
            f"k{number % 3}",
            1000 * (number // 4),
            1000 * (number // 4) + 700,
            device=number % 2,
            stream=number % 5,
        )
        many.event(ph="X", cat=f"new_{number % 3}", name="x", pid=0, tid=0, ts=1, dur=1)
    expected = report_bytes(many.write(path))
    assert report_bytes(many.write(path, STYLES[seed], shuffle=seed)) == expected


def test_packed_and_plain_files_are_read_alike(tmp_path):
    plain, packed = training().write(tmp_path / "a.json"), training().write(tmp_path / "a.json.gz")
    assert packed.read_bytes()[:2] == b"\x1f\x8b"
    assert report_bytes(plain).replace("a.json", "a.json.gz") == report_bytes(packed)


@pytest.mark.parametrize(
    "name", ["trace", "trace.pt.trace.json", "trace.pt.trace.json.gz", "worker0.gz", "odd.sqlite"]
)
def test_files_are_known_by_their_content(tmp_path, name):
    path = tmp_path / name
    training().write(path)
    assert read_trace(path).meta.format == "kineto_json"


def test_a_byte_order_mark_and_blanks_are_passed_over(tmp_path):
    path = tmp_path / "trace.json"
    path.write_bytes(b"\xef\xbb\xbf" + training().text().encode())
    assert len(read_trace(path).ops) == 3
    path.write_bytes(b" \n" * 50 + training().text().encode())
    assert len(read_trace(path).ops) == 3


@pytest.mark.parametrize("first", [True, False], ids=["events-first", "events-last"])
def test_keys_may_stand_in_any_order(tmp_path, first):
    """Python writes the events before the rest, Kineto in the middle or at the end."""
    devices = [{"id": number, "name": f"GPU {number}"} for number in range(8)]
    trace = training()
    trace.top = (
        {"traceEvents": trace.events, "deviceProperties": devices} if first else {"deviceProperties": devices}
    )
    path = tmp_path / "trace.json"
    path.write_text(dump({**trace.top, "traceEvents": trace.events}))
    found = read_trace(path)
    assert len(found.ops) == 3
    assert column(found.ranks, "device_name") == ["GPU 0"]


class TestDeviceWork:
    def test_copies_are_named_by_their_direction(self, tmp_path):
        names = ["Memcpy HtoD (Pinned -> Device)", "Memcpy DtoD (Device -> Device)", "Memcpy PtoP (Device -> Device)",
                 "Memset (Device)", "Memcpy <unknown> (? -> ?)", "odd"]  # fmt: skip
        trace = TinyTrace()
        for number, name in enumerate(names):
            trace.copy(name, 10 * number, 10 * number + 5, bytes=number)
        ops = read(trace, tmp_path).ops
        assert column(ops, "name") == ["memcpy HtoD", "memcpy DtoD", "memcpy PtoP", "memset", "memcpy", "odd"]
        assert column(ops, "kind") == ["memcpy"] * 3 + ["memset"] + ["memcpy"] * 2
        assert column(ops, "is_peer_copy") == [False, False, True, False, False, False]
        assert column(ops, "bytes") == list(range(6))

    def test_a_copy_to_another_device_communicates(self, tmp_path):
        trace = TinyTrace().copy("Memcpy DtoD (Device -> Device)", 0, 5, fromDevice=0, inDevice=0, toDevice=1)
        trace.copy("Memcpy DtoD (Device -> Device)", 5, 9, fromDevice=1, inDevice=1, toDevice=1)
        path = trace.write(tmp_path / "trace.json")
        assert column(read_trace(path).ops, "is_peer_copy") == [True, False]
        assert cptrace.analyze(path).rows("ranks")[0]["comm_ns"] == 5

    @pytest.mark.parametrize(
        ("args", "size"),
        [
            ({"In msg nelems": 1000, "dtype": "BFloat16", "Group size": 8}, 2000),
            ({"In msg nelems": 3, "dtype": "Float"}, 12),
            ({"In msg nelems": 3, "dtype": "Float8_e4m3fn"}, 3),
            ({"In msg nelems": 0, "dtype": "Long"}, 0),
            ({"In msg nelems": 3}, None),
            ({"In msg nelems": 3, "dtype": "Quaternion"}, None),
            ({"In msg nelems": 3, "dtype": 4}, None),
            ({"In msg nelems": -3, "dtype": "Float"}, None),
            ({"In msg nelems": 2**62, "dtype": "Double"}, None),
            ({"dtype": "Float"}, None),
        ],
    )
    def test_collectives_have_the_size_that_the_rank_hands_in(self, tmp_path, args, size):
        trace = TinyTrace().kernel("x", 0, 1).kernel(NCCL, 0, 10, **{"Collective name": "allreduce", **args})
        assert column(read(trace, tmp_path).ops, "bytes") == [None, size]

    def test_kernels_of_amd(self, tmp_path):
        """RCCL keeps NCCL's names; there is no context, and streams of host calls are addresses."""
        trace = TinyTrace()
        names = (
            "ncclDevKernel_Generic_4(int)",
            "Cijk_Ailk_Bljk_BBS",
            "mscclKernel_Sum_float(int)",
            "rcclGenericKernel<4>(x)",
        )
        for number, name in enumerate(names):
            args = {
                "device": 2,
                "stream": 3,
                "hsa_queue": 1,
                "correlation": number,
                "kind": "Dispatch Kernel",
            }
            trace.span("kernel", name, 10 * number, 10 * number + 5, 2, 3, **args)
        trace.span("cuda_runtime", "hipLaunchKernel", 0, 1, PID, PID, cid=1, correlation=1, stream="0x7f31")
        report = cptrace.analyze(trace.write(tmp_path / "trace.json"))
        (rank,) = report.rows("ranks")
        assert (rank["device"], rank["comm_ns"], rank["compute_ns"], rank["unclassified_ns"]) == (2, 15, 5, 0)
        assert {row["context"] for row in report.rows("streams")} == {0}

    def test_layout_of_the_first_releases(self, tmp_path):
        trace = TinyTrace().event(
            ph="X", cat="Kernel", name="k", pid=1, tid="stream 9", ts=5, dur=2, args={"device": 1}
        )
        trace.event(
            ph="X", cat="Memcpy", name="Memcpy HtoD (Pageable -> Device)", pid=1, tid="stream 7", ts=1, dur=2
        )
        trace.event(
            ph="X", cat="Runtime", name="cudaLaunchKernel", pid=3, tid=3, ts=0, dur=1, args={"correlation": 1}
        )
        trace.event(ph="X", cat="Operator", name="ProfilerStep#0", pid=3, tid=3, ts=0, dur=3)
        found = read(trace, tmp_path)
        assert found.ops[["start_ns", "device", "stream", "kind"]].values.tolist() == [
            [1000, 1, 7, "memcpy"],
            [5000, 1, 9, "kernel"],
        ]
        assert column(found.ranges, "name") == ["ProfilerStep#0"]
        assert found.meta.missing_tables == ("gpu_memset", "cuda_sync")

    def test_missing_fields(self, tmp_path):
        trace = (
            TinyTrace()
            .event(ph="X", cat="kernel", ts=1, dur=1)
            .event(ph="X", cat="gpu_memcpy", ts=2, dur=1, args=None)
        )
        ops = read(trace, tmp_path).ops
        assert column(ops, "name") == ["(unnamed kernel)", "(unnamed copy)"]
        assert ops[["process", "device", "context", "stream"]].to_numpy().any() == 0
        assert column(ops, "correlation_id") == [None, None]

    def test_ids_that_are_addresses_become_numbers(self, tmp_path):
        """As traces of other makers have; numbers in their order, the same for any order of events."""
        trace = TinyTrace()
        for number, stream in enumerate((2**63 - 1, 5, 2**40)):
            trace.kernel("k", number, number + 1, stream=stream)
        assert read(trace, tmp_path).ops["stream"].tolist() == [2, 0, 1]

    def test_work_of_a_runtime_call_and_the_driver_call_in_it_goes_with_the_first(self, tmp_path):
        trace = TinyTrace().call("cuLaunchKernel", 12, 20, 5).call("cudaGraphLaunch", 10, 20, 5)
        for start in (100, 200, 300):
            trace.kernel("k", start, start + 10, correlation=5)
        found = read(trace, tmp_path)
        launches = find_launches(found.ops, found.api_calls)
        assert found.api_calls["start_ns"].to_numpy()[launches.call].tolist() == [10, 10, 10]

    @pytest.mark.parametrize(
        "bad", [{"ts": None}, {"ts": "soon"}, {"dur": Number("-0.001")}, {"ts": -5}, {"ts": 5 * 10**15}, {}]
    )
    def test_impossible_times_are_refused_or_counted(self, tmp_path, bad):
        fields = {"ph": "X", "cat": "kernel", "name": "bad", "ts": 1, "dur": 1, **bad}
        if not bad:
            del fields["dur"]
        trace = TinyTrace().kernel("good", 0, 10).event(**fields)
        with pytest.raises(TraceError, match=r"1 of 2 device events have .* --drop-invalid"):
            read(trace, tmp_path)
        found = read(trace, tmp_path, drop_invalid=True)
        assert column(found.ops, "name") == ["good"]
        assert [(note.code, note.count) for note in found.meta.notes[:-1]] == [("dropped-rows", 1)]

    def test_events_of_the_host_with_impossible_times_are_counted(self, tmp_path):
        trace = (
            training().event(ph="X", cat="cuda_runtime", name="x", pid=PID, tid=PID, ts=3).range("r", 5, 4)
        )
        found = read(trace, tmp_path)
        assert len(found.api_calls) == 5
        assert [(note.text.split(" with")[0], note.count) for note in found.meta.notes[:2]] == [
            ("API calls", 1),
            ("ranges", 1),
        ]


class TestRanks:
    def test_one_device_has_the_recorded_rank(self, tmp_path):
        trace = training()
        trace.top["distributedInfo"] = {"backend": "nccl", "rank": 5, "world_size": 8}
        ranks = read(trace, tmp_path).ranks
        assert ranks[["rank", "pid", "device", "is_recorded"]].values.tolist() == [[5, PID, 0, True]]

    def test_devices_are_counted_where_no_rank_is_recorded(self, tmp_path):
        trace = TinyTrace().kernel("a", 0, 1, device=3).kernel("b", 0, 1, device=1)
        ranks = read(trace, tmp_path).ranks
        assert ranks[["rank", "device", "is_recorded"]].values.tolist() == [[0, 1, False], [1, 3, False]]

    def test_a_device_touched_by_accident_is_no_rank_of_the_job(self, tmp_path):
        """
        rank 0   device 0  [==)[==)
        rank 1   device 1  [==)[==)    device 0  [=)
        """
        paths = []
        for rank in (0, 1):
            trace = TinyTrace().kernel("a", 0, 10, device=rank).kernel("a", 10, 20 + rank, device=rank)
            trace.kernel("stray", 5, 8, device=1 - rank)
            trace.top["distributedInfo"] = {"rank": rank, "world_size": 2}
            paths.append(trace.write(tmp_path / f"{rank}.json"))
        rows = cptrace.analyze(paths).rows("ranks")
        assert [(row["rank"], row["device"], row["window_ns"]) for row in rows] == [
            (0, 0, 20), (2, 1, 3), (1, 1, 21), (3, 0, 3),
        ]  # fmt: skip

    def test_devices_of_a_merged_file_belong_to_the_process_that_launched_their_work(self, tmp_path):
        trace = TinyTrace()
        for rank, pid in enumerate((500, 400)):
            for number in range(3):
                start = 1000 * number + 100 * rank
                trace.call("cudaLaunchKernel", start, start + 1, 10 * rank + number, pid=pid, tid=1)
                trace.kernel("k", start + 50, start + 60, device=rank, correlation=10 * rank + number)
        found = read(trace, tmp_path)
        assert found.ranks[["rank", "pid", "device"]].values.tolist() == [[0, 500, 0], [1, 400, 1]]
        assert (
            "device 0 of process 500 is rank 0 and device 1 of process 400 is rank 1"
            in found.meta.notes[0].text
        )
        assert find_launches(found.ops, found.api_calls).is_known.all()
        assert found.api_calls["thread"].nunique() == 2

    @pytest.mark.parametrize("job", [None, [], {}, "x", {"world_size": 8}])
    def test_a_file_that_tells_no_rank_says_so(self, tmp_path, job):
        trace = training()
        trace.top["distributedInfo"] = job
        found = read(trace, tmp_path)
        assert column(found.ranks, "is_recorded") == [False]
        (note,) = found.meta.notes
        assert note.code == "counted-ranks"
        assert note.text.startswith("the file does not tell its rank")
        assert "device 0 is rank 0;" in note.text

    @pytest.mark.parametrize(
        ("rank", "shown"),
        [(-1, "-1"), ("x", '"x"'), (2**31, "2147483648"), (2**40, "1099511627776"), (None, "null"), (1.5, "1.5"),
         (True, "true"), ([0], "[0]"), ({}, "{}"), ("a" * 99, '"aaa'), (2**70, "11805")],
    )  # fmt: skip
    def test_an_impossible_rank_is_none_and_is_shown(self, tmp_path, rank, shown):
        trace = training()
        trace.top["distributedInfo"] = {"rank": rank, "world_size": "y"}
        path = trace.write(tmp_path / "trace.json")
        found = read_trace(path)
        assert found.ranks[["rank", "is_recorded"]].values.tolist() == [[0, False]]
        (note,) = found.meta.notes
        assert f"tells an impossible rank (distributedInfo.rank is {shown}" in note.text
        assert "the file tells an impossible rank" in " ".join(run("analyze", path).out.split())

    def test_ranks_beside_the_one_that_is_told_are_said_to_be_counted(self, tmp_path):
        trace = TinyTrace().kernel("a", 0, 10, device=1).kernel("a", 10, 20, device=1)
        for device in (0, 2, 3, 4, 5):
            trace.kernel("stray", 5, 8, device=device)
        trace.top["distributedInfo"] = {"rank": 1, "world_size": 8}
        (note,) = read(trace, tmp_path).meta.notes
        assert note.text.startswith(
            "the file tells rank 1, which its busiest device got, but has work of other devices"
        )
        assert "behind the ranks of the job, device 0 is rank 8, device 2 is rank 9, " in note.text
        assert "device 4 is rank 11 and 1 more;" in note.text

    def test_files_beside_each_other_say_which_tells_no_rank(self, tmp_path):
        paths = []
        for number, job in enumerate(({"rank": 4, "world_size": 8}, {"world_size": 8})):
            trace = training()
            trace.top["distributedInfo"] = job
            paths.append(trace.write(tmp_path / f"{number}.json"))
        report = cptrace.analyze(paths)
        assert [row["rank"] for row in report.rows("ranks")] == [4, 5]
        assert [note["path"] for note in report.coverage["notes"]] == [str(paths[1])]

    def test_a_trace_of_the_device_alone_has_the_process_of_its_label(self, tmp_path):
        trace = TinyTrace().kernel("k", 0, 1)
        trace.event(ph="M", name="process_labels", pid=99, tid=0, ts=0, args={"labels": "CPU"})
        trace.event(ph="M", name="process_labels", pid=0, tid=0, ts=0, args={"labels": "GPU 0"})
        assert column(read(trace, tmp_path).ranks, "pid") == [99]


class TestSyncs:
    @pytest.mark.parametrize(
        ("name", "kind"),
        [("Event Sync", "event"), ("Stream Sync", "stream"), ("Context Sync", "context"), ("Device Sync", "context"),
         ("Stream Wait Event", "stream_wait")],
    )  # fmt: skip
    def test_kinds(self, tmp_path, name, kind):
        named = TinyTrace().sync(name, 0, 10, stream=9, wait_on_cuda_event_id=3)
        assert column(read(named, tmp_path).syncs, "kind") == [kind]
        by_name = TinyTrace().span("cuda_sync", name, 0, 10, 0, 9)
        assert column(read(by_name, tmp_path).syncs, "kind") == [kind]

    @pytest.mark.parametrize(
        ("args", "kind"),
        [({}, "context"), ({"stream": 9}, "stream"), ({"wait_on_cuda_event_id": 3}, "event"),
         ({"stream": 9, "wait_on_cuda_event_id": 3}, "stream_wait"), ({"stream": 2**32 - 1}, "context")],
    )  # fmt: skip
    def test_an_unknown_kind_is_told_by_what_it_names(self, tmp_path, args, kind):
        syncs = read(TinyTrace().sync("Unknown", 0, 10, **args), tmp_path).syncs
        assert column(syncs, "kind") == [kind]
        assert column(syncs, "stream") == [9 if args.get("stream") == 9 else None]
        assert column(syncs, "event_id") == [args.get("wait_on_cuda_event_id")]

    def test_a_record_that_is_listed_wins_over_one_that_is_named(self, tmp_path):
        trace = TinyTrace().span(
            "cuda_event", "cudaEvent", 0, 1, 0, 7, event_id=4, stream=7, correlation=30, context=1
        )
        trace.span("cuda_event", "cudaEvent", 0, 1, 0, 7, event_id=5, stream=7, correlation=40, context=1)
        for stream in (8, 8):
            trace.sync(
                "Event Sync",
                5,
                9,
                wait_on_stream=stream,
                wait_on_cuda_event_record_corr_id=30,
                wait_on_cuda_event_id=4,
            )
        records = read(trace, tmp_path).event_records
        assert records[["event_sync_id", "stream", "event_id"]].values.tolist() == [[30, 7, 4], [40, 7, 5]]

    def test_an_event_recorded_before_the_trace_has_no_record(self, tmp_path):
        trace = TinyTrace().sync("Event Sync", 5, 9, wait_on_stream=-1, wait_on_cuda_event_record_corr_id=-1,
                                 wait_on_cuda_event_id=4)  # fmt: skip
        found = read(trace, tmp_path)
        assert len(found.event_records) == 0
        assert column(found.syncs, "event_sync_id") == [None]


class TestRanges:
    def test_of_operators_only_steps_and_collectives_are_kept(self, tmp_path):
        names = [
            "aten::mm", "c10d::allreduce_", "ProfilerStep#3", "aten::broadcast_to", "nccl:all_to_all", "iteration 4",
            "_c10d_functional::all_gather_into_tensor", "record_param_comms",
        ]  # fmt: skip
        trace = TinyTrace().range("aten::mm", 0, 1)
        for number, name in enumerate(names):
            trace.range(name, 10 + number, 20, cat="cpu_op")
        kept = column(read(trace, tmp_path).ranges, "name")
        assert kept == ["aten::mm", *(names[place] for place in (1, 2, 4, 5, 6))]

    def test_a_send_receive_kernel_is_the_collective_that_its_range_names(self, tmp_path):
        name = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
        trace = TinyTrace().range("nccl:all_to_all", 0, 90, tid=8).call("cudaLaunchKernel", 10, 20, 1, tid=8)
        trace.kernel(name, 100, 200, correlation=1).call("cudaLaunchKernel", 110, 120, 2, tid=8)
        trace.kernel(name, 200, 300, correlation=2)
        rows = cptrace.analyze(trace.write(tmp_path / "trace.json")).rows("collectives")
        assert {(row["kind"], row["count"]) for row in rows} == {("all_to_all", 1), ("send_recv", 1)}


class TestMeta:
    def test_times_relative_to_a_base(self, tmp_path):
        trace = training()
        trace.top |= {"baseTimeNanoseconds": 1711964646000000000, "traceName": "/tmp/t.json"}
        meta = read(trace, tmp_path).meta
        assert (meta.session_start_utc_ns, meta.trace_name) == (1711964646000000000, "/tmp/t.json")

    @pytest.mark.parametrize(("ts", "start"), [(1712867402348700, 0), (81_000_000, None)])
    def test_times_without_a_base_are_absolute_if_they_can_be(self, tmp_path, ts, start):
        trace = TinyTrace().event(ph="X", cat="kernel", name="k", pid=0, tid=7, ts=ts, dur=1)
        assert read(trace, tmp_path).meta.session_start_utc_ns == start

    def test_what_is_missing_is_said_with_how_to_record_it(self, tmp_path):
        path = TinyTrace().range("r", 0, 1).write(tmp_path / "trace.json")
        report = cptrace.analyze(path)
        assert report.coverage["missing_tables"] == [
            "kernel",
            "gpu_memcpy",
            "gpu_memset",
            "cuda_runtime",
            "cuda_sync",
        ]
        entry = next(entry for entry in report.not_applicable if entry.analysis == "account")
        assert entry.missing == ("kernel", "gpu_memcpy", "gpu_memset")
        assert "ProfilerActivity.CUDA" in entry.reason
        assert "nsys" not in entry.reason

    def test_unknown_categories_are_counted(self, tmp_path):
        trace = training()
        for category in ("hpu_op", "python_function", "hpu_op", "overhead", "gpu_user_annotation", "my own"):
            trace.span(category, "x", 0, 1, 0, 0)
        trace.event(ph="X", name="no category", ts=0, dur=1).event(
            ph="s", cat="ac2g", name="ac2g", id=4, ts=0
        )
        note = read(trace, tmp_path).meta.notes[0]
        assert (note.code, note.count) == ("unknown-categories", 4)
        assert note.text.endswith("left out: hpu_op (2), (none) (1), my own (1)")

    @pytest.mark.parametrize(
        "key", ["schemaVersion", "deviceProperties", "distributedInfo", "baseTimeNanoseconds", "traceName"]
    )
    @pytest.mark.parametrize("value", [None, 1.5, "x", [1], {"a": 1}])
    def test_other_types_on_the_top_level_count_as_missing(self, tmp_path, key, value):
        trace = training()
        trace.top[key] = value
        assert len(read(trace, tmp_path).ops) == 3


def test_a_trace_of_this_machines_own_profiler(tmp_path):
    """What the installed PyTorch writes is read; without a GPU it has ranges, and no device work."""
    torch = pytest.importorskip("torch")
    path = tmp_path / "trace.json"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with torch.profiler.record_function("step 1"):
            torch.ones(4).sum()
        profiler.step()
    profiler.export_chrome_trace(str(path))
    trace = read_trace(path)
    assert "step 1" in column(trace.ranges, "name")
    assert trace.meta.schema_version == "1"
    assert trace.meta.session_start_utc_ns > 1_600_000_000 * 10**9
    assert trace.meta.notes == ()


def test_reading_starts_without_pandas() -> None:
    code = (
        "import sys, cptrace.sources, cptrace.sources.kineto_events, cptrace.sources.kineto_text\n"
        "print(sorted({'pandas', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"


def test_a_cancelled_reading_ends(tmp_path):
    reading = start_reading(training().write(tmp_path / "trace.json.gz"))
    reading.cancel()
    reading.cancel()
    assert reading.events.cancelled() or reading.events.exception(timeout=60) is None


def test_progress_ends_at_all_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(kineto_text, "_RUN_BYTES", 200)
    seen = []
    options = ReadOptions(progress=lambda done, total: seen.append((done, total)))
    read_trace(training().write(tmp_path / "trace.json"), options)
    assert len(seen) > 2
    assert seen[-1][0] == seen[-1][1] == len(training().events)
    assert all(before[0] < after[0] for before, after in itertools.pairwise(seen))


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.text(max_size=12)
    | st.sampled_from(["}, {", '"', "},{", "\\"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
EVENTS = st.lists(
    st.fixed_dictionaries({"ph": st.just("X"), "cat": st.just("user_annotation"), "name": st.text(max_size=8)},
                      optional={"ts": st.integers(0, 10**6), "args": st.dictionaries(st.text(max_size=6), json_values),
                                "objects": st.lists(st.dictionaries(st.text(max_size=3), st.integers()), max_size=9)}),
    max_size=12,
)  # fmt: skip


@given(EVENTS, st.sampled_from(STYLES), st.integers(1, 120))
def test_runs_are_cut_between_events_and_nowhere_else(events, style, run_bytes):
    """Whatever stands inside events: objects in arrays, braces and quotes in texts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kineto_text, "_RUN_BYTES", run_bytes)
        raw = dump({"traceEvents": events}, style).encode()
        document = kineto_text._DOCUMENTS.decode(raw)
        names = [
            event.name
            for (run_, bad), _ in event_runs(document.trace_events, decode_events)
            for event in run_
            if bad == Misfits()
        ]
    assert names == [event["name"] for event in events]


@given(json_values | st.floats())
def test_as_integer_gives_integers_of_64_bits_or_nothing(value):
    number = as_integer(value)
    assert number is None or (type(number) is int and -(2**63) <= number < 2**63)
    if type(value) is int:
        assert number == (value if -(2**63) <= value < 2**63 else None)


@pytest.mark.parametrize(
    ("value", "number"),
    [(7, 7), (7.0, 7), ("7", 7), ("-1", -1), ("stream 7", 7), ("0x1F", 31), (7.5, None), ("Spans", None), (True, None),
     (None, None), (float("nan"), None), (float("inf"), None), (1e300, None), ([7], None), ("0x" + "f" * 16, None)],
)  # fmt: skip
def test_as_integer(value, number):
    assert as_integer(value) == number


def test_integers_of_several_types_in_one_run(tmp_path):
    trace = TinyTrace()
    for number, stream in enumerate((7, "8", 9.0, "stream 10", None, {"a": 1}, 2**64)):
        trace.event(ph="X", cat="kernel", name="k", pid=0, tid=3, ts=number, dur=1, args={"stream": stream})
    assert read(trace, tmp_path).ops["stream"].tolist() == [7, 8, 9, 10, 3, 3, 3]


def test_a_large_trace_is_read_in_several_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(kineto_text, "_RUN_BYTES", 1 << 16)
    path = tmp_path / "trace.json.gz"
    write_synthetic(path, 2_000, n_steps=4)
    trace = read_trace(path)
    assert (trace.ops["kind"] == "kernel").sum() == 2_000
    assert find_launches(trace.ops, trace.api_calls).is_known.all()
    assert [row["name"] for row in cptrace.analyze(path).rows("steps")] == [
        f"ProfilerStep#{i}" for i in range(4)
    ]
    document = read_document(path, lambda: True)
    assert len(list(event_runs(document.trace_events, decode_events))) > 10
    assert COMPACT in STYLES
