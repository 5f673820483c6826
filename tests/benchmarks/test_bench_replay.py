"""The benchmark of replays runs, on an export too small to judge, and judges by the ratio."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks import bench_replay
from tests.benchmarks.bench_replay import Measured, lines_of, main


def test_it_measures_and_keeps_the_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kernels", "2000", "--repeats", "1", "--cache", str(tmp_path), "--check"]) == 0
    out = capsys.readouterr().out
    assert "prepare and replay over read" in out
    assert "MISSED" not in out
    assert [path.name for path in tmp_path.iterdir()] == ["replay-2000.sqlite"]


def test_a_replay_that_is_not_as_recorded_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_replay, "is_as_recorded", lambda recording, replayed: False)
    with pytest.raises(SystemExit, match="is not as recorded"):
        main(["--kernels", "2000", "--repeats", "1", "--cache", str(tmp_path)])


@pytest.mark.parametrize(
    ("n_ops", "replay_s", "is_missed"), [(10**6, 0.5, False), (10**6, 0.51, True), (10**5, 9.0, False)]
)
def test_the_target_is_the_ratio(n_ops: int, replay_s: float, is_missed: bool) -> None:
    lines = lines_of(Measured(n_ops, 1, read_s=1.0, prepare_s=0.1, replay_s=replay_s))
    assert [line.what for line in lines if line.is_missed] == ["prepare and replay over read"] * is_missed
