"""The report's JSON: complete, free of NaN, the same bytes for the same input, and readable again."""

from __future__ import annotations

import json
import math

import pytest

import cptrace
from cptrace.errors import SourceError, UsageError
from cptrace.outcome import NotApplicable
from cptrace.report import SCHEMA, SECTIONS, Report
from tests.support.shared_traces import nsys_traces
from tests.support.tiny_export import TinyExport

KEYS = {
    "inputs": {"path", "format", "tool_version", "schema_version", "device_kind", "clock"},
    "ranks": {
        "rank", "device", "pid", "window_ns", "compute_ns", "comm_ns", "overlapped_comm_ns", "exposed_comm_ns",
        "exposed_copy_ns", "idle_ns", "comm_share", "exposed_comm_share", "overlap", "unclassified_ns", "transfer_ns",
        "peer_wait_ns", "peak_memory_bytes", "sm_active", "tensor_active",
    },
    "steps": {
        "rank", "step", "name", "window_ns", "compute_ns", "comm_ns", "overlapped_comm_ns", "exposed_comm_ns",
        "exposed_copy_ns", "idle_ns", "comm_share", "exposed_comm_share", "overlap",
    },
    "collectives": {"rank", "kind", "name", "count", "total_ns", "overlap", "bytes", "bytes_per_s"},
    "traffic": {
        "rank", "part", "pass", "layer", "n_steps", "n_messages", "bytes", "expected_n_messages", "expected_bytes",
        "difference_bytes", "by_tensor",
    },
    "messages": {"rank", "kind", "bytes", "count", "median_ns", "transfer_ns", "bytes_per_s"},
    "peer_waits": {"rank", "peer", "count", "wait_ns"},
    "schemes": {"path", "scheme", "basis", "confidence", "evidence"},
    "start_causes": {"rank", "role", "cause", "count", "exposed_ns"},
    "findings": {
        "code", "form", "severity", "summary", "rank", "step", "value", "unit", "recoverable_ns", "predicted_step_ns",
        "confidence", "evidence", "advice",
    },
    "not_applicable": {"analysis", "reason", "missing"},
}  # fmt: skip
"""What `cptrace.report/1` promises; more may be there, never less."""


def tiny() -> TinyExport:
    """
    host      step [0 ............ 10)
    stream 7       flash [10 ==== 30)            copy [40 = 45)
    stream 13           SendRecv [20 ==== 40)    mystery [45 = 50)
    """
    export = TinyExport().domain(1, "cptrace").range("step", 0, 10, domain=1, payload=0)
    export.kernel("void flash_fwd_kernel<T>(P)", 10, 30, launch=2)
    export.range("send_recv pass=forward layer=0 hop=0 bytes=64 peers=1", 3, 6, domain=1)
    export.kernel("ncclDevKernel_SendRecv(ncclArgs)", 20, 40, stream=13, launch=4)
    return export.copy(40, 45, kind=1, size=8, launch=7).kernel("mystery", 45, 50, stream=13, launch=8)


