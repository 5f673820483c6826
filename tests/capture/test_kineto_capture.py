"""Traces of torch's profiler become one report in the schema of Nsight Systems that says the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import cptrace
from cptrace.capture.kineto_capture import RECORDED_BY, convert
from cptrace.errors import TraceError
from cptrace.exports import find_export
from cptrace.exports.parts import of_rank
from cptrace.labels import DOMAIN
from cptrace.report import Report
from tests.support.emulated_report import run_metadata
from tests.support.shared_traces import ROOT, require_trace

SAMPLES = sorted((ROOT / "samples").glob("*.sqlite"))
RUN: dict[str, Any] = {"schema": "cptrace.run/1", "device_kind": "cuda", "ranks": []}
FIELDS = ("rank", "window_ns", "compute_ns", "comm_ns", "overlapped_comm_ns", "exposed_copy_ns", "idle_ns")


def account(report: Report) -> list[list[Any]]:
    return [[row[name] for name in FIELDS] for row in report.rows("ranks")]


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_one_trace_per_rank_becomes_the_report_that_they_came_from(path: Path, tmp_path: Path) -> None:
    trace = cptrace.open_trace(path)
    files = []
    for rank in trace.ranks["rank"].tolist():
        files.append(tmp_path / f"rank{rank}.json")
        find_export("kineto").write(of_rank(trace, rank), files[-1])
    output = tmp_path / "report.sqlite"
    convert(files, output, run_metadata(path))
    before, after = cptrace.analyze(path), cptrace.analyze(output)
    for section in ("ranks", "steps", "collectives"):
        assert before.rows(section) == after.rows(section), section
    assert RECORDED_BY in after.inputs[0]["tool_version"]


def test_labels_get_their_domain_back(tmp_path: Path) -> None:
    find_export("kineto").write(cptrace.open_trace(SAMPLES[0]), tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text().replace(f'"domain": "{DOMAIN}", ', "")
    (tmp_path / "plain.json").write_text(text)
    assert cptrace.open_trace(tmp_path / "plain.json").ranges["domain"].isna().all()
    convert([tmp_path / "plain.json"], tmp_path / "report.sqlite", RUN)
    assert (cptrace.open_trace(tmp_path / "report.sqlite").ranges["domain"] == DOMAIN).all()


def test_a_real_job_of_eight_ranks_keeps_its_figures(tmp_path: Path) -> None:
    folder = require_trace("kineto/dlrm_8rank")
    files = sorted(folder.glob("*.json*"))
    convert(files, tmp_path / "report.sqlite", RUN)
    before, after = cptrace.analyze(files), cptrace.analyze(tmp_path / "report.sqlite")
    assert account(before) == account(after)
    assert len(account(after)) == 8


def test_two_traces_of_one_rank_are_refused(tmp_path: Path) -> None:
    trace = of_rank(cptrace.open_trace(SAMPLES[0]), 1)
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        find_export("kineto").write(trace, file)
    with pytest.raises(TraceError, match="two traces are of rank 1"):
        convert(files, tmp_path / "report.sqlite", RUN)
