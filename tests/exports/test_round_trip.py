"""What is written as a PyTorch profiler trace says the same, to the nanosecond, when it is read again."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import cptrace
from cptrace.exports import find_export
from cptrace.report import Report
from cptrace.requests import AnalyzeOptions, ScopeRequest, parse_window
from cptrace.trace import Trace
from tests.support.shared_traces import ROOT, nsys_traces
from tests.support.tiny_export import TinyExport

SAMPLES = sorted((ROOT / "samples").glob("*.sqlite"))
# The tables of a trace, without what is named differently from source to source.
TABLES = {
    "ops": [
        "start_ns",
        "end_ns",
        "rank",
        "context",
        "stream",
        "correlation_id",
        "kind",
        "bytes",
        "is_peer_copy",
    ],
    "api_calls": ["start_ns", "end_ns", "correlation_id", "name"],
    "syncs": ["start_ns", "end_ns", "context", "kind", "stream", "event_id", "correlation_id"],
    "event_records": ["context", "stream", "event_id", "correlation_id"],
    "ranges": ["start_ns", "end_ns", "name", "domain", "payload"],
    "ranks": ["rank", "device_name", "is_recorded"],
}


def traces() -> list[Any]:
    """Return test parameters: all samples, and the public traces where they are."""
    params = [pytest.param(path, id=path.name) for path in (*SAMPLES, *nsys_traces())]
    return params or [pytest.param(None, marks=pytest.mark.skip(reason="there is no trace"))]


def exported(path: Path, folder: Path, name: str = "trace.json") -> Path:
    """Return the Kineto export of a file."""
    target = folder / name
    find_export("kineto").write(cptrace.open_trace(path), target)
    return target


def account(report: Report, section: str) -> list[dict[str, Any]]:
    """Return a section's rows without the process ids, which two formats name differently."""
    return [
        {key: value for key, value in row.items() if key not in ("pid", "device")}
        for row in report.rows(section)
    ]


@pytest.mark.parametrize("window", [None, "all"])
@pytest.mark.parametrize("path", traces())
def test_the_account_is_the_same(path: Path, window: str | None, tmp_path: Path) -> None:
    options = AnalyzeOptions(ScopeRequest(window=window and parse_window(window)))
    before, after = cptrace.analyze(path, options), cptrace.analyze(exported(path, tmp_path), options)
    for section in ("ranks", "steps", "streams"):
        assert account(before, section) == account(after, section), section
    assert before.coverage["peers"] == after.coverage["peers"]
    for key in ("device_kind", "clock", "run"):
        assert before.inputs[0][key] == after.inputs[0][key]


def rows_of(trace: Trace, table: str) -> list[list[str]]:
    frame = getattr(trace, table)[TABLES[table]]
    text = pd.DataFrame({name: frame[name].astype("string").fillna("-") for name in frame.columns})
    return sorted(text.to_numpy().tolist())


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_every_table_of_a_run_comes_back(path: Path, table: str, tmp_path: Path) -> None:
    before, after = cptrace.open_trace(path), cptrace.open_trace(exported(path, tmp_path))
    assert rows_of(before, table) == rows_of(after, table)


def test_a_wait_still_finds_its_record(tmp_path: Path) -> None:
    after = cptrace.open_trace(exported(SAMPLES[0], tmp_path))
    pairs = []
    for trace in (cptrace.open_trace(SAMPLES[0]), after):
        waits = trace.syncs[trace.syncs["kind"] == "stream_wait"]
        ranks = trace.ranks.set_index("process")["rank"]
        joined = waits.merge(trace.event_records, on=["process", "event_sync_id"], suffixes=("", "_record"))
        columns = [joined["process"].map(ranks), joined["correlation_id"], joined["correlation_id_record"]]
        pairs.append(sorted(zip(*(column.tolist() for column in columns), strict=True)))
    assert pairs[0] == pairs[1]
    assert pairs[0]


