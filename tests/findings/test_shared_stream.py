"""Finding `shared-stream`: transfers and attention in one stream, in an order that neither needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.diagnosed import findings, lost_time, not_looked_for, report_of, step_before
from tests.support.simulated_run import step_ns
from tests.support.simulated_schemes import COMPUTE, DKV, KV, Ring, ulysses

KEY = ("shared-stream", None)


@pytest.mark.parametrize("attention_first", [False, True])
def test_a_ring_in_one_stream(tmp_path: Path, attention_first: bool) -> None:
    """
    stream 7     [kv 0][attention 0][kv 1][attention 1][attention 2]
    mended       [attention 0][attention 1][attention 2]
    and          [kv 0]       [kv 1]
    """
    ring = Ring(kv_stream=COMPUTE, attention_first=attention_first, is_forward_only=True)
    report = report_of(ring.hosts(), tmp_path)
    assert lost_time(report) == {KEY}
    row = findings(report)[KEY]
    assert step_before(row) == step_ns(ring.hosts())
    assert row["predicted_step_ns"] == pytest.approx(step_ns(ring.but(kv_stream=KV).hosts()), abs=2_000)
    assert (row["severity"], row["confidence"], row["rank"]) == ("warning", "high", None)
    delayed, culprit = row["evidence"][:2]
    assert delayed["stream"] == culprit["stream"] == COMPUTE
    assert culprit["end_ns"] == delayed["start_ns"]


def test_what_a_slow_host_hides_is_not_said_to_wait(tmp_path: Path) -> None:
    """
    host        launch kv 0        launch attention 0        launch kv 1
    stream 7               [kv 0]                    [attention 0]      [kv 1]
    """
    ring = Ring(kv_stream=COMPUTE, pause_ns=600_000, is_forward_only=True)
    row = findings(report_of(ring.hosts(), tmp_path))[KEY]
    assert [name.split()[0] for name in row["after"]] == ["late-launch"]
    delayed, culprit = row["evidence"][:2]
    assert delayed["start_ns"] > culprit["end_ns"]
    assert "starts later" in delayed["what"]


def test_a_backward_pass_in_one_stream(tmp_path: Path) -> None:
    ring = Ring(kv_stream=COMPUTE, dkv_stream=COMPUTE, attention_first=True)
    row = findings(report_of(ring.hosts(), tmp_path))[KEY]
    mended = step_ns(ring.but(kv_stream=KV, dkv_stream=DKV).hosts())
    assert row["predicted_step_ns"] == pytest.approx(mended, abs=2_000)


def test_streams_of_their_own(tmp_path: Path) -> None:
    assert not lost_time(report_of(Ring().hosts(), tmp_path))


@pytest.mark.parametrize("stream", [COMPUTE, KV])
def test_ulysses_needs_its_order_in_any_stream(tmp_path: Path, stream: int) -> None:
    """
    stream 7     [q][k][v][attention][out]      every exchange is needed where it is
    """
    found = findings(report_of(ulysses(stream), tmp_path))
    assert set(found) == {("required-order", "data-flow")}


def test_without_a_known_scheme_it_is_not_looked_for(tmp_path: Path) -> None:
    """As the first, but nothing names the ops, and their mix fits no scheme."""
    report = report_of(Ring(kv_stream=COMPUTE, dkv_stream=COMPUTE).hosts(), tmp_path, has_ranges=False)
    assert report.rows("schemes")[0]["scheme"] == "unknown"
    assert KEY not in findings(report)
    assert "no context-parallel scheme was recognised" in not_looked_for(report)["shared-stream"]
