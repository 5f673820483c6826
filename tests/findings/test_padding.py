"""Finding `padding`: tokens that are computed and sent for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.diagnosed import findings, report_of
from tests.support.tiny_export import TinyExport

KEY = ("padding", None)


@pytest.mark.parametrize(("padded", "severity"), [(2, "info"), (16, "warning")])
def test_padding_is_said_with_what_would_fit(tmp_path: Path, padded: int, severity: str) -> None:
    export = TinyExport().kernel("flash_fwd_kernel", 0, 100)
    export.run(
        cp_size=4, seq_len=100, padded_tokens=padded, padded_share=padded / (100 + padded), padding_multiple=8,
        fits_without_padding=[2, 5], scheme="single",
    )  # fmt: skip
    row = findings(report_of(export, tmp_path))[KEY]
    assert (row["severity"], row["unit"]) == (severity, "fraction")
    assert row["value"] == pytest.approx(padded / (100 + padded))
    assert f"{padded} of {100 + padded} tokens" in row["summary"]
    assert "multiple of 8, or one of these numbers of ranks: 2, 5" in row["advice"]


@pytest.mark.parametrize("run", [{"padded_share": 0.0}, {"padded_share": 0.009}, {}])
def test_little_or_none_is_not_worth_a_word(tmp_path: Path, run: dict[str, float]) -> None:
    export = TinyExport().kernel("flash_fwd_kernel", 0, 100).run(seq_len=1000, **run)
    assert KEY not in findings(report_of(export, tmp_path))
