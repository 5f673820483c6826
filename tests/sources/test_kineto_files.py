"""PyTorch profiler traces that are damaged, odd or something else: refused in one line, or read and counted."""

from __future__ import annotations

import gzip
import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cptrace
from cptrace.errors import SourceError
from cptrace.sources import read_trace
from tests.support.command_line import check_refused
from tests.support.command_line import cptrace as run
from tests.support.synthetic_kineto import STYLES, TinyTrace, write_synthetic


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Bytes of a whole trace of some hundred events."""
    path = tmp_path_factory.mktemp("good") / "good.json"
    write_synthetic(path, 400, n_steps=2)
    return path.read_bytes()


def write(folder, content: bytes, name="trace.json"):
    path = folder / name
    path.write_bytes(content)
    return path


def refused(path, *words):
    """Check that a file is refused as such, in one line, and left as it was."""
    before = path.read_bytes()
    check_refused(run("analyze", path, "--format", "json"), 3, str(path), *words)
    assert path.read_bytes() == before
    assert [other.name for other in path.parent.iterdir()] == [path.name]


TRACE = TinyTrace().kernel("nvjet", 0, 10, launch=1).text().encode()

WRONG = {
    "empty-object": (b"{}", "without an array traceEvents"),
    "no-events": (b'{"schemaVersion": 1, "deviceProperties": []}', "without an array traceEvents"),
    "events-are-null": (b'{"traceEvents": null}', "without an array traceEvents"),
    "events-are-an-object": (b'{"traceEvents": {"ph": "X"}}', "without an array traceEvents"),
    "events-are-text": (b'{"traceEvents": "[]"}', "without an array traceEvents"),
    "bare-array": (b'[{"ph": "X"}]', "not a known trace format"),
    "text": (b"start,end\n1,2\n", "not a known trace format"),
    "utf-16": (TRACE.decode().encode("utf-16"), "not a known trace format"),
    "blanks": (b" " * 5000, "no JSON object"),
    "trailing-text": (TRACE + b"x", "damaged JSON"),
    "two-traces": (TRACE + TRACE, "damaged JSON"),
    "single-quotes": (TRACE.replace(b'"', b"'"), "damaged JSON"),
    "missing-comma": (TRACE.replace(b'"cat"', b' "x" "cat"', 1), "damaged JSON"),
    "trailing-comma": (TRACE.rstrip(b"}]\n ") + b"}},]}", "damaged JSON"),
    "zeroed-tail": (TRACE[:-90] + bytes(90), "damaged JSON"),
    "deep": (b'{"traceEvents": ' + b"[" * 200_000, "damaged JSON"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_trace_is_refused(tmp_path, name):
    content, words = WRONG[name]
    refused(write(tmp_path, content), words)


@pytest.mark.parametrize("name", [name for name, (_, words) in WRONG.items() if "known" not in words])
def test_what_is_no_trace_is_refused_packed_too(tmp_path, name):
    content, words = WRONG[name]
    refused(write(tmp_path, gzip.compress(content), "trace.json.gz"), words)


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.99])
def test_a_file_that_is_cut_short_is_refused(tmp_path, good, fraction):
    refused(write(tmp_path, good[: int(len(good) * fraction)]), "cut short", "copy it again")


@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.5, 0.99, 0.9999])
def test_a_packed_file_that_is_cut_short_is_refused(tmp_path, good, fraction):
    packed = gzip.compress(good)
    refused(
        write(tmp_path, packed[: int(len(packed) * fraction)], "trace.json.gz"), "cut short", "copy it again"
    )


def test_a_packed_file_with_a_damaged_middle_is_refused(tmp_path, good):
    packed = bytearray(gzip.compress(good))
    middle = len(packed) // 2
    packed[middle : middle + 50] = bytes(50)
    refused(write(tmp_path, bytes(packed), "trace.json.gz"), "damaged")


@pytest.mark.parametrize("content", [b"\x1f\x8b", b"\x1f\x8b" + bytes(30), b"\x1f\x8b\x08" + b"\xff" * 40])
def test_the_beginning_of_a_packed_file_alone_is_refused(tmp_path, content):
    refused(write(tmp_path, content, "trace.json.gz"))


def test_a_packed_archive_of_other_files_is_refused(tmp_path):
    refused(write(tmp_path, gzip.compress(b"folder/file\0" * 900), "traces.tar.gz"), "no JSON object")


def test_a_truncated_trace_inside_a_whole_packed_file_is_refused(tmp_path, good):
    refused(write(tmp_path, gzip.compress(good[:-200]), "trace.json.gz"), "cut short after")


def test_packed_files_of_several_members_are_read(tmp_path):
    half = len(TRACE) // 2
    path = write(tmp_path, gzip.compress(TRACE[:half]) + gzip.compress(TRACE[half:]), "trace.json.gz")
    assert len(read_trace(path).ops) == 1


@given(st.data(), st.sampled_from(STYLES))
def test_no_part_of_a_trace_passes_for_a_whole_one(tmp_path_factory, data, style):
    content = TinyTrace().kernel("a}, {", 0, 10).kernel("b", 3, 4, launch=1).text(style).encode()
    stop = data.draw(st.integers(1, len(content.rstrip()) - 1))
    path = write(tmp_path_factory.mktemp("part"), content[:stop])
    with pytest.raises(SourceError):
        read_trace(path)


def test_a_name_that_is_not_utf8_does_not_cost_the_file(tmp_path):
    content = TinyTrace().kernel("k_AROUND", 0, 10, launch=1).kernel("plain", 10, 20).text().encode()
    path = write(tmp_path, content.replace(b"AROUND", b"\xff\xfe"))
    trace = read_trace(path)
    assert trace.ops["name"].tolist() == ["k_\ufffd\ufffd", "plain"]
    assert [note.code for note in trace.meta.notes] == ["counted-ranks"]
    assert json.loads(run("analyze", path, "--format", "json").out)["kernels"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (r"a\ud800z", "a\ufffdz"), (r"a\uDC00", "a\ufffd"), (r"\ud83d\ude00", "\U0001f600"),
        (r"\ud83d\ude00\ud83d", "\U0001f600\ufffd"), (r"\u00e9\\\"\/\t", 'é\\"/\t'),
        (r"C:\Users\q\new", "C:\\Users\\q\new"),
        ("one\ntwo\x01", "one two "), (r"\\ud800", "\\ud800"), (r"\\ud800 \q", "\\ud800 \\q"),
    ],
)  # fmt: skip
def test_escapes_in_names(tmp_path, text, name):
    content = TinyTrace().kernel("NAME", 0, 10).kernel("plain", 10, 20).text().encode()
    trace = read_trace(write(tmp_path, content.replace(b"NAME", text.encode())))
    assert trace.ops["name"].tolist() == [name, "plain"]


def test_metadata_that_is_not_utf8_does_not_cost_the_file(tmp_path):
    trace = TinyTrace().kernel("k", 0, 10)
    trace.top |= {"traceName": "/tmp/AROUND.json", "deviceProperties": [{"id": 0, "name": "GPU AROUND"}]}
    found = read_trace(write(tmp_path, trace.text().encode().replace(b"AROUND", b"\xe9")))
    assert found.meta.trace_name == "/tmp/\ufffd.json"
    assert found.ranks["device_name"].tolist() == ["GPU \ufffd"]


@pytest.mark.parametrize("word", ["inf", "-inf", "nan", "-nan", "NaN", "Infinity", "-Infinity", "N/A"])
@pytest.mark.parametrize("style", STYLES)
def test_words_that_old_kineto_wrote_for_numbers_are_passed_over(tmp_path, word, style):
    trace = TinyTrace().kernel('x": inf, "y', 0, 10, **{"blocks per SM": 12345678, "grid": [1, 1, 1]})
    trace.kernel("k", 20, 30, **{"warps per SM": 12345678})
    content = trace.text(style).encode().replace(b"12345678", word.encode())
    found = read_trace(write(tmp_path, content))
    assert found.ops["end_ns"].tolist() == [10, 30]


@pytest.mark.parametrize("bad", ["null", "7", '"x"', "[]", '[{"ph": "X"}]', '{"ph": 1}', '{"args": "x"}'])
def test_items_that_are_no_events_are_counted(tmp_path, bad):
    content = TinyTrace().kernel("k", 0, 10).kernel("l", 10, 20).text().encode()
    path = write(tmp_path, content.replace(b'"traceEvents": [', b'"traceEvents": [' + bad.encode() + b", "))
    trace = read_trace(path)
    assert trace.ops["name"].tolist() == ["k", "l"]
    assert [(note.code, note.count) for note in trace.meta.notes[:-1]] == [("dropped-rows", 1)]


@pytest.mark.parametrize("events", ["[]", "[ ]", "[\n\n]", '[{"ph": "M"}]', "[{}]"])
def test_a_trace_without_device_work_says_so(tmp_path, events):
    path = write(tmp_path, f'{{"traceEvents": {events}}}'.encode())
    report = cptrace.analyze(path)
    assert report.rows("ranks") == ()
    reasons = {entry.analysis: entry.reason for entry in report.not_applicable}
    assert "ProfilerActivity.CUDA" in reasons["account"]


def test_the_input_is_left_alone(tmp_path, good):
    for path in (write(tmp_path, good), write(tmp_path, gzip.compress(good), "trace.json.gz")):
        before, changed = path.read_bytes(), path.stat().st_mtime_ns
        cptrace.analyze(path)
        assert (path.read_bytes(), path.stat().st_mtime_ns) == (before, changed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.json", "trace.json.gz"]


def test_a_file_without_write_permission_is_read(tmp_path):
    path = write(tmp_path, TRACE)
    path.chmod(0o400)
    assert len(read_trace(path).ops) == 1


def test_a_name_that_is_not_utf8_can_be_a_files(tmp_path):
    path = write(tmp_path, TRACE, b"trace-\xff.json".decode("utf-8", "surrogateescape"))
    assert json.loads(run("analyze", path, "--format", "json").out)["inputs"][0]["path"].endswith(
        "trace-\ufffd.json"
    )


def test_formats_may_be_mixed(tmp_path):
    one, two = write(tmp_path, TRACE), write(tmp_path, zlib.compress(TRACE, wbits=31), "b.json.gz")
    assert [row["rank"] for row in cptrace.analyze([one, two]).rows("ranks")] == [0, 1]
