"""The library: what `import cptrace` offers, and one report of several files."""

from __future__ import annotations

import subprocess
import sys

import pytest

import cptrace
from cptrace.errors import CptraceError, SourceError, TraceError, UsageError
from cptrace.requests import AnalyzeOptions, ScopeRequest
from tests.support.tiny_export import TinyExport


def one_rank(path, *, end, pid=100, run=None, device=0):
    """Write a trace of one rank whose only kernel runs from 0 to `end`, by which tests know it again."""
    export = TinyExport().kernel("nvjet", 0, end, pid=pid, device=device)
    if run is not None:
        export.run(ranks=[{"rank": run, "pid": pid, "device": device}])
    return export.write(path)


def ranks_of(report):
    return [(row["rank"], row["window_ns"]) for row in report.rows("ranks")]


def analyze(paths, *ranks):
    return cptrace.analyze(paths, AnalyzeOptions(scope=ScopeRequest(ranks=ranks)))


def test_public_names():
    assert set(cptrace.__all__) <= set(dir(cptrace)) | set(cptrace._HOMES)
    for name in cptrace.__all__:
        assert getattr(cptrace, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = cptrace.nothing


def test_importing_is_light():
    """`cptrace --help` and error messages must not wait for pandas, pyarrow or torch."""
    modules = "cptrace, cptrace.cli.main, cptrace.cli.analyze"
    code = f"import sys, {modules}; print([name for name in ('pandas', 'torch') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_paths_may_be_texts_paths_or_lists(tmp_path):
    path = one_rank(tmp_path / "a.sqlite", end=10)
    expected = cptrace.analyze(path).to_json()
    assert cptrace.analyze(str(path)).to_json() == expected
    assert cptrace.analyze([path]).to_json() == expected
    assert cptrace.analyze((str(path),)).to_json() == expected
    with pytest.raises(UsageError, match="no trace was named"):
        cptrace.analyze([])


def test_open_trace_gives_tables(tmp_path):
    trace = cptrace.open_trace(str(one_rank(tmp_path / "a.sqlite", end=10)))
    assert isinstance(trace, cptrace.Trace)
    assert trace.ops.groupby("stream").size().to_dict() == {7: 1}


def test_files_without_records_are_counted_on(tmp_path):
    paths = [one_rank(tmp_path / f"{i}.sqlite", end=10 + i) for i in range(3)]
    two = (
        TinyExport()
        .kernel("nvjet", 0, 50)
        .kernel("nvjet", 0, 60, pid=200, device=1)
        .write(tmp_path / "two.sqlite")
    )
    report = analyze([paths[0], two, paths[2]])
    assert ranks_of(report) == [(0, 10), (1, 50), (2, 60), (3, 12)]
    assert [row["path"] for row in report.inputs] == [str(p) for p in (paths[0], two, paths[2])]
    for section in ("kernels", "streams"):
        assert [row["rank"] for row in report.rows(section)] == [0, 1, 2, 3]


def test_recorded_ranks_win_whatever_the_order_of_files(tmp_path):
    paths = [one_rank(tmp_path / f"{i}.sqlite", end=10 + i, run=rank) for i, rank in enumerate((5, 0, 3))]
    assert ranks_of(analyze(paths)) == [(5, 10), (0, 11), (3, 12)]


def test_counted_ranks_come_after_recorded_ones(tmp_path):
    recorded = one_rank(tmp_path / "r.sqlite", end=10, run=4)
    counted = one_rank(tmp_path / "c.sqlite", end=20)
    assert ranks_of(analyze([recorded, counted])) == [(4, 10), (5, 20)]
    assert ranks_of(analyze([counted, recorded])) == [(0, 20), (4, 10)]


def test_two_files_that_claim_one_rank_are_refused(tmp_path):
    a, b = (one_rank(tmp_path / f"{name}.sqlite", end=10, run=1) for name in "ab")
    with pytest.raises(TraceError, match=r"rank 1 is in .*a\.sqlite and in .*b\.sqlite"):
        analyze([a, b])
    with pytest.raises(UsageError, match=r"a\.sqlite is named twice; name each file once"):
        analyze([a, a])


def test_ranks_are_asked_for_by_the_numbers_that_the_report_shows(tmp_path):
    paths = [one_rank(tmp_path / f"{i}.sqlite", end=10 + i) for i in range(3)]
    for rank in range(3):
        report = analyze(paths, rank)
        assert ranks_of(report) == [(rank, 10 + rank)]
        assert len(report.inputs) == 3
        report.to_json()
    assert ranks_of(analyze(paths, 2, 0)) == [(0, 10), (2, 12)]
    assert analyze(paths, 2).coverage["n_ops"] == 1
    with pytest.raises(UsageError, match=r"rank 3 is not in .*; the ranks are 0, 1, 2"):
        analyze(paths, 0, 3)


def test_ranks_of_one_file(tmp_path):
    path = (
        TinyExport()
        .kernel("nvjet", 0, 50)
        .kernel("nvjet", 0, 60, pid=200, device=1)
        .write(tmp_path / "t.sqlite")
    )
    assert ranks_of(analyze(path, 1, 1)) == [(1, 60)]
    for unknown in (2, -1):
        with pytest.raises(UsageError, match=f"rank {unknown} is not in .*; the ranks are 0, 1"):
            analyze(path, unknown)


def test_a_rank_of_a_trace_without_device_work(tmp_path):
    path = TinyExport().call("cudaFree", 0, 1).write(tmp_path / "t.sqlite")
    with pytest.raises(UsageError, match=r"\(none\)"):
        analyze(path, 0)
    assert ranks_of(analyze(path)) == []


def test_a_trace_without_device_work_among_others(tmp_path):
    first, last = (TinyExport().call("cudaFree", 0, 1).write(tmp_path / f"{name}.sqlite") for name in "ef")
    report = analyze([first, one_rank(tmp_path / "a.sqlite", end=10), last])
    assert ranks_of(report) == [(0, 10)]
    assert "account" in {entry.analysis for entry in report.not_applicable}


def test_coverage_of_several_files_is_the_sum(tmp_path):
    paths = []
    for name in "ab":
        export = TinyExport().kernel(f"mystery_{name}", 0, 10, launch=1).kernel("nvjet", 10, 20)
        paths.append(export.write(tmp_path / f"{name}.sqlite"))
    coverage = analyze(paths).coverage
    assert (coverage["n_ops"], coverage["n_launches_missing"], coverage["unclassified_ns"]) == (4, 2, 20)
    assert [entry["name"] for entry in coverage["unclassified"]] == ["mystery_a", "mystery_b"]


def test_a_bad_file_among_good_ones_is_named(tmp_path):
    good = one_rank(tmp_path / "good.sqlite", end=10)
    bad = tmp_path / "bad.sqlite"
    bad.write_bytes(b"")
    for paths in ([good, bad], [bad, good], [good, tmp_path / "missing.sqlite"]):
        with pytest.raises(SourceError, match=r"bad\.sqlite|missing\.sqlite"):
            analyze(paths)


def test_errors_have_exit_codes_of_their_own():
    from cptrace import errors

    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    assert all(issubclass(cls, CptraceError) for cls in classes)
    assert sorted(cls.exit_code for cls in classes) == [1, 2, 3, 4, 5, 6, 10]
