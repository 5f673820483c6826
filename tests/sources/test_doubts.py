"""Device work that cannot be as a trace tells it: said in a note, in every format, and never on whole traces."""

from __future__ import annotations

from pathlib import Path

import pytest

import cptrace
from cptrace.sources import read_trace
from tests.support.command_line import cptrace as run
from tests.support.shared_traces import ROOT, require_trace
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


def stream_of(
    source: str, path: Path, *rows: tuple[int, int], stream: int = 7, graph: int | None = None
) -> Path:
    """Write a trace of kernels `k` at these times in one stream, each launched by a call of its own or all by one."""
    builder = TinyTrace() if source == "kineto" else TinyExport()
    if graph is not None:
        builder.call("cudaGraphLaunch", 0, 10, correlation=graph)
    for number, (start, end) in enumerate(rows):
        builder.kernel("k", start, end, stream=stream, correlation=number + 100 if graph is None else graph)
    return builder.write(path / ("t.json" if source == "kineto" else "t.sqlite"))


def in_a_row(n: int, duration_ns: int = 5_000) -> list[tuple[int, int]]:
    return [(place * duration_ns, (place + 1) * duration_ns) for place in range(n)]


@pytest.mark.parametrize("source", FORMATS)
class TestOverlappingOps:
    @pytest.mark.parametrize("duration_ns", [5_000, 1_500, 1])
    def test_rows_that_are_there_twice(self, source: str, duration_ns: int, tmp_path: Path) -> None:
        rows = in_a_row(5, duration_ns)
        report = cptrace.analyze(stream_of(source, tmp_path, *rows, *rows))
        assert codes(report) == {"overlapping-ops": 5}
        (note,) = [note for note in report.coverage["notes"] if note["code"] == "overlapping-ops"]
        assert "and 5 of them repeat it" in note["text"]

    def test_each_overlap_is_counted(self, source: str, tmp_path: Path) -> None:
        """
        s7   [==== k ====)      [==== k ====)
                   [==== k ====)       [=== k ====)
        """
        path = stream_of(source, tmp_path, (0, 10_000), (5_000, 15_000), (20_000, 30_000), (27_000, 37_000))
        assert codes(cptrace.analyze(path)) == {"overlapping-ops": 2}
        assert "repeat" not in str(cptrace.analyze(path).coverage["notes"])
        outcome = run("analyze", path)
        assert "start before the one before them in their stream has ended" in " ".join(outcome.out.split())

    @pytest.mark.parametrize(
        "rows",
        [
            in_a_row(4),
            [(0, 10_000), (8_000, 15_000)],
            [(0, 10_000), (10_000, 10_000), (10_000, 10_000)],
            [(0, 10_000)],
            [*in_a_row(2_000), (9_997_000, 10_002_000)],
        ],
        ids=["touching", "within the clocks", "of no duration", "one", "a stray one of two thousand"],
    )
    def test_what_a_stream_does_is_silent(
        self, source: str, rows: list[tuple[int, int]], tmp_path: Path
    ) -> None:
        assert codes(cptrace.analyze(stream_of(source, tmp_path, *rows))) == {}

    def test_branches_of_a_graph_run_side_by_side(self, source: str, tmp_path: Path) -> None:
        path = stream_of(source, tmp_path, (0, 10_000), (5_000, 15_000), graph=4)
        assert codes(cptrace.analyze(path)) == {}

    @pytest.mark.parametrize("where", [{"stream": 9}, {"device": 1}])
    @pytest.mark.parametrize("step", [1, 2**20], ids=["few", "sparse"])
    def test_other_streams_and_devices_may(
        self, source: str, where: dict[str, int], step: int, tmp_path: Path
    ) -> None:
        builder = TinyTrace() if source == "kineto" else TinyExport()
        for number, (start, end) in enumerate(in_a_row(4)):
            builder.kernel("k", start, end, stream=step, correlation=number)
            there = {
                "stream": step,
                **{key: value * step if key == "stream" else value for key, value in where.items()},
            }
            builder.kernel("k", start + 100, end + 100, correlation=10 + number, **there)
        path = builder.write(tmp_path / ("t.json" if source == "kineto" else "t.sqlite"))
        assert codes(cptrace.analyze(path)) == {}


PUBLIC = (
    *(f"nsys/{name}.sqlite" for name in ("nsys-2021.2-no-meta", "nsys-2022.1-stream-waits", "nsys-2023.3-one-kernel",
      "nsys-2024.6-graph-trace", "nsys-2025.5-cuda-events", "nsys-2026.2-ulysses-2gpu", "nsys-no-kernels")),
    *(f"kineto/dlrm_8rank/worker{rank}.json.gz" for rank in range(8)),
    *(f"kineto/{name}.json.gz" for name in ("nccl-4-streams", "cuda-event-sync-multi-stream", "deepep-all-to-all")),
)  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_public_traces_are_beyond_doubt(name: str) -> None:
    found = {note.code for note in read_trace(require_trace(name)).meta.notes}
    assert not found & {"ambiguous-launches", "overlapping-ops"}


@pytest.mark.parametrize("path", sorted((ROOT / "samples").glob("*.sqlite")), ids=lambda path: path.stem)
def test_samples_are_beyond_doubt(path: Path) -> None:
    assert not {note.code for note in read_trace(path).meta.notes} & {"ambiguous-launches", "overlapping-ops"}
