"""Finding `required-order`: exposed where the data flow needs it, and told so that nobody tries a second stream."""

from __future__ import annotations

from pathlib import Path

import pytest

import cptrace
from cptrace.requests import ScopeRequest
from tests.support.diagnosed import findings, not_looked_for, report_of
from tests.support.simulated_run import write
from tests.support.simulated_schemes import FORWARD_KERNEL, Ring, ulysses
from tests.support.tiny_export import TinyExport

DATA_FLOW, BOUND = ("required-order", "data-flow"), ("required-order", "transfer-bound")


def test_ulysses_exchanges_before_and_after_attention(tmp_path: Path) -> None:
    """
    stream 7    [q][k][v][attention][out]       4 exchanges of 100 us in each of 2 passes on each of 2 ranks
    """
    row = findings(report_of(ulysses(), tmp_path))[DATA_FLOW]
    assert (row["value"], row["unit"]) == (2 * 2 * 4 * 100_000, "ns")
    assert (row["severity"], row["predicted_step_ns"], row["recoverable_ns"]) == ("info", None, None)
    assert "second stream alone gains nothing" in row["advice"]
    assert {entry["what"] for entry in row["evidence"]} == {"exposed"}


def test_a_ring_whose_transfers_are_longer_than_attention(tmp_path: Path) -> None:
    """
    stream 7    [attention 0]      [attention 1]      [attention 2]      [attention 3]
    stream 13   [kv 0            ][kv 1             ][kv 2            ]      300 us of each stick out
    """
    report = report_of(Ring(transfer_ns=(800_000,), is_forward_only=True).hosts(), tmp_path)
    row = findings(report)[BOUND]
    assert row["value"] == 4 * 3 * 300_000
    assert "More tokens per rank" in row["advice"]


def test_one_transfer_is_not_told_as_several(tmp_path: Path) -> None:
    path = write(
        Ring(n_ranks=2, transfer_ns=(800_000,), is_forward_only=True).hosts(), tmp_path / "two.sqlite"
    )
    report = cptrace.analyze(path, cptrace.AnalyzeOptions(scope=ScopeRequest(ranks=(0,))))
    assert findings(report)[BOUND]["summary"].startswith("1 transfer of ring attention exposed for 300 us")


def test_a_ring_that_hides_its_transfers(tmp_path: Path) -> None:
    assert not findings(report_of(Ring(is_forward_only=True).hosts(), tmp_path))


def test_what_another_finding_explains_is_not_required(tmp_path: Path) -> None:
    """Forward, with one buffer: every transfer but the first is exposed, and none must be."""
    report = report_of(Ring(n_buffers=1, is_forward_only=True).hosts(), tmp_path)
    assert set(findings(report)) == {("single-buffer", None)}


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_ns": (500_000, 500_000, 1_000_000, 500_000)},
        {"n_buffers": 1},
        {"blocks_host": True},
        {"pause_ns": 600_000},
    ],
    ids=["straggler", "single-buffer", "host-sync", "late-launch"],
)
def test_what_other_causes_expose_is_not_required(tmp_path: Path, changes: dict[str, object]) -> None:
    """Backward the last transfer is required, and no more of it than in the run without the other cause."""
    sound = findings(report_of(Ring().hosts(), tmp_path))
    found = findings(report_of(Ring().but(**changes).hosts(), tmp_path))
    assert len(found) == len(sound) + 1
    required = found[BOUND]["value"] if BOUND in found else 0
    assert required == pytest.approx(sound[BOUND]["value"] if BOUND in sound else 0, rel=0.06, abs=20_000)


def test_two_transfers_that_are_exposed_at_once_count_once(tmp_path: Path) -> None:
    """
    backward, slow link
    stream 7    [attention 0]            [attention 1]
    stream 13   [kv 0                   ][kv 1                   ]
    stream 14                [dkv 0                 ][dkv 1                ]      both are exposed where attention ends
    """
    report = report_of(Ring(transfer_ns=(800_000,)).hosts(), tmp_path)
    exposed = sum(row["exposed_comm_ns"] for row in report.rows("ranks"))
    assert set(findings(report)) == {BOUND}
    assert findings(report)[BOUND]["value"] == exposed


def test_without_a_known_scheme_it_is_not_looked_for(tmp_path: Path) -> None:
    """
    stream 7    [flash]         [flash]
    stream 13          [broadcast]           no scheme of attention broadcasts
    """
    export = TinyExport().kernel(FORWARD_KERNEL, 0, 50_000, launch=1)
    export.kernel("ncclDevKernel_Broadcast_RING_LL", 50_000, 80_000, stream=13, launch=2)
    report = report_of(export.kernel(FORWARD_KERNEL, 80_000, 99_000, launch=3), tmp_path)
    assert "no context-parallel scheme was recognised" in not_looked_for(report)["required-order"]
