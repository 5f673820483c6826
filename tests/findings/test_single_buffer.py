"""Finding `single-buffer`: a transfer waits for the attention that reads the only buffer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.diagnosed import findings, lost_time, report_of, step_before
from tests.support.simulated_run import step_ns
from tests.support.simulated_schemes import COMPUTE, KV, Ring

KEY = ("single-buffer", None)


@pytest.mark.parametrize("transfer_ns", [100_000, 400_000, 700_000])
def test_one_buffer(tmp_path: Path, transfer_ns: int) -> None:
    """
    stream 7    [attention 0][attention 1]      [attention 2]      [attention 3]
    stream 13   [kv 0]                    [kv 1]             [kv 2]
    mended      [kv 0][kv 1]              [kv 2]         kv 2 overwrites what attention 1 has read
    """
    ring = Ring(n_buffers=1, transfer_ns=(transfer_ns,), is_forward_only=True)
    report = report_of(ring.hosts(), tmp_path)
    assert lost_time(report) == {KEY}
    row = findings(report)[KEY]
    assert step_before(row) == step_ns(ring.hosts())
    assert row["predicted_step_ns"] == step_ns(ring.but(n_buffers=2).hosts())
    transfer, attention = row["evidence"][:2]
    assert (transfer["stream"], attention["stream"]) == (KV, COMPUTE)
    assert transfer["start_ns"] == attention["end_ns"]


def test_backward_too(tmp_path: Path) -> None:
    ring = Ring(n_buffers=1)
    row = findings(report_of(ring.hosts(), tmp_path))[KEY]
    assert row["predicted_step_ns"] == step_ns(ring.but(n_buffers=2).hosts())


@pytest.mark.parametrize("transfer_ns", [100_000, 400_000, 700_000])
def test_two_buffers(tmp_path: Path, transfer_ns: int) -> None:
    """The same picture as mended above: each transfer waits for the attention two before its reader."""
    assert not lost_time(report_of(Ring(transfer_ns=(transfer_ns,)).hosts(), tmp_path))


def test_three_ranks_have_one_hop_that_waits_and_two_ranks_none(tmp_path: Path) -> None:
    """A ring of 2 receives once, into a buffer that nothing has read."""
    ring = Ring(n_ranks=3, n_buffers=1)
    assert lost_time(report_of(ring.hosts(), tmp_path)) == {KEY}
    assert not lost_time(report_of(ring.but(n_ranks=2).hosts(), tmp_path))


def test_in_one_stream_the_stream_is_the_cause(tmp_path: Path) -> None:
    ring = Ring(n_buffers=1, kv_stream=COMPUTE, is_forward_only=True)
    assert lost_time(report_of(ring.hosts(), tmp_path)) == {("shared-stream", None)}


def test_what_a_slow_host_hides_is_not_said_to_wait(tmp_path: Path) -> None:
    """
    host        ...                       launch kv 1
    stream 7    [attention 0][attention 1]
    stream 13   [kv 0]                          [kv 1]      an event orders kv 1 behind attention 1: not what held it up
    """
    ring = Ring(n_buffers=1, pause_ns=600_000, is_forward_only=True)
    row = findings(report_of(ring.hosts(), tmp_path))[KEY]
    assert [name.split()[0] for name in row["after"]] == ["late-launch"]
    transfer, attention = row["evidence"][:2]
    assert transfer["start_ns"] > attention["end_ns"]
    assert "starts later" in transfer["what"]
