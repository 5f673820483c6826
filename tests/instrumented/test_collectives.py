"""Collectives between ranks: their results (checked on the ranks), and when they start and end.

A round takes 1 us of latency and 1 ns per byte of the busier direction of a rank's link; a launch costs the host
4 us, so the first can start there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from instrumented.runtime.collectives import Member, all_gather, all_reduce, all_to_all, reduce_scatter


def ops(records: Any, rank: int) -> list[tuple[str, int, int]]:
    """Return (name, start, end) of a rank's ops in order of start."""
    return sorted(
        ((op.name.removeprefix("cptrace_cpu::gloo_"), op.start_ns, op.end_ns) for op in records[rank].ops),
        key=lambda op: op[1],
    )


def test_a_collective_moves_data_when_all_members_have_arrived(programs: dict[str, Any]) -> None:
    """Three ranks; rank 2 arrives at 103 us. All-gather 2 x 8 bytes to two others, then the rest at once.

    rank 0, 1   [4 ......................104.032][105.048][107.08][108.096]
    rank 2      work[3 ......103][103 ....104.032]
    """
    end = 103_000 + 1_000 + 2 * 2 * 8
    times = [end]
    for n_bytes in (
        2 * 8,
        2 * 8 + 2 * 8,
        2 * 8,
    ):  # an all-reduce of 24 bytes is two rounds with a third of it
        n_rounds = 2 if len(times) == 2 else 1
        times.append(times[-1] + n_rounds * 1_000 + n_bytes)
    names = ["AllGather", "ReduceScatter", "AllReduce", "AllToAll"]
    expected = [(name, start, end) for name, start, end in zip(names[1:], times, times[1:], strict=False)]
    for rank in (0, 1):
        assert ops(programs["collectives"], rank) == [("AllGather", 4_000, end), *expected]
    assert ops(programs["collectives"], 2)[0] == ("work", 3_000, 103_000)
    assert ops(programs["collectives"], 2)[1:] == [("AllGather", 103_000, end), *expected]


def test_a_group_does_not_wait_for_another(programs: dict[str, Any]) -> None:
    records = programs["groups"]
    for rank in (0, 2):
        assert ops(records, rank) == [("AllGather", 4_000, 5_004)]
    assert ops(records, 3) == [("AllGather", 4_000, 104_004)]


def test_sums_are_rounded_once(programs: dict[str, Any]) -> None:
    assert len(programs["low_precision"]) == 3  # the ranks compared their results


def test_a_tensor_that_does_not_divide_is_refused(programs: dict[str, Any]) -> None:
    assert (
        "an all-reduce needs a contiguous tensor that divides into 2 parts" in programs["uneven_all_reduce"]
    )


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_sends_what_the_best_algorithm_would(rank: int) -> None:
    member, tensor = Member((0, 1, 2, 3), rank), torch.zeros(24)
    parts = list(tensor.chunk(4))
    cases = (
        (all_gather(member, [parts], [parts[0]]), 3 * 24),
        (reduce_scatter(member, [parts[0]], [parts]), 3 * 24),
        (all_to_all(member, parts, parts), 3 * 24),
        (all_reduce(member, tensor), 2 * 3 * 24),
    )
    for rounds, n_bytes in cases:
        assert sum(message.tensor.nbytes for step in rounds for message in step.sends) == n_bytes
        assert sum(step.link_bytes for step in rounds) == n_bytes
        assert all(step.peers == {0, 1, 2, 3} - {rank} for step in rounds)