def test_two_ranks_on_one_device_ordinal_stay_two(tmp_path: Path) -> None:
    """Each process sees its GPU as device 0.

    pid 100   compute [10    30)
    pid 200   nccl        [20    50)
    """
    export = TinyExport().kernel("flash_fwd_kernel", 10, 30, launch=1, pid=100, correlation=7)
    export.kernel("ncclDevKernel_SendRecv", 20, 50, launch=2, pid=200, correlation=7)
    path = export.write(tmp_path / "one-ordinal.sqlite")
    after = cptrace.open_trace(exported(path, tmp_path))
    assert after.ops[["rank", "start_ns", "end_ns"]].to_numpy().tolist() == [[0, 10, 30], [1, 20, 50]]
    assert after.ranks["pid"].tolist() == [100, 200]


def test_names_that_need_escapes_and_negative_times_survive(tmp_path: Path) -> None:
    name = 'void f<"a\\b", λ>(int)'
    export = TinyExport().kernel(name, -20, 30, launch=-30).range("läbel \n x", -40, 50)
    export.add("META_DATA_EXPORT", name="EXPORT_CONFIG_TIME_SHIFT", value="1")
    before = cptrace.open_trace(export.write(tmp_path / "odd.sqlite"))
    after = cptrace.open_trace(exported(tmp_path / "odd.sqlite", tmp_path))
    assert after.ops["name"].tolist() == [name]
    assert after.ranges["name"].tolist() == ["läbel \n x"]
    assert after.ops["start_ns"].tolist() == [-20 + 40]
    assert (after.meta.session_start_utc_ns or 0) == (before.meta.session_start_utc_ns or 0) - 40


def test_copies_are_called_as_kineto_calls_them(tmp_path: Path) -> None:
    export = TinyExport().copy(1, 2, kind=1, launch=0).copy(3, 4, kind=10, launch=0).memset(5, 6, launch=0)
    document = json.loads(exported(export.write(tmp_path / "copies.sqlite"), tmp_path).read_text())
    names = [event["name"] for event in document["traceEvents"] if event.get("cat", "").startswith("gpu_mem")]
    assert names == ["Memcpy HtoD (Pageable -> Device)", "Memcpy PtoP (Device -> Device)", "Memset (Device)"]


def test_times_are_exact_decimals_and_flows_tie_calls_to_work(tmp_path: Path) -> None:
    export = TinyExport().kernel("k", 1_000_001, 1_000_003, launch=999_999)
    document = json.loads(
        exported(export.write(tmp_path / "t.sqlite"), tmp_path).read_text(), parse_float=str
    )
    (kernel,) = (event for event in document["traceEvents"] if event.get("cat") == "kernel")
    assert (kernel["ts"], kernel["dur"]) == ("1000.001", "0.002")
    start, end = (event for event in document["traceEvents"] if event.get("cat") == "ac2g")
    assert (start["ph"], end["ph"], start["ts"], end["ts"]) == ("s", "f", "999.999", "1000.001")
    assert start["id"] == end["id"]


def test_shuffled_rows_give_the_same_bytes_and_gzip_holds_them(tmp_path: Path) -> None:
    export = (
        TinyExport().kernel("a", 1, 5, launch=0).kernel("b", 1, 5, stream=9, launch=0).range("step", 0, 9)
    )
    texts = []
    for number in range(3):
        path = export.write(tmp_path / "t.sqlite", order=random.Random(number))
        texts.append(exported(path, tmp_path).read_bytes())
        path.unlink()
    assert texts[0] == texts[1] == texts[2]
    path = export.write(tmp_path / "t.sqlite")
    assert gzip.decompress(exported(path, tmp_path, "trace.json.gz").read_bytes()) == texts[0]


def test_one_rank_is_a_trace_as_a_job_writes_it(tmp_path: Path) -> None:
    from cptrace.exports.parts import of_rank

    target = tmp_path / "rank2.json"
    find_export("kineto").write(of_rank(cptrace.open_trace(SAMPLES[0]), 2), target)
    assert json.loads(target.read_text())["distributedInfo"]["rank"] == 2
    after = cptrace.analyze(target)
    (row,) = after.rows("ranks")
    before = next(row for row in cptrace.analyze(SAMPLES[0]).rows("ranks") if row["rank"] == 2)
    assert row["rank"] == 2
    assert [row[name] for name in ("window_ns", "compute_ns", "comm_ns", "idle_ns")] == [
        before[name] for name in ("window_ns", "compute_ns", "comm_ns", "idle_ns")
    ]