GOLDEN = {
    "schema": "cptrace.report/1",
    "inputs": [
        {
            "path": "tiny.sqlite", "format": "nsys_sqlite", "tool_version": "2026.2.1.210", "schema_version": "3.25.0",
            "device_kind": "cuda", "clock": None, "session_start_utc_ns": None, "run": None,
        }
    ],
    "ranks": [
        {
            "rank": 0, "device": 0, "pid": 100, "window_basis": "steps", "window_start_ns": 10, "window_end_ns": 50,
            "window_ns": 40, "compute_ns": 25, "comm_ns": 20, "overlapped_comm_ns": 10, "exposed_comm_ns": 10,
            "exposed_copy_ns": 5, "idle_ns": 0, "unclassified_ns": 5, "transfer_ns": None, "between_steps_ns": 0,
            "peak_memory_bytes": None, "sm_active": None, "tensor_active": None,
            "peer_wait_ns": None, "comm_share": 0.5, "exposed_comm_share": 0.25, "overlap": 0.5,
        }
    ],
    "steps": [
        {
            "rank": 0, "step": 0, "name": "step", "start_ns": 10, "end_ns": 50, "n_ops": 4, "window_ns": 40,
            "compute_ns": 25, "comm_ns": 20, "overlapped_comm_ns": 10, "exposed_comm_ns": 10, "exposed_copy_ns": 5,
            "idle_ns": 0, "unclassified_ns": 5, "transfer_ns": None, "peer_wait_ns": None, "comm_share": 0.5,
            "exposed_comm_share": 0.25, "overlap": 0.5,
        }
    ],
    "collectives": [
        {
            "rank": 0, "kind": "send_recv", "name": "ncclDevKernel_SendRecv(ncclArgs)", "count": 1, "total_ns": 20,
            "busy_ns": 20, "overlapped_ns": 10, "exposed_ns": 10, "bytes": 64, "overlap": 0.5, "bytes_per_s": 3.2e9,
        }
    ],
    "streams": [
        {
            "rank": 0, "context": 1, "stream": 7, "n_ops": 2, "busy_ns": 25, "comm_ns": 0, "compute_ns": 20,
            "copy_ns": 5, "other_ns": 0,
        },
        {
            "rank": 0, "context": 1, "stream": 13, "n_ops": 2, "busy_ns": 25, "comm_ns": 20, "compute_ns": 5,
            "copy_ns": 0, "other_ns": 0,
        },
    ],
    "kernels": [
        {
            "rank": 0, "kind": "kernel", "name": "ncclDevKernel_SendRecv(ncclArgs)", "role": "comm", "rule": "nccl",
            "count": 1, "total_ns": 20, "longest_ns": 20,
        },
        {
            "rank": 0, "kind": "kernel", "name": "void flash_fwd_kernel<T>(P)", "role": "compute",
            "rule": "attention", "count": 1, "total_ns": 20, "longest_ns": 20,
        },
        {
            "rank": 0, "kind": "kernel", "name": "mystery", "role": "compute", "rule": "fallback", "count": 1,
            "total_ns": 5, "longest_ns": 5,
        },
        {
            "rank": 0, "kind": "memcpy", "name": "memcpy HtoD", "role": "copy", "rule": "copy", "count": 1,
            "total_ns": 5, "longest_ns": 5,
        },
    ],
    "traffic": [],
    "messages": [
        {
            "rank": 0, "kind": "send_recv", "bytes": 64, "count": 1, "median_ns": 20, "transfer_ns": None,
            "bytes_per_s": 64e9 / 20,
        },
    ],
    "peer_waits": [],
    "schemes": [
        {
            "path": "tiny.sqlite", "scheme": "unknown", "basis": "pattern", "confidence": "low",
            "evidence": "no known pattern fits 80 % of 1 calls; typically 1 attention + 1 send_recv",
        },
    ],
    "start_causes": [
        {"rank": 0, "role": "comm", "cause": "launch", "count": 1, "exposed_ns": 10, "median_residual_ns": 15},
        {"rank": 0, "role": "attention", "cause": "launch", "count": 1, "exposed_ns": 0, "median_residual_ns": 7},
    ],
    "findings": [
        {
            "code": "low-coverage", "form": "unclassified", "severity": "warning",
            "summary": "12.5 % of the time runs kernels that no rule knows; they count as compute, and hide"
            " communication if they are communication",
            "rank": None, "step": None, "value": 0.125, "unit": "fraction", "recoverable_ns": None,
            "predicted_step_ns": None, "after": [], "confidence": "high", "evidence": [],
            "advice": "Look at coverage.unclassified for their names. If one of them communicates, overlap and exposed"
            " time are wrong by what it takes.",
        },
    ],
    "not_applicable": [
        {
            "analysis": "peer_wait",
            "reason": "it needs the communication of at least two ranks on one clock, and this file has that of one,"
            " so predictions take the other ranks as recorded and are less sure; a report of a whole node has it (nsys"
            " profile around the launcher, not around each rank), or analyze the reports of all ranks together",
            "missing": [],
        },
        {
            "analysis": "traffic",
            "reason": "bytes sent are compared with a scheme's formula, and this trace does not say which scheme ran;"
            " traces of `cptrace run` do",
            "missing": [],
        },
        {
            "analysis": "missing-event (race), shared-stream, single-buffer, shared-communicator, required-order",
            "reason": "which order is needed cannot be told, because no context-parallel scheme was recognised: no"
            " known pattern fits 80 % of 1 calls; typically 1 attention + 1 send_recv; mark ops with ranges of the"
            " domain cptrace (cptrace/labels.py) to name it",
            "missing": [],
        },
    ],
    "coverage": {
        "n_ops": 4, "n_launches_missing": 0, "unclassified_ns": 5,
        "unclassified": [{"name": "mystery", "count": 1, "total_ns": 5}],
        "peers": [],
        "missing_tables": [
            "CUPTI_ACTIVITY_KIND_MEMSET", "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "CUPTI_ACTIVITY_KIND_CUDA_EVENT",
            "TARGET_INFO_GPU",
        ],
        "notes": [],
        "clocks": [],
        "dependencies": [
            {
                "path": "tiny.sqlite", "n_waits": 0, "n_waits_paired": 0, "n_event_edges": 0, "n_blocking_calls": 0,
                "n_violations": 0, "clock_tolerance_ns": 2000, "large_residual_ns": 20000,
            },
        ],
    },
}  # fmt: skip


