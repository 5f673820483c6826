"""A pause that is most of a window is said: its shares say little about the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

import cptrace
from tests.support.tiny_export import TinyExport


@pytest.mark.parametrize(("second_ns", "is_said"), [(40_000, False), (90_000, True)])
def test_a_pause_of_more_than_half_the_window(tmp_path: Path, second_ns: int, is_said: bool) -> None:
    """
    stream 7     [gemm]                                    [gemm]
                        ^ more than half of all this time ^
    """
    export = TinyExport().kernel("gemm", 1_000, 20_000, launch=0)
    export.kernel("gemm", second_ns, second_ns + 10_000, launch=1)
    report = cptrace.analyze(export.write(tmp_path / "t.sqlite"))
    notes = [note["text"] for note in report.coverage["notes"] if note["code"] == "long-pause"]
    assert bool(notes) == is_said
    if is_said:
        assert notes[0].startswith(
            "rank 0 does nothing for 70.0 us of 99.0 us, from 0.000020 s to 0.000090 s"
        )


def test_steps_are_looked_at_alone(tmp_path: Path) -> None:
    """
    step         [0   ]                                  [1   ]       the pause is between the steps
    stream 7     [gemm]                                  [gemm]
    """
    export = TinyExport()
    for step, start in enumerate((0, 900_000)):
        export.range(f"step {step}", start, start + 5_000)
        export.kernel("gemm", start + 1_000, start + 20_000, launch=start + 10)
    report = cptrace.analyze(export.write(tmp_path / "t.sqlite"))
    assert not [note for note in report.coverage["notes"] if note["code"] == "long-pause"]
