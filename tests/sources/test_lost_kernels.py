"""Traces whose kernels are lost although they were launched: what they do to the time cannot be told, and is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import cptrace
from cptrace.errors import SourceError
from tests.support.command_line import cptrace as run
from tests.support.synthetic_kineto import TinyTrace
from tests.support.tiny_export import KERNEL, TinyExport, edit

FORMATS = ("kineto", "nsys")
ANALYSES = {"account", "collectives", "streams", "kernels", "messages", "findings"}


def copies(source: str, *launches: str, n_kernels: int = 0) -> TinyTrace | TinyExport:
    """
    host   step 0 [ launches, copies .... )
    s7            [= kernels, if any =)  [= copy )  [= copy )
    """
    builder = TinyTrace() if source == "kineto" else TinyExport()
    builder.range("step 0", 0, 5_000)
    for number, name in enumerate(launches):
        builder.call(name, 10 * number, 10 * number + 5, correlation=number + 100)
    for number in range(n_kernels):
        builder.kernel("flash", 6_000 + 100 * number, 6_050 + 100 * number, correlation=number + 100)
    for number in range(2):
        builder.call("cudaMemcpyAsync", 4_000 + 10 * number, 4_005 + 10 * number, correlation=number + 1)
        start, end = 10_000 * (number + 1), 10_000 * (number + 1) + 5_000
        if isinstance(builder, TinyTrace):
            builder.copy("Memcpy HtoD (Pinned -> Device)", start, end, correlation=number + 1)
        else:
            builder.copy(start, end, kind=1, correlation=number + 1)
    return builder


def write(builder: TinyTrace | TinyExport, folder: Path) -> Path:
    return builder.write(folder / ("t.json" if isinstance(builder, TinyTrace) else "t.sqlite"))


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize(
    "launch",
    ["cudaLaunchKernel_v7000", "cudaLaunchKernelExC_v11060", "cuLaunchKernel", "cuLaunchKernelEx", "cudaLaunch_v3020",
     "cudaLaunchCooperativeKernel", "hipLaunchKernel", "hipExtModuleLaunchKernel"],
)  # fmt: skip
def test_launches_without_any_kernel_are_no_account(source: str, launch: str, tmp_path: Path) -> None:
    path = write(copies(source, *[launch] * 3), tmp_path)
    report = cptrace.analyze(path)
    reasons = {entry.analysis: entry.reason for entry in report.not_applicable}
    assert reasons.keys() >= ANALYSES
    assert all(f"of 3 kernel launches {path} has not one kernel" in reasons[name] for name in ANALYSES)
    assert "record again with" in reasons["account"]
    assert [report.rows(name) for name in ("ranks", "steps", "collectives", "kernels", "findings")] == [
        ()
    ] * 5
    with pytest.raises(SourceError, match="not one kernel"):
        cptrace.whatif(path, cptrace.WhatIfOptions(fixes=("late-launch",)))


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("form", ["text", "json", "markdown", "html"])
def test_every_form_says_so(source: str, form: str, tmp_path: Path) -> None:
    outcome = run("analyze", write(copies(source, "cuLaunchKernel"), tmp_path), "--format", form)
    assert (outcome.exit_code, outcome.err) == (0, "")
    assert "not one kernel" in " ".join(outcome.out.split())


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize(
    ("launches", "n_kernels"),
    [((), 0), (("cudaGraphLaunch", "cudaLaunchHostFunc"), 0), (("cudaLaunchKernel",) * 5, 1)],
    ids=["copies alone", "no launch of a kernel", "some kernels lost"],
)
def test_what_is_no_such_case_keeps_its_account(
    source: str, launches: tuple[str, ...], n_kernels: int, tmp_path: Path
) -> None:
    (rank,) = cptrace.analyze(write(copies(source, *launches, n_kernels=n_kernels), tmp_path)).rows("ranks")
    assert (rank["exposed_copy_ns"], rank["compute_ns"]) == (10_000, 50 * n_kernels)


def test_graphs_traced_as_a_whole_keep_their_own_message(tmp_path: Path) -> None:
    builder = copies("nsys", "cudaLaunchKernel_v7000").graph(30_000, 40_000, launch=4_500, correlation=77)
    report = cptrace.analyze(write(builder, tmp_path))
    assert len(report.rows("ranks")) == 1
    assert "cuda-graph-trace=node" in str(report.not_applicable)


@pytest.mark.parametrize("statement", [f"DELETE FROM {KERNEL}", f"DROP TABLE {KERNEL}"])
def test_an_empty_table_of_kernels_is_none(statement: str, tmp_path: Path) -> None:
    path = edit(write(copies("nsys", "cuLaunchKernel", n_kernels=1), tmp_path), statement)
    found = json.loads(run("analyze", path, "--format", "json").out)
    entry = next(entry for entry in found["not_applicable"] if "account" in entry["analysis"])
    assert KERNEL in entry["missing"]
    assert found["ranks"] == []