def everything(tmp_path):
    """Return a report with a row in every section that analyses fill, and something that could not be told."""
    export = tiny().graph(60, 70).add("DIAGNOSTIC_EVENT", severity=3, text="lost events")
    return cptrace.analyze(export.write(tmp_path / "t.sqlite"))


def numbers(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, float):
        yield value


def test_golden(tmp_path, monkeypatch):
    """The whole report of one tiny trace; both ways, so that neither a lost nor a new key goes unseen."""
    tiny().write(tmp_path / "tiny.sqlite")
    monkeypatch.chdir(tmp_path)
    found = json.loads(cptrace.analyze("tiny.sqlite").to_json())
    for section, expected in GOLDEN.items():
        assert found.get(section) == expected, section
    assert found.keys() == GOLDEN.keys()


def test_order_of_keys(tmp_path):
    """Readers compare reports as text: sections and fields keep their places."""
    document = json.loads(everything(tmp_path).to_json())
    assert list(document) == ["schema", "inputs", *SECTIONS, "not_applicable", "coverage"]
    for section in ("inputs", "ranks", "steps", "collectives", "streams", "kernels"):
        assert list(document[section][0])[:2] == list(GOLDEN[section][0])[:2]


def test_nan_is_refused():
    report = Report(inputs=({"path": math.nan},))
    with pytest.raises(ValueError, match="JSON compliant"):
        report.to_json()


@pytest.mark.parametrize("section", KEYS)
def test_promised_keys_are_there(section, tmp_path):
    document = json.loads(everything(tmp_path).to_json())
    assert document["schema"] == SCHEMA
    assert section in document
    for row in document[section]:
        assert row.keys() >= KEYS[section]


@pytest.mark.parametrize("path", nsys_traces(), ids=lambda path: path.name)
def test_shared_traces_give_strict_json_of_the_same_bytes(path):
    text = cptrace.analyze(path).to_json()
    assert cptrace.analyze(path).to_json() == text

    def refuse(word):
        raise AssertionError(word)

    document = json.loads(text, parse_constant=refuse)
    assert all(math.isfinite(number) for number in numbers(document))
    assert text.endswith("}\n")
    for section, keys in KEYS.items():
        assert all(row.keys() >= keys for row in document[section])


def test_rows_hold_plain_values(tmp_path):
    """No numpy, no pandas, no NaN: what a program gets is what JSON has."""
    report = everything(tmp_path)
    for section in SECTIONS:
        assert {type(value) for row in report.rows(section) for value in leaves(row)} <= {
            int, float, str, bool, type(None),
        }  # fmt: skip


