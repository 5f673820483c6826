"""Finding `shared-communicator`: transfers that need nothing of each other take turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.diagnosed import findings, lost_time, report_of, step_before
from tests.support.simulated_run import step_ns
from tests.support.simulated_schemes import DKV, KV, Ring

KEY = ("shared-communicator", None)


@pytest.mark.parametrize("transfer_ns", [400_000, 800_000])
def test_keys_and_gradients_in_turn(tmp_path: Path, transfer_ns: int) -> None:
    """
    backward
    stream 7    [attention 0][attention 1]       [attention 2] ...
    stream 13   [kv 0]       [dkv 0][kv 1][dkv 1][kv 2]              kv 1 waits for dkv 0 and needs nothing of it
    mended      [kv 0]       [kv 1]  and  [dkv 0][dkv 1]  beside it
    """
    ring = Ring(dkv_stream=KV, transfer_ns=(transfer_ns,))
    report = report_of(ring.hosts(), tmp_path)
    assert lost_time(report) == {KEY}
    row = findings(report)[KEY]
    assert step_before(row) == step_ns(ring.hosts())
    assert row["predicted_step_ns"] == step_ns(ring.but(dkv_stream=DKV).hosts())
    assert {entry["stream"] for entry in row["evidence"]} == {KV}


def test_transfers_of_one_flow_are_in_order_anyway(tmp_path: Path) -> None:
    """
    forward, slow link
    stream 13   [kv 0      ][kv 1      ][kv 2      ]       each sends on what the one before has brought
    """
    ring = Ring(transfer_ns=(800_000,), is_forward_only=True)
    assert set(findings(report_of(ring.hosts(), tmp_path))) == {("required-order", "transfer-bound")}


def test_two_communicators(tmp_path: Path) -> None:
    assert not lost_time(report_of(Ring(transfer_ns=(800_000,)).hosts(), tmp_path))


def test_on_a_fast_link_taking_turns_costs_nothing(tmp_path: Path) -> None:
    """Both transfers of a hop fit behind its attention."""
    assert not lost_time(report_of(Ring(dkv_stream=KV, transfer_ns=(100_000,)).hosts(), tmp_path))


def test_copies_that_put_aside_what_is_sent_belong_to_their_transfer(tmp_path: Path) -> None:
    """
    stream 13   [kv 0][copy][dkv 0][copy][kv 1][copy][dkv 1]      the copy for kv 1 waits for dkv 0, as kv 1 does
    """
    ring = Ring(dkv_stream=KV, transfer_ns=(800_000,), aside_ns=20_000)
    report = report_of(ring.hosts(), tmp_path)
    assert lost_time(report) == {KEY}
    row = findings(report)[KEY]
    assert row["predicted_step_ns"] == pytest.approx(step_ns(ring.but(dkv_stream=DKV).hosts()), rel=0.001)


@pytest.mark.parametrize("aside_ns", [0, 20_000])
def test_beside_a_single_buffer(tmp_path: Path, aside_ns: int) -> None:
    """
    stream 7    [attention 1]                    [attention 2]
    stream 13                [kv 1][copy][dkv 0]                      kv 1 waits for attention 1, then for dkv 0
    """
    ring = Ring(dkv_stream=KV, n_buffers=1, transfer_ns=(800_000,), aside_ns=aside_ns)
    assert lost_time(report_of(ring.hosts(), tmp_path)) == {KEY, ("single-buffer", None)}
