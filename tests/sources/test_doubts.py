"""Device work that cannot be as a trace tells it: said in a note, in every format, and never on whole traces."""

from __future__ import annotations

from pathlib import Path

import pytest

import cptrace
from tests.support.command_line import cptrace as run
from tests.support.synthetic_kineto import TinyTrace
from tests.support.tiny_export import TinyExport

FORMATS = ("kineto", "nsys")


def steps_of_one_id(path: Path, source: str, numbers: tuple[int, ...]) -> Path:
    """
    host    step 0 [ launch  launch )  step 1 [ launch  launch )      the launches have the correlation ids `numbers`
    s7                 [==== k ====)[==== k ====)[==== k ====)[==== k ====)
    """
    builder = TinyTrace() if source == "kineto" else TinyExport()
    for step in (0, 1):
        builder.range(f"step {step}", 1_000 * step, 1_000 * step + 900)
    for place, number in enumerate(numbers):
        launch = 1_000 * (place // 2) + 400 * (place % 2) + 100
        builder.call("cudaLaunchKernel", launch, launch + 10, correlation=number)
        builder.kernel("k", 5_000 * (place + 1), 5_000 * (place + 2), correlation=number)
    return builder.write(path / ("t.json" if source == "kineto" else "t.sqlite"))


def codes(report: cptrace.Report) -> dict[str, int | None]:
    return {
        note["code"]: note["count"] for note in report.coverage["notes"] if note["code"] != "counted-ranks"
    }


@pytest.mark.parametrize("source", FORMATS)
class TestLaunchesOfOneId:
    def test_no_step_takes_work_whose_launch_is_not_known(self, source: str, tmp_path: Path) -> None:
        report = cptrace.analyze(steps_of_one_id(tmp_path, source, (1, 1, 1, 1)))
        assert report.rows("steps") == ()
        assert codes(report) == {"ambiguous-launches": 4}
        assert report.coverage["n_launches_missing"] == 4
        assert report.rows("ranks")[0]["compute_ns"] == 20_000

    def test_only_the_shared_id_is_not_known(self, source: str, tmp_path: Path) -> None:
        report = cptrace.analyze(steps_of_one_id(tmp_path, source, (1, 1, 2, 3)))
        assert [(row["step"], row["compute_ns"]) for row in report.rows("steps")] == [(1, 10_000)]
        assert codes(report) == {"ambiguous-launches": 2}

    def test_ids_of_their_own_are_silent(self, source: str, tmp_path: Path) -> None:
        path = steps_of_one_id(tmp_path, source, (1, 2, 3, 4))
        assert codes(cptrace.analyze(path)) == {}
        assert "ambiguous" not in run("analyze", path, "--format", "json").out
