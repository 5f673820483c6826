"""A timeline for Perfetto: a process per rank, a track per stream and host thread, an arrow per launch.

pid 100 = rank 0   stream 7   flash [10  30)      stream 13   nccl [20     40)
pid 200 = rank 1   stream 7   flash [10      35)
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import cptrace
from cptrace.exports import find_export
from tests.support.shared_traces import ROOT, nsys_traces
from tests.support.tiny_export import TinyExport

Event = dict[str, Any]


@pytest.fixture
def timeline(tmp_path: Path) -> list[Event]:
    export = TinyExport().range("step", 0, 9)
    export.kernel("flash_fwd_kernel", 10, 30, launch=2).kernel(
        "ncclDevKernel_SendRecv", 20, 40, stream=13, launch=4
    )
    export.kernel("flash_fwd_kernel", 10, 35, pid=200, device=1, launch=3)
    return written(export.write(tmp_path / "tiny.sqlite"), tmp_path)


def written(path: Path, folder: Path) -> list[Event]:
    target = folder / "timeline.json"
    find_export("perfetto").write(cptrace.open_trace(path), target)
    document = json.loads(target.read_text(), parse_float=str)
    assert document["otherData"]["device_kind"] in ("cuda", "cpu-emulated")
    return document["traceEvents"]


def names(timeline: list[Event], key: str) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in timeline if e["ph"] == "M" and e["name"] == key}


def test_processes_are_ranks_and_tracks_are_streams_and_threads(timeline: list[Event]) -> None:
    assert list(names(timeline, "process_name").values()) == [
        "rank 0 (device 0, pid 100)",
        "rank 1 (device 1, pid 200)",
    ]
    tracks = names(timeline, "thread_name")
    assert sorted(text.split(" (")[0] for (pid, _), text in tracks.items() if pid == 0) == [
        "host thread 0",
        "stream 13",
        "stream 7",
    ]


def test_ops_lie_on_their_streams_with_role_and_exact_time(timeline: list[Event]) -> None:
    tracks = names(timeline, "thread_name")
    ops = [e for e in timeline if e["ph"] == "X" and e["cat"] in ("compute", "comm")]
    rows = sorted((e["pid"], tracks[e["pid"], e["tid"]], e["cat"], e["ts"], e["dur"]) for e in ops)
    assert rows == [
        (0, "stream 13 (context 1)", "comm", "0.020", "0.020"),
        (0, "stream 7 (context 1)", "compute", "0.010", "0.020"),
        (1, "stream 7 (context 1)", "compute", "0.010", "0.025"),
    ]
    assert {e["args"]["end_ns"] for e in ops} == {30, 35, 40}


def test_every_launch_has_an_arrow_that_begins_in_its_call_and_ends_at_its_op(timeline: list[Event]) -> None:
    arrows = {e["id"]: e for e in timeline if e["ph"] == "s"}
    ends = {e["id"]: e for e in timeline if e["ph"] == "f"}
    assert arrows.keys() == ends.keys()
    assert sorted((arrows[key]["ts"], ends[key]["ts"]) for key in arrows) == [
        ("0.002", "0.010"),
        ("0.003", "0.010"),
        ("0.004", "0.020"),
    ]


SOURCES = sorted((ROOT / "samples").glob("*.sqlite"))[:2] + list(nsys_traces())


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_nothing_is_lost_of_a_real_trace(path: Path, tmp_path: Path) -> None:
    trace = cptrace.open_trace(path)
    counts = Counter(event["ph"] for event in written(path, tmp_path))
    n_closed = int(trace.ranges["end_ns"].notna().sum())
    assert counts["X"] == len(trace.ops) + len(trace.api_calls) + n_closed
    assert counts["s"] == counts["f"]
