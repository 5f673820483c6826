"""Happens-before: drawn programs, and any program against a plain search for paths."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cptrace.api import open_trace
from cptrace.dependencies import find_dependencies
from cptrace.dependencies.reach import is_ordered
from cptrace.launches import find_launches
from tests.dependencies.program import Call, Program, write_programs
from tests.support.simulated_run import Host, write

LAUNCH, RECORD, WAIT = "launch", "record", "wait"


def ordered_pairs(path: Path) -> set[tuple[str, str]]:
    """Return the names of all pairs of ops of which the first is sure to end before the second starts."""
    trace = open_trace(path)
    found = find_dependencies(trace, find_launches(trace.ops, trace.api_calls))
    names = trace.ops["name"].astype(str).to_numpy()
    before, after = (
        np.array(side, np.int64) for side in zip(*product(range(len(names)), repeat=2), strict=True)
    )
    start, end = (trace.ops[name].to_numpy() for name in ("start_ns", "end_ns"))
    is_sure = is_ordered(found, start, end, before, after)
    return set(zip(names[before[is_sure]].tolist(), names[after[is_sure]].tolist(), strict=True))


def pairs_of(calls: list[Call], tmp_path: Path) -> set[tuple[str, str]]:
    return ordered_pairs(write_programs([Program(calls)], tmp_path / "t.sqlite"))


def test_a_stream_is_an_order_and_two_streams_are_none(tmp_path: Path) -> None:
    """
    stream 7    k0       k2
    stream 8        k1        all one after another, by luck
    """
    calls = [Call(LAUNCH, 7), Call(LAUNCH, 8), Call(LAUNCH, 7)]
    assert pairs_of(calls, tmp_path) == {("k0", "k2")}


def test_an_event_orders_all_before_the_record_and_all_behind_the_wait(tmp_path: Path) -> None:
    """
    stream 7    k0  k1  record e           k2
    stream 8                       wait e      k3  k4
    """
    calls = [Call(LAUNCH, 7), Call(LAUNCH, 7), Call(RECORD, 7, 1), Call(WAIT, 8, 1)]
    calls += [Call(LAUNCH, 7), Call(LAUNCH, 8), Call(LAUNCH, 8)]
    across = {(a, b) for a in ("k0", "k1") for b in ("k3", "k4")}
    assert pairs_of(calls, tmp_path) == {("k0", "k1"), ("k0", "k2"), ("k1", "k2"), ("k3", "k4"), *across}


def test_what_is_launched_before_the_wait_is_not_behind_it(tmp_path: Path) -> None:
    """
    stream 7    k0  record e
    stream 8                  k1  wait e  k2
    """
    calls = [Call(LAUNCH, 7), Call(RECORD, 7, 1), Call(LAUNCH, 8), Call(WAIT, 8, 1), Call(LAUNCH, 8)]
    assert pairs_of(calls, tmp_path) == {("k0", "k2"), ("k1", "k2")}


def test_a_path_may_lead_through_several_streams(tmp_path: Path) -> None:
    """
    stream 7    k0  record 1
    stream 8                  wait 1  k1  record 2
    stream 9                                        wait 2  k2
    """
    calls = [Call(LAUNCH, 7), Call(RECORD, 7, 1), Call(WAIT, 8, 1), Call(LAUNCH, 8), Call(RECORD, 8, 2)]
    calls += [Call(WAIT, 9, 2), Call(LAUNCH, 9)]
    assert pairs_of(calls, tmp_path) == {("k0", "k1"), ("k1", "k2"), ("k0", "k2")}


@pytest.mark.parametrize("is_blocked", [True, False])
def test_a_blocked_host_orders_what_it_launches_later(tmp_path: Path, is_blocked: bool) -> None:
    """
    host        launch k0  launch k1  [synchronize stream 7]  launch k2 (stream 8)  launch k3 (stream 9)
    stream 7    k0
    stream 9    k1
    """
    host = Host(0)
    host.launch("k0", 5_000, 7)
    host.launch("k1", 5_000, 9)
    if is_blocked:
        host.sync(stream=7)
    host.launch("k2", 5_000, 8)
    host.launch("k3", 5_000, 9)
    through_host = {("k0", "k2"), ("k0", "k3")} if is_blocked else set()
    assert ordered_pairs(write([host], tmp_path / "t.sqlite")) == {("k1", "k3"), *through_host}


def test_ranks_have_no_order_between_them(tmp_path: Path) -> None:
    """Both processes use stream 7 and event 1, which are not the same stream and event."""
    calls = [Call(LAUNCH, 7), Call(RECORD, 7, 1), Call(WAIT, 8, 1)]
    programs = [Program(calls, 100), Program([*calls[1:], Call(LAUNCH, 8)], 101)]
    assert ordered_pairs(write_programs(programs, tmp_path / "t.sqlite")) == set()


CALLS = st.builds(Call, st.sampled_from([LAUNCH, LAUNCH, RECORD, WAIT]), st.integers(7, 9), st.integers(1, 3))


def plain_order(program: Program) -> set[tuple[str, str]]:
    """Return the same by walking along streams and edges until nothing is added."""
    streams = [call.stream for call in program.calls if call.what == LAUNCH]
    pairs = {
        (a, b) for b in range(len(streams)) for a in range(b) if streams[a] == streams[b]
    } | program.edges
    while True:
        longer = pairs | {(a, d) for a, b in pairs for c, d in pairs if b == c}
        if longer == pairs:
            return {(f"k{a}", f"k{b}") for a, b in pairs}
        pairs = longer


@settings(max_examples=40, deadline=None)
@given(st.lists(CALLS, min_size=2, max_size=16))
def test_any_program_against_a_plain_search(
    tmp_path_factory: pytest.TempPathFactory, calls: list[Call]
) -> None:
    program = Program(calls).simulate()
    if not any(call.what == LAUNCH for call in calls):
        return
    path = write_programs([program], tmp_path_factory.mktemp("program") / "t.sqlite")
    assert ordered_pairs(path) == plain_order(program)
