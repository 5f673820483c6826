"""Collectives, kernels and streams of a rank."""

from __future__ import annotations

import pytest

import cptrace
from cptrace.analyses import ANALYSES
from cptrace.report import SECTIONS
from cptrace.requests import AnalyzeOptions, ScopeRequest, parse_window
from tests.support.tiny_export import TinyExport

SEND = "ncclDevKernel_SendRecv()"


def analyze(export, path, window=None):
    scope = ScopeRequest(window=parse_window(window) if window else None)
    return cptrace.analyze(export.write(path), AnalyzeOptions(scope=scope))


def labelled(sizes, *, domain="cptrace", size_text="bytes={}"):
    """Return an export with one send per size, 10 ns each, launched inside a label that states it."""
    export = TinyExport().domain(1, domain)
    for number, size in enumerate(sizes):
        text = "send_recv pass=forward layer=0" + (f" {size_text.format(size)}" if size is not None else "")
        export.range(text, 10 * number, 10 * number + 5, domain=1)
        export.kernel(SEND, 1_000 + 10 * number, 1_010 + 10 * number, launch=10 * number + 1)
    return export


@pytest.mark.parametrize(
    ("sizes", "total"),
    [
        ([100, 28], 128),
        ([100, None], None),
        ([0, 0], 0),
        ([6 * 10**9] * 3, 18 * 10**9),
        ([4 * 10**17], 4 * 10**17),
    ],
)
def test_bytes_come_from_labels_where_every_op_has_one(sizes, total, tmp_path):
    """Days of training send more than 9.2 GB, whose product with 1e9 is beyond 64 bits."""
    (row,) = analyze(labelled(sizes), tmp_path / "t.sqlite").rows("collectives")
    assert (row["kind"], row["count"], row["total_ns"]) == ("send_recv", len(sizes), 10 * len(sizes))
    assert row["bytes"] == total
    expected = None if total is None else pytest.approx(total * 1e9 / (10 * len(sizes)))
    assert row["bytes_per_s"] == expected


@pytest.mark.parametrize(
    "text", ["bytes=12.5", "bytes=-4", "bytes=", "bytes=x", "size={}", "bytes=١٢", "bytes=" + "9" * 30]
)
def test_sizes_that_are_no_numbers_are_unknown(text, tmp_path):
    (row,) = analyze(labelled([7], size_text=text), tmp_path / "t.sqlite").rows("collectives")
    assert (row["bytes"], row["bytes_per_s"]) == (None, None)


def test_labels_of_other_domains_are_not_ours(tmp_path):
    (row,) = analyze(labelled([7], domain="mine"), tmp_path / "t.sqlite").rows("collectives")
    assert row["bytes"] is None


def test_the_innermost_label_counts(tmp_path):
    export = TinyExport().domain(1, "cptrace").range("all_gather bytes=999", 0, 20, domain=1)
    export.range("send_recv bytes=5", 2, 10, domain=1).kernel(SEND, 100, 110, launch=3).kernel(
        SEND, 120, 130, launch=12
    )
    rows = analyze(export, tmp_path / "t.sqlite").rows("collectives")
    assert {(row["kind"], row["bytes"]) for row in rows} == {("send_recv", 5), ("all_gather", 999)}


def test_peer_copies_have_the_size_of_the_copy(tmp_path):
    export = TinyExport().copy(0, 10, kind=10, size=100).copy(20, 30, kind=10, size=50)
    (row,) = analyze(export, tmp_path / "t.sqlite").rows("collectives")
    assert (row["name"], row["bytes"], row["bytes_per_s"]) == ("memcpy PtoP", 150, 150 * 1e9 / 20)


def test_no_bandwidth_where_ranks_share_one_gpu(tmp_path):
    """Copies that cross no link say nothing about one."""
    export = TinyExport().copy(0, 10, kind=10, size=100).run(transport="local-d2d")
    (row,) = analyze(export, tmp_path / "t.sqlite").rows("collectives")
    assert (row["bytes"], row["bytes_per_s"]) == (100, None)


def test_collectives_are_cut_to_the_window_and_their_overlap_counts_inside(tmp_path):
    """
    comm      [0 ================ 40)    [50 == 60)
    compute        [10 == 20)  [30 ======== 50)          window [15, 45)
    """
    export = TinyExport().kernel(SEND, 0, 40, stream=13).kernel(SEND, 50, 60, stream=13)
    export.kernel("nvjet", 10, 20).kernel("nvjet", 30, 50)
    (row,) = analyze(export, tmp_path / "t.sqlite", "15ns:45ns").rows("collectives")
    assert (row["count"], row["total_ns"], row["busy_ns"], row["overlapped_ns"], row["exposed_ns"]) == (
        1,
        25,
        25,
        15,
        10,
    )
    assert row["overlap"] == 15 / 25


def test_concurrent_collectives_of_one_name_are_busy_once(tmp_path):
    export = TinyExport().kernel(SEND, 0, 40, stream=13).kernel(SEND, 20, 60, stream=14)
    (row,) = analyze(export, tmp_path / "t.sqlite").rows("collectives")
    assert (row["count"], row["total_ns"], row["busy_ns"], row["exposed_ns"]) == (2, 80, 60, 60)


def test_kernels_and_streams_count_what_reaches_into_the_window(tmp_path):
    """An op of no duration counts as an instant; one that ends where the window starts does not reach into it."""
    export = (
        TinyExport()
        .kernel("nvjet", 0, 10)
        .kernel("nvjet", 5, 25, stream=9)
        .kernel("nvjet", 15, 15)
        .kernel("flash", 30, 40)
    )
    report = analyze(export, tmp_path / "t.sqlite", "10ns:30ns")
    assert [
        (row["name"], row["count"], row["total_ns"], row["longest_ns"]) for row in report.rows("kernels")
    ] == [("nvjet", 2, 15, 15)]
    assert [(row["stream"], row["n_ops"], row["busy_ns"]) for row in report.rows("streams")] == [
        (7, 1, 0),
        (9, 1, 15),
    ]


def test_kernels_say_which_rule_decided(tmp_path):
    export = (
        TinyExport()
        .kernel("flash", 0, 30)
        .kernel("mystery", 30, 50)
        .copy(50, 60)
        .copy(60, 65, kind=10)
        .graph(70, 71)
    )
    rows = analyze(export, tmp_path / "t.sqlite").rows("kernels")
    assert [(row["name"], row["kind"], row["role"], row["rule"]) for row in rows] == [
        ("flash", "kernel", "compute", "attention"),
        ("mystery", "kernel", "compute", "fallback"),
        ("memcpy DtoD", "memcpy", "copy", "copy"),
        ("memcpy PtoP", "memcpy", "comm", "peer-copy"),
        ("CUDA graph launch", "graph", "other", "whole-graph"),
    ]


def test_the_registry_is_sound():
    assert len({analysis.name for analysis in ANALYSES}) == len(ANALYSES)
    assert {analysis.section for analysis in ANALYSES} <= set(SECTIONS)
    assert all(analysis.question.endswith(("?", ".")) for analysis in ANALYSES)