def leaves(value):
    """Yield what a row holds, also what its lists and mappings do."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from leaves(item)
    else:
        yield value


@pytest.mark.parametrize("path", nsys_traces(), ids=lambda path: path.name)
def test_round_trip(path):
    report = cptrace.analyze(path)
    again = Report.from_json(report.to_json())
    assert again.to_json() == report.to_json()
    assert again.not_applicable == report.not_applicable
    for section in SECTIONS:
        assert again.rows(section) == report.rows(section)


def test_an_empty_report_round_trips():
    report = Report(inputs=(), not_applicable=(NotApplicable("a", "b", ("c",)),))
    assert Report.from_json(report.to_json()).to_json() == report.to_json()
    assert report.rows("ranks") == ()
    assert report.frame("ranks").empty


def test_additions_are_ignored_and_sections_may_lack(tmp_path):
    document = json.loads(everything(tmp_path).to_json())
    del document["streams"]
    document["new_section"] = [1]
    document["ranks"][0]["new_key"] = 5
    report = Report.from_json(json.dumps(document))
    assert report.rows("streams") == ()
    assert report.rows("ranks")[0]["new_key"] == 5


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "5", "null", "{}", '{"schema": "cptrace.report/2"}', '{"schema": null}', '"cptrace.report/1"',
        '{"schema": "cptrace.report/1"}', '{"schema": "cptrace.report/1", "inputs": 5, "not_applicable": []}',
        '{"schema": "cptrace.report/1", "inputs": [], "not_applicable": [5], "coverage": {}}',
        '{"schema": "cptrace.report/1", "inputs": [], "not_applicable": [{}], "coverage": {}}',
        '{"schema": "cptrace.report/1", "inputs": [], "not_applicable": [], "coverage": {"x": NaN}}',
        "[" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_report_is_refused(text):
    with pytest.raises(SourceError, match="not a report"):
        Report.from_json(text)


@pytest.mark.parametrize("section", ["inputs", "ranks", "steps", "collectives", "kernels", "findings"])
@pytest.mark.parametrize("rows", ["x", 5, None, [5], [None], ["x"], [{}], {"a": 1}])
def test_sections_that_are_no_rows_are_refused(section, rows, tmp_path):
    document = {**json.loads(everything(tmp_path).to_json()), section: rows}
    with pytest.raises(SourceError, match=f"not a report.*{section}"):
        Report.from_json(json.dumps(document))


def test_what_comparisons_read_is_checked(tmp_path):
    """Take each value that is read out of a saved report, or damage it: refused, or compared without an exception."""
    saved = json.loads(everything(tmp_path).to_json())
    for section in ("inputs", "ranks", "steps", "collectives", "kernels", "findings"):
        for name in saved[section][0] if saved[section] else ():
            row = {key: value for key, value in saved[section][0].items() if key != name}
            for damaged in (row, {**row, name: "x"} if name.endswith("_ns") else row):
                document = {**saved, section: [damaged, *saved[section][1:]]}
                try:
                    report = Report.from_json(json.dumps(document))
                except SourceError:
                    continue
                assert cptrace.compare([report, report]).metrics


def test_frame_has_the_rows(tmp_path):
    report = everything(tmp_path)
    frame = report.frame("kernels")
    assert len(frame) == len(report.rows("kernels"))
    assert list(frame.columns) == list(report.rows("kernels")[0])


@pytest.mark.parametrize("name", ["not_applicable", "coverage", "inputs", "timeline", "rank", "", "Ranks"])
@pytest.mark.parametrize("read", [Report.rows, Report.frame], ids=["rows", "frame"])
def test_a_section_that_is_not_there_is_refused_with_those_that_are(read, name):
    with pytest.raises(UsageError) as refused:
        read(Report(()), name)
    message = str(refused.value)
    assert f"no section {name!r}" in message
    assert ", ".join(SECTIONS) in message
    assert "inputs, not_applicable, coverage and timeline are attributes" in message


def test_names_of_any_script_survive_json(tmp_path):
    names = ["日本 😀", 'a\nb\t"c\\', "\x1b[31mred", "‮rtl", "x" * 10_000, "<b>&amp;</b>", "[red]x[/red]"]
    export = TinyExport()
    for number, name in enumerate(names):
        export.kernel(name, 10 * number, 10 * number + 5)
    rows = json.loads(cptrace.analyze(export.write(tmp_path / "t.sqlite")).to_json())["kernels"]
    assert sorted(row["name"] for row in rows) == sorted(names)
