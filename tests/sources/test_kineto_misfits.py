"""Device work of a PyTorch profiler trace that cannot be read: refused, or left out and counted with its time."""

from __future__ import annotations

from typing import Any

import pytest

from cptrace.errors import TraceError
from cptrace.requests import ReadOptions
from cptrace.sources import read_trace
from tests.support.command_line import check_refused
from tests.support.command_line import cptrace as run
from tests.support.synthetic_kineto import STYLES, Number, TinyTrace

DEVICE = {"device": 0, "context": 1, "stream": 7}
WORK = {
    "ph": "X",
    "cat": "kernel",
    "name": "lost",
    "pid": 0,
    "tid": 7,
    "ts": 5,
    "dur": Number("1.250"),
    "args": DEVICE,
}

UNREADABLE: dict[str, dict[str, Any]] = {
    **{f"args-{value!r}": {"args": value} for value in ([DEVICE], [], "x", 7, True)},
    **{f"name-{value!r}": {"name": value} for value in ([], 7, {"a": "x"}, False)},
    **{f"ph-{value!r}": {"ph": value} for value in (None, 1, ["X"], "B", "E", "")},
    **{f"cat-{value!r}": {"cat": value} for value in (None, "", 3, ["kernel"], {})},
    "copy": {"cat": "gpu_memcpy", "args": []},
    "memset": {"cat": "gpu_memset", "name": 3},
    "capital": {"cat": "Kernel", "ph": None},
    "all": {"cat": 1, "name": 1, "ph": 1, "args": 1},
}
NO_WORK: dict[str, dict[str, Any]] = {
    "host-args": {"cat": "cuda_runtime", "args": []},
    "host-name": {"cat": "cpu_op", "name": 7},
    "annotation": {"cat": "gpu_user_annotation", "args": "x"},
    "unknown": {"cat": "kernels of mine", "args": [1]},
    "flow": {"ph": "s", "name": 7},
    "flow-of-any": {"ph": "f", "cat": 7},
    "metadata": {"ph": "M", "cat": None, "args": [1]},
    "counter": {"ph": "C", "cat": 5},
    "no-category": {"cat": None, "args": "x"},
    "no-phase": {"cat": "cuda_runtime", "ph": None, "args": []},
}


def read(trace: TinyTrace, folder, *, style: str = STYLES[0], **options: bool):
    return read_trace(trace.write(folder / "trace.json", style), ReadOptions(**options))


@pytest.mark.parametrize("name", UNREADABLE)
@pytest.mark.parametrize("style", STYLES)
def test_device_work_of_wrong_types_is_refused_or_counted(tmp_path, name, style):
    trace = TinyTrace().kernel("good", 0, 10).event(**WORK | UNREADABLE[name]).kernel("good", 10, 30)
    with pytest.raises(
        TraceError, match=r"1 of 3 device events have a .* of a wrong type; .* --drop-invalid"
    ):
        read(trace, tmp_path, style=style)
    found = read(trace, tmp_path, style=style, drop_invalid=True)
    assert found.ops["name"].tolist() == ["good", "good"]
    (note,) = found.meta.notes[:1]
    assert (note.code, note.count) == ("dropped-rows", 1)
    assert note.text.endswith(" (1.25 us of device time) were left out")


@pytest.mark.parametrize("name", NO_WORK)
def test_what_is_certainly_no_device_work_costs_nothing(tmp_path, name):
    trace = TinyTrace().kernel("good", 0, 10).event(**WORK | NO_WORK[name])
    assert read(trace, tmp_path).ops["name"].tolist() == ["good"]


def test_an_event_without_a_category_that_names_no_device_is_of_an_unknown_one(tmp_path):
    event = {key: value for key, value in WORK.items() if key not in ("cat", "args")}
    notes = read(TinyTrace().kernel("good", 0, 10).event(**event), tmp_path).meta.notes
    assert notes[0].code == "unknown-categories"


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ([{"ts": None}], "1.25 us of device time"),
        ([{"ts": -5}], "1.25 us of device time"),
        ([{"dur": None}], "how long they took is not known"),
        ([{"dur": Number("-1")}], "how long they took is not known"),
        ([{"dur": 10**18}], "how long they took is not known"),
        ([{"ts": "soon"}, {"dur": "long"}, {"ts": None, "dur": 2}], "at least 3.25 us of device time"),
        ([{"ts": 10**17}] * 3, "3.75 us of device time"),
    ],
)
def test_lost_device_time_is_said_where_it_is_known(tmp_path, bad, said):
    trace = TinyTrace().kernel("good", 0, 10)
    for fields in bad:
        trace.event(**WORK | fields)
    (note,) = read(trace, tmp_path, drop_invalid=True).meta.notes[:1]
    assert (note.count, note.text.split(" (")[1]) == (len(bad), f"{said}) were left out")


def test_every_fault_is_named_and_counted(tmp_path):
    trace = TinyTrace().kernel("good", 0, 10).kernel("nowhere", 0, 2000, device=-1)
    trace.event(**WORK | {"args": []}).event(**WORK | {"args": 7, "dur": None}).event(**WORK | {"ts": None})
    path = trace.write(tmp_path / "trace.json")
    words = (
        "4 of 5 device events cannot be used (2 have a name",
        "1 have missing",
        "1 are on a device with a negative",
    )
    check_refused(run("analyze", path), 4, str(path), *words, "--drop-invalid")
    notes = read(trace, tmp_path, drop_invalid=True).meta.notes[:3]
    assert [note.count for note in notes] == [2, 1, 1]
    assert [note.text.split(" (")[1].split(")")[0] for note in notes] == [
        "at least 1.25 us of device time", "1.25 us of device time", "2.00 us of device time",
    ]  # fmt: skip
    outcome = run("analyze", path, "--drop-invalid")
    assert (
        "device events that are on a device with a negative number (2.00 us of device time) were left out (1x)"
        in " ".join(outcome.out.split())
    )


@pytest.mark.parametrize("where", [{"device": -1}, {"device": None, "inDevice": -3}, {"device": "-1"}])
def test_a_negative_device_is_no_rank(tmp_path, where):
    trace = TinyTrace().kernel("good", 0, 10).event(**WORK | {"args": {"stream": 7, **where}})
    with pytest.raises(TraceError, match="1 of 2 device events are on a device with a negative number"):
        read(trace, tmp_path)
    ranks = read(trace, tmp_path, drop_invalid=True).ranks
    assert ranks[["rank", "device"]].values.tolist() == [[0, 0]]
