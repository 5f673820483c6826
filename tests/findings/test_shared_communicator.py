"""Finding `shared-communicator`: transfers that need nothing of each other take turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.diagnosed import Row, findings, lost_time, report_of, step_before
from tests.support.simulated_run import step_ns
from tests.support.simulated_schemes import DKV, KV, SEND_RECV_KERNEL, Ring

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
    assert {entry["name"] for entry in row["evidence"]} == {SEND_RECV_KERNEL}
    n_behind = 3 + 2  # per rank: kv 1 and 2, dkv 0 and 1 and 2
    assert row["summary"].startswith(f"{4 * n_behind} transfers on ranks 0, 1, 2, 3 ")
    bare = findings(report_of(ring.but(aside_ns=0).hosts(), tmp_path))[KEY]
    assert row["value"] == pytest.approx(bare["value"], rel=0.05)


@pytest.mark.parametrize("aside_ns", [0, 20_000])
def test_beside_a_single_buffer(tmp_path: Path, aside_ns: int) -> None:
    """
    stream 7    [attention 1]                    [attention 2]
    stream 13                [kv 1][copy][dkv 0]                      kv 1 waits for attention 1, then for dkv 0
    """
    ring = Ring(dkv_stream=KV, n_buffers=1, transfer_ns=(800_000,), aside_ns=aside_ns)
    report = report_of(ring.hosts(), tmp_path)
    assert lost_time(report) == {KEY, ("single-buffer", None)}
    for key, gap_ns in ((KEY, aside_ns), (("single-buffer", None), 0)):
        assert {late for _, late in gaps(findings(report)[key])} == {gap_ns}


def gaps(row: Row) -> list[tuple[str, int]]:
    """Return what each pair of the evidence says of the delayed op, and by how much that starts behind its culprit."""
    pairs = zip(row["evidence"][::2], row["evidence"][1::2], strict=True)
    return [(delayed["what"], delayed["start_ns"] - culprit["end_ns"]) for delayed, culprit in pairs]


@pytest.mark.parametrize("transfer_ns", [250_000, 400_000])
def test_what_waits_for_something_else_last_is_no_evidence(tmp_path: Path, transfer_ns: int) -> None:
    """
    stream 7    [attention 1]            [attention 2]
    stream 13                [kv 1][dkv 1]            [kv 2][dkv 2]       dkv 1 waits for kv 1; kv 2 is behind dkv 1
                                                                          and waits for the buffer
    """
    ring = Ring(dkv_stream=KV, n_buffers=1, transfer_ns=(transfer_ns,), aside_ns=20_000)
    found = findings(report_of(ring.hosts(), tmp_path))
    assert set(gaps(found[KEY])) == {("waits for the communicator", 20_000)}
    assert set(gaps(found["single-buffer", None])) == {("waits for the buffer", 0)}
    assert " of them starting when that ends" in found[KEY]["summary"]


def test_where_something_else_is_waited_for_nothing_is_said_to_wait(tmp_path: Path) -> None:
    """
    host        launch kv 0 [synchronize] launch attention 0 ... launch dkv 0 [synchronize] launch kv 1
    stream 13              [kv 0     ]                                [dkv 0]               [kv 1]
    """
    ring = Ring(dkv_stream=KV, transfer_ns=(800_000,), blocks_host=True)
    row = findings(report_of(ring.hosts(), tmp_path))[KEY]
    assert row["after"] == ["missing-event (host-sync)"]
    assert {what for what, _ in gaps(row)} == {"is behind another transfer of the communicator"}
    assert min(late for _, late in gaps(row)) > 2_000
    assert "wait" not in row["summary"]
