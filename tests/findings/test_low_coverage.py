"""Finding `low-coverage`: so much is unknown that the figures are doubtful."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.diagnosed import findings, report_of
from tests.support.simulated_schemes import Ring
from tests.support.tiny_export import TinyExport


@pytest.mark.parametrize(("unknown_ns", "is_found"), [(4, False), (5, False), (6, True)])
def test_kernels_that_no_rule_knows(tmp_path: Path, unknown_ns: int, is_found: bool) -> None:
    """
    stream 7    [nvjet 0 =========== 100 - u)[mystery = 100)      more than a twentieth is too much
    """
    export = TinyExport().kernel("nvjet", 0, 100 - unknown_ns, launch=1)
    export.kernel("mystery", 100 - unknown_ns, 100, launch=2)
    found = findings(report_of(export, tmp_path))
    assert (("low-coverage", "unclassified") in found) == is_found
    if is_found:
        assert found["low-coverage", "unclassified"]["value"] == pytest.approx(unknown_ns / 100)


@pytest.mark.parametrize(("n_unknown", "is_found"), [(1, False), (2, True)])
def test_ops_without_their_launch(tmp_path: Path, n_unknown: int, is_found: bool) -> None:
    """20 kernels, of which one or two have no launching call: more than a twentieth is too much."""
    export = TinyExport()
    for number in range(20):
        export.kernel("nvjet", 10 * number, 10 * number + 9, launch=None if number < n_unknown else number)
    found = findings(report_of(export, tmp_path))
    assert (("low-coverage", "launches") in found) == is_found


@pytest.mark.parametrize("has_records", [False, True])
def test_waits_without_their_records(tmp_path: Path, has_records: bool) -> None:
    found = findings(report_of(Ring(n_ranks=2).hosts(), tmp_path, has_records=has_records))
    assert (("low-coverage", "waits") in found) == (not has_records)
