"""Transfers between ranks: when they start and end in the virtual clock, and what happens when a rank fails.

A hop of 1000 bytes takes 1 us of latency and 1 us of transfer. Its launch costs the host 4 us, so it can start
at 4 us; a kernel's launch costs 3 us.
"""

from __future__ import annotations

from typing import Any

HOP_NS = 2_000


def ops(records: Any, rank: int) -> list[tuple[str, int, int, int]]:
    """Return (name, start, end, stream) of a rank's ops in order of start."""
    return sorted(
        ((op.name, op.start_ns, op.end_ns, op.stream) for op in records[rank].ops),
        key=lambda op: (op[1], op[3]),
    )


def test_only_a_late_ranks_neighbours_wait_for_it(programs: dict[str, Any]) -> None:
    """Rank 1 arrives at 103 us. Ranks 0 and 2 exchange with it and start at 4; rank 3 does not know of it.

    rank 0   [4 ..........................105]
    rank 1   work[3 ............103][103..105]
    rank 2   [4 ..........................105]
    rank 3   [4..6]
    """
    records = programs["late_rank"]
    name = "cptrace_cpu::gloo_SendRecv"
    assert ops(records, 0) == [(name, 4_000, 105_000, 7)]
    assert ops(records, 1) == [("work", 3_000, 103_000, 7), (name, 103_000, 105_000, 7)]
    assert ops(records, 2) == [(name, 4_000, 105_000, 7)]
    assert ops(records, 3) == [(name, 4_000, 4_000 + HOP_NS, 7)]


def test_one_communicator_runs_its_transfers_one_after_another(programs: dict[str, Any]) -> None:
    """Hops of 100,000 bytes (101 us) on two free streams, launched at 4 and 8 us, share a communicator.

    stream 7    [4 .... 105]
    stream 13   ..........[105 .... 206]
    """
    for rank in (0, 1):
        assert [op[1:] for op in ops(programs["one_communicator"], rank)] == [
            (4_000, 105_000, 7),
            (105_000, 206_000, 13),
        ]


def test_two_communicators_run_theirs_side_by_side(programs: dict[str, Any]) -> None:
    """The same with a communicator each.

    stream 7    [4 .... 105]
    stream 13     [8 .... 109]
    """
    for rank in (0, 1):
        assert [op[1:] for op in ops(programs["two_communicators"], rank)] == [
            (4_000, 105_000, 7),
            (8_000, 109_000, 13),
        ]


def test_independent_communicators_do_not_care_about_each_others_order(programs: dict[str, Any]) -> None:
    assert [len(record.ops) for record in programs["crossed_streams"]] == [2, 2]


def test_a_failing_op_names_its_rank_and_reason_in_one_line(programs: dict[str, Any]) -> None:
    assert programs["failing_op"] == "rank 2 failed: ArithmeticError: no such number; all ranks were ended"


def test_a_killed_rank_is_named_and_not_its_peers(programs: dict[str, Any]) -> None:
    assert programs["killed_rank"] == "rank 1 failed: ended by SIGKILL (out of memory?); all ranks were ended"


def test_a_rank_that_leaves_silently_is_named(programs: dict[str, Any]) -> None:
    assert (
        programs["silent_rank"] == "rank 0 failed: ended without a result, exit code 3; all ranks were ended"
    )
