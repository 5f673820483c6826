"""Finding `required-order`: exposed where the data flow needs it, and told so that nobody tries a second stream."""

from __future__ import annotations

from pathlib import Path

import pytest

import cptrace
from cptrace.requests import ScopeRequest
from tests.support.diagnosed import findings, not_looked_for, report_of
from tests.support.simulated_run import Host, write
from tests.support.simulated_schemes import COMPUTE, FORWARD_KERNEL, SEND_RECV_KERNEL, Ring, ulysses
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


APART, INCLUDED = "waiting for other ranks apart", "waiting for other ranks included"
BOUND_RING = Ring(transfer_ns=(800_000,), is_forward_only=True)


@pytest.mark.parametrize(
    ("n_present", "is_labelled", "words"),
    [
        (4, True, APART),
        (1, True, f"{INCLUDED}, as it cannot be told apart"),
        (
            2,
            True,
            f"{INCLUDED}, as it cannot be told apart",
        ),  # each of them has a neighbour that is not there
        (3, True, f"{INCLUDED} where it cannot be told apart"),  # the one in the middle has both
        (1, False, f"{INCLUDED}, as it cannot be told apart"),
    ],
)
@pytest.mark.parametrize("scheme", ["ring", "ulysses"])
def test_waiting_is_only_called_apart_where_it_is(
    tmp_path: Path, scheme: str, n_present: int, is_labelled: bool, words: str
) -> None:
    """
    rank 0   [kv 0 waits for rank 1 | transfer]        rank 1 is not in the report: it may be all waiting
    """
    hosts = BOUND_RING.hosts() if scheme == "ring" else ulysses(COMPUTE, n_ranks=4)
    if scheme == "ulysses" and n_present == 3:
        words = f"{INCLUDED}, as it cannot be told apart"  # all exchange with all
    report = cptrace.analyze(write(hosts[:n_present], tmp_path / "t.sqlite", has_ranges=is_labelled))
    row = findings(report)[BOUND if scheme == "ring" else DATA_FLOW]
    assert f"{words})" in row["summary"]
    assert words == APART or row["confidence"] != "high"


@pytest.mark.parametrize(
    ("n_ranks", "n_steps", "over"),
    [
        (4, 2, " over all ranks and steps (31.0 % of"),
        (4, 1, " over all ranks (31.0 % of"),
        (1, 2, " over all steps (31.0 % of"),
        (1, 1, " (31.0 % of"),
    ],
)
def test_what_a_sum_is_over_is_said(tmp_path: Path, n_ranks: int, n_steps: int, over: str) -> None:
    ring = BOUND_RING.but(n_steps=n_steps, syncs_after_step=True)
    path = write(ring.hosts(), tmp_path / "t.sqlite")
    report = cptrace.analyze(path, cptrace.AnalyzeOptions(ScopeRequest(ranks=tuple(range(n_ranks)))))
    row = findings(report)[BOUND]
    assert row["value"] == n_ranks * n_steps * 3 * 300_000
    assert f"us{over}" in row["summary"] or f"ms{over}" in row["summary"]


def hybrid(exchange_ns: int, hop_ns: int) -> list[Host]:
    """Exchanges with one rank around a ring of two with another, forward."""
    hosts = [Host(rank) for rank in range(4)]
    for host in hosts:
        with host.scope("step"), host.scope("forward layer=0"):
            _exchange(host, "q", exchange_ns)
            host.record(1, COMPUTE)
            host.wait(1, 13)
            where = "pass=forward layer=0 hop=0"
            other = ((host.rank + 2) % 4,)
            text = f"send_recv {where} tensor=kv bytes=64"
            host.transfer(SEND_RECV_KERNEL, hop_ns, 13, label=text, peers=other)
            host.record(2, 13)
            host.launch(FORWARD_KERNEL, 500_000, label=f"attention {where}")
            host.wait(2, COMPUTE)
            host.launch(FORWARD_KERNEL, 500_000, label="attention pass=forward layer=0 hop=1")
            _exchange(host, "out", exchange_ns)
    return hosts


def _exchange(host: Host, tensor: str, ns: int) -> None:
    text = f"all_to_all pass=forward layer=0 hop=0 tensor={tensor} bytes=64"
    host.transfer(SEND_RECV_KERNEL, ns, COMPUTE, label=text, peers=(host.rank ^ 1,))


ALL_FLOW = "apart): needed before attention starts, or made of what it puts out"
MOST_FLOW = (
    "% of it needed before attention starts, or made of what it puts out; the rest longer than the attention"
)
MOST_BOUND = (
    "% of it longer than the attention that can run meanwhile, or with none to hide behind; the rest needed"
)


@pytest.mark.parametrize(
    ("exchange_ns", "hop_ns", "key", "words"),
    [
        (100_000, 400_000, DATA_FLOW, ALL_FLOW),  # the hop is hidden
        (100_000, 600_000, DATA_FLOW, f"66.7 {MOST_FLOW}"),
        (100_000, 900_000, BOUND, f"66.7 {MOST_BOUND}"),
    ],
)
def test_exchanges_and_hops_are_told_apart(
    tmp_path: Path, exchange_ns: int, hop_ns: int, key: tuple[str, str], words: str
) -> None:
    """
    stream 7    [q][attention 0]     [attention 1][out]       exchanges have nothing beside them
    stream 13      [kv 0            ]                         of a hop only what is longer than attention is exposed
    """
    row = findings(report_of(hybrid(exchange_ns, hop_ns), tmp_path))[key]
    assert row["value"] == 4 * (2 * exchange_ns + max(0, hop_ns - 500_000))
    assert words in row["summary"]
    assert ("--ulysses-size" in row["advice"]) == (key == DATA_FLOW)


def test_without_a_known_scheme_it_is_not_looked_for(tmp_path: Path) -> None:
    """
    stream 7    [flash]         [flash]
    stream 13          [broadcast]           no scheme of attention broadcasts
    """
    export = TinyExport().kernel(FORWARD_KERNEL, 0, 50_000, launch=1)
    export.kernel("ncclDevKernel_Broadcast_RING_LL", 50_000, 80_000, stream=13, launch=2)
    report = report_of(export.kernel(FORWARD_KERNEL, 80_000, 99_000, launch=3), tmp_path)
    assert "no context-parallel scheme was recognised" in not_looked_for(report)["required-order"]
