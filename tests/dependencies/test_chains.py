"""Chains of waits and records with no op in between: which edges they give, and that these stay few.

Walked one by one, the chains of most of these programs are too many to hold; 12 turns tell that by the number of edges
before the long program is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from cptrace.api import open_trace
from cptrace.dependencies import find_dependencies
from cptrace.launches import find_launches
from tests.dependencies.program import Call, Program, write_programs

LAUNCH, RECORD, WAIT = "launch", "record", "wait"
A, B, C = 1, 2, 3  # events


def edges_of(programs: list[Program], path: Path) -> list[tuple[str, str]]:
    """Return all edges by kernel name, sorted, one that is there twice twice."""
    trace = open_trace(write_programs(programs, path))
    edges = find_dependencies(trace, find_launches(trace.ops, trace.api_calls)).events
    names = trace.ops["name"].astype(str).to_numpy()
    return sorted(zip(names[edges.producer].tolist(), names[edges.consumer].tolist(), strict=True))


def hand_over(source: int, target: int, event: int) -> list[Call]:
    """Return the calls that make one stream wait for all that is queued in another."""
    return [Call(RECORD, source, event), Call(WAIT, target, event)]


def test_a_chain_leads_to_the_last_op_of_each_stream(tmp_path: Path) -> None:
    """k3 waits for k2, for k1 through wait b, and through wait a for k0, which is over when k2 starts.

    stream 7    k0  record a                     k2  wait b  record c
    stream 8    k1            wait a  record b
    stream 9                                                           wait c  k3
    """
    calls = [Call(LAUNCH, 7), Call(LAUNCH, 8), *hand_over(7, 8, A), Call(RECORD, 8, B), Call(LAUNCH, 7)]
    calls += [Call(WAIT, 7, B), *hand_over(7, 9, C), Call(LAUNCH, 9)]
    assert edges_of([Program(calls)], tmp_path / "t.sqlite") == [("k1", "k3"), ("k2", "k3")]


def test_a_wait_behind_the_record_is_not_part_of_the_chain(tmp_path: Path) -> None:
    """Nor is one in front of the last op, which has waited already.

    stream 7    k0  record a
    stream 8                  wait a  k1  record b                wait c  k3
    stream 9                                        k2  record c
    stream 10                                                                 wait b  k4
    """
    calls = [Call(LAUNCH, 7), *hand_over(7, 8, A), Call(LAUNCH, 8), Call(RECORD, 8, B), Call(LAUNCH, 9)]
    calls += [*hand_over(9, 8, C), Call(LAUNCH, 8), Call(WAIT, 10, B), Call(LAUNCH, 10)]
    assert edges_of([Program(calls)], tmp_path / "t.sqlite") == [("k0", "k1"), ("k1", "k4"), ("k2", "k3")]


def by_turns(n_turns: int) -> list[Call]:
    """Return streams that wait for each other again and again before either has work.

    stream 7    k0  record a          wait b  record a          wait b  ...  k2
    stream 8    k1            wait a  record b          wait a  record b     k3
    """
    turn = [*hand_over(7, 8, A), *hand_over(8, 7, B)]
    return [Call(LAUNCH, 7), Call(LAUNCH, 8), *turn * n_turns, Call(LAUNCH, 7), Call(LAUNCH, 8)]


@pytest.mark.parametrize("is_named", [True, False])
def test_streams_that_wait_for_each_other_by_turns_have_each_edge_once(
    tmp_path: Path, is_named: bool
) -> None:
    expected = [("k0", "k2"), ("k0", "k3"), ("k1", "k2"), ("k1", "k3")]
    for n_turns in (12, 5_000):
        program = Program(by_turns(n_turns), is_named=is_named)
        assert edges_of([program], tmp_path / f"{n_turns}.sqlite") == expected


def through_an_idle_stream(n_turns: int) -> list[Call]:
    """Return streams of which one only passes events on: a wait there stands for all before it, too.

    stream 7    k0  record a                             k2  record a
    stream 8                  wait a  record b                         wait a  record b
    stream 9                                    wait b  k1                               wait b  k3  ...
    """
    turn = [Call(LAUNCH, 7), *hand_over(7, 8, A), *hand_over(8, 9, B), Call(LAUNCH, 9)]
    return turn * n_turns


def behind_an_op_each(n_turns: int) -> list[Call]:
    """Return streams that wait for each other by turns, an op before each wait.

    stream 7    k0  record a                      k2  wait b  record a
    stream 8                  k1  wait a  record b                      k3  wait a  record b  ...
    """
    turn = [Call(LAUNCH, 7), Call(WAIT, 7, B), Call(RECORD, 7, A)]
    turn += [Call(LAUNCH, 8), Call(WAIT, 8, A), Call(RECORD, 8, B)]
    return turn * n_turns


@pytest.mark.parametrize("calls", [through_an_idle_stream, behind_an_op_each])
def test_edges_grow_as_the_program_does(tmp_path: Path, calls: Callable[[int], list[Call]]) -> None:
    for n_turns in (12, 2_000):
        program = Program(calls(n_turns)).simulate()
        found = edges_of([program], tmp_path / f"{n_turns}.sqlite")
        assert found == named(program.edges)
        assert n_turns <= len(found) < 4 * n_turns


def test_chains_of_a_rank_whose_kernels_were_lost_are_few(tmp_path: Path) -> None:
    """Of rank 1 the profiler kept the first and the last kernel of each stream, and all of its records and waits.

    stream 7    k0  record a                 wait b  (lost)  record a                     wait b  ...  k2
    stream 8                  wait a  k1  record b                    wait a  (lost)  record b         k3
    """
    whole = [Call(LAUNCH, 7), *hand_over(7, 8, A), Call(LAUNCH, 8), *hand_over(8, 7, B)]
    for n_turns in (12, 1_000):
        lost = [call for call in whole * (n_turns - 2) if call.what != LAUNCH]
        programs = [Program(whole * n_turns, 100), Program([*whole, *lost, *whole], 101)]
        expected = [edge for program in programs for edge in program.simulate().edges]
        assert edges_of(programs, tmp_path / f"{n_turns}.sqlite") == named(expected)


def named(edges: Iterable[tuple[int, int]]) -> list[tuple[str, str]]:
    """Return edges between ops by number in launch order as edges by kernel name, sorted."""
    return sorted((f"k{producer}", f"k{consumer}") for producer, consumer in edges)
