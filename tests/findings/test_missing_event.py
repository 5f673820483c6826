"""Finding `missing-event`: order by a blocked host, or no order at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.diagnosed import findings, lost_time, not_looked_for, report_of, step_before
from tests.support.simulated_run import Host, step_ns
from tests.support.simulated_schemes import COMPUTE, FORWARD_KERNEL, GEMM_KERNEL, KV, SEND_RECV_KERNEL, Ring

HOST_SYNC = ("missing-event", "host-sync")
RACE = ("missing-event", "race")
CALLS_NS = 10_000  # a mended run makes other host calls, which may delay its first ops


def test_a_host_that_waits_for_each_transfer(tmp_path: Path) -> None:
    """
    host        launch kv 0 [ synchronize     ] launch attention 0, kv 1 [ synchronize    ]
    stream 13            [kv 0             ]                        [kv 1              ]
    stream 7                                     [attention 0]                           [attention 1]
    """
    ring = Ring(blocks_host=True)
    report = report_of(ring.hosts(), tmp_path)
    assert lost_time(report) == {HOST_SYNC}
    row = findings(report)[HOST_SYNC]
    assert step_before(row) == step_ns(ring.hosts())
    mended = step_ns(ring.but(blocks_host=False).hosts())
    assert row["predicted_step_ns"] == pytest.approx(mended, abs=CALLS_NS)
    assert "stream synchronize" in row["summary"]


def host_between(call: str) -> list[Host]:
    """Return a rank whose host makes a call behind each op of two streams by turns, in a trace of no scheme."""
    host = Host(0)
    with host.scope("step"):
        for number in range(6):
            stream = (KV, COMPUTE)[number % 2]
            host.launch(("ncclDevKernel_AllReduce_Sum_bf16", GEMM_KERNEL)[number % 2], 400_000, stream)
            host.record(number, stream)
            if call == "sync":
                host.sync(event=number)
            elif call == "poll":
                host.poll(number)
            host.pause(100_000)
    return [host]


def test_without_a_known_scheme_all_that_follows_is_taken_to_need_what_the_host_waited_for(
    tmp_path: Path,
) -> None:
    """
    host        launch a, record [synchronize] ... launch gemm, record [synchronize] ... launch a
    stream 13   [a             ]                                                         [a
    stream 7                                       [gemm             ]
    mended      [a             ]                   [a                ]     the host is ahead, and the order is kept
                                [gemm             ]
    """
    row = findings(report_of(host_between("sync"), tmp_path))[HOST_SYNC]
    assert row["confidence"] == "medium"
    assert "event synchronize" in row["summary"]
    assert row["predicted_step_ns"] == pytest.approx(6 * 400_000, abs=CALLS_NS)


@pytest.mark.parametrize("call", ["poll", "nothing"])
def test_a_poll_does_not_block(tmp_path: Path, call: str) -> None:
    """
    host        launch a, record, ask for it, launch gemm
    stream 13   [a            ][a            ]
    stream 7                [gemm        ][gemm        ]
    """
    assert not lost_time(report_of(host_between(call), tmp_path)) & {HOST_SYNC}


@pytest.mark.parametrize("n_steps", [1, 3])
def test_a_sync_at_the_end_of_a_step_serialises_nothing_within_it(tmp_path: Path, n_steps: int) -> None:
    ring = Ring(syncs_after_step=True, n_steps=n_steps)
    assert not lost_time(report_of(ring.hosts(), tmp_path))


def test_a_sync_that_costs_nothing_is_not_worth_a_word(tmp_path: Path) -> None:
    """
    host        launch kv 0, attention 0   [sync kv 0]  launch attention 1
    stream 13   [kv 0]
    stream 7    [attention 0                        ][attention 1]         launched long before its stream is free
    """
    host = Host(0)
    with host.scope("step"), host.scope("forward layer=0"):
        what = "send_recv pass=forward layer=0 hop=0 tensor=kv bytes=64"
        host.transfer(SEND_RECV_KERNEL, 100_000, KV, label=what, peers=())
        host.launch(FORWARD_KERNEL, 500_000, label="attention pass=forward layer=0 hop=0")
        host.sync(stream=KV)
        host.launch(FORWARD_KERNEL, 500_000, label="attention pass=forward layer=0 hop=1")
    assert HOST_SYNC not in findings(report_of([host], tmp_path))


@pytest.mark.parametrize("transfer_ns", [400_000, 600_000])
def test_attention_that_waits_for_nothing(tmp_path: Path, transfer_ns: int) -> None:
    """
    stream 7    [attention 0][attention 1][attention 2]      nothing orders attention 1 behind kv 0, whether it
    stream 13   [kv 0    ][kv 1    ]                         happened to be there in time (400 us) or not (600 us)
    """
    ring = Ring(waits=False, transfer_ns=(transfer_ns,))
    row = findings(report_of(ring.hosts(), tmp_path))[RACE]
    assert row["severity"] == "error"
    assert row["predicted_step_ns"] is None
    # Per rank: 3 attentions forward, and backward 3 attentions and 3 sums of gradients.
    assert row["value"] == 4 * 9
    n_early = int(row["summary"].split("; ")[1].split(" ")[0])
    assert (n_early > 0) == (transfer_ns > 500_000)
    reader, writer = row["evidence"][:2]
    assert (reader["stream"], writer["stream"]) == (COMPUTE, KV)


def test_a_ring_that_waits(tmp_path: Path) -> None:
    report = report_of(Ring().hosts(), tmp_path)
    assert not lost_time(report)
    assert not any("race" in name for name in not_looked_for(report))


def test_a_blocked_host_is_an_order(tmp_path: Path) -> None:
    """No event says that attention comes behind the transfer, and the host that launched it had waited for that."""
    assert RACE not in findings(report_of(Ring(blocks_host=True, waits=False).hosts(), tmp_path))


@pytest.mark.parametrize("waits", [False, True])
def test_without_the_records_of_events_a_race_cannot_be_told(tmp_path: Path, waits: bool) -> None:
    report = report_of(Ring(waits=waits).hosts(), tmp_path, has_records=False)
    assert RACE not in findings(report)
    assert "have no record in the trace" in not_looked_for(report)["missing-event (race)"]


def test_of_a_trace_without_any_event_nobody_knows_whether_there_were_none(tmp_path: Path) -> None:
    """
    stream 7    [attention 0][attention 1]
    stream 13   [kv 0   ]
    """
    host = Host(0)
    with host.scope("step"), host.scope("forward layer=0"):
        what = "send_recv pass=forward layer=0 hop=0 tensor=kv bytes=64"
        host.transfer(SEND_RECV_KERNEL, 100_000, KV, label=what, peers=())
        for hop in range(2):
            host.launch(FORWARD_KERNEL, 500_000, label=f"attention pass=forward layer=0 hop={hop}")
    report = report_of([host], tmp_path)
    assert RACE not in findings(report)
    assert "perhaps they were not traced" in not_looked_for(report)["missing-event (race)"]


@pytest.mark.parametrize("waits", [False, True])
def test_the_order_of_kernels_alone_tells_no_race(tmp_path: Path, waits: bool) -> None:
    """
    stream 7    gemm [attention 0][attention 1][attention 2] gemm      no label says what attention 1 reads, so that
    stream 13        [kv 0    ][kv 1    ]                              nobody can say that all waits are there, either
    """
    report = report_of(Ring(waits=waits, has_gemms=True).hosts(), tmp_path, has_ranges=False)
    assert RACE not in findings(report)
    assert "only guessed from the order of kernels" in not_looked_for(report)["missing-event (race)"]
