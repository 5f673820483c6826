"""What each op had to wait for: against a plain simulation of host programs, and on real exports."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cptrace.api import open_trace
from cptrace.dependencies import Dependencies, find_dependencies
from cptrace.launches import find_launches
from cptrace.trace import Trace
from tests.dependencies.program import FIRST_STREAM, Call, Program, write_programs
from tests.support.shared_traces import ROOT, require_trace
from tests.support.tiny_export import SYNCHRONIZATION, TinyExport, global_pid

LAUNCH, RECORD, WAIT = "launch", "record", "wait"


def load(path: Path) -> tuple[Trace, Dependencies]:
    trace = open_trace(path)
    return trace, find_dependencies(trace, find_launches(trace.ops, trace.api_calls))


def edges_by_name(trace: Trace, found: Dependencies) -> set[tuple[tuple[int, str], tuple[int, str]]]:
    """Return edges as pairs of (pid, kernel name)."""
    names = list(
        zip(
            (trace.ops["process"].to_numpy() - global_pid(0)) >> 24,
            trace.ops["name"].astype(str),
            strict=True,
        )
    )
    return {(names[p], names[c]) for p, c in zip(found.events.producer, found.events.consumer, strict=True)}


def test_a_wait_makes_the_next_op_of_its_stream_wait_for_what_was_recorded(tmp_path: Path) -> None:
    """
    stream 7    k0   record e
    stream 8                    wait e   k1
    """
    program = Program([Call(LAUNCH, 7), Call(RECORD, 7, 1), Call(WAIT, 8, 1), Call(LAUNCH, 8)])
    trace, found = load(write_programs([program], tmp_path / "t.sqlite"))
    assert edges_by_name(trace, found) == {((100, "k0"), (100, "k1"))}
    assert found.events.is_recorded.all()
    assert not found.has_previous.any()


def test_chains_of_streams_without_work_are_followed(tmp_path: Path) -> None:
    """
    stream 7    k0   record e1
    stream 8                     wait e1   record e2
    stream 9                                           wait e2   k1
    """
    program = Program([
        Call(LAUNCH, 7), Call(RECORD, 7, 1), Call(WAIT, 8, 1), Call(RECORD, 8, 2), Call(WAIT, 9, 2), Call(LAUNCH, 9),
    ])  # fmt: skip
    trace, found = load(write_programs([program], tmp_path / "t.sqlite"))
    assert edges_by_name(trace, found) == {((100, "k0"), (100, "k1"))}


CALLS = st.builds(
    Call,
    st.sampled_from([LAUNCH, LAUNCH, RECORD, WAIT]),
    st.integers(FIRST_STREAM, FIRST_STREAM + 3),
    st.integers(1, 3),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(CALLS, min_size=1, max_size=30), min_size=1, max_size=2), st.booleans())
def test_edges_of_any_program_are_those_of_a_plain_simulation(
    tmp_path_factory: pytest.TempPathFactory, calls: list[list[Call]], is_named: bool
) -> None:
    programs = [Program(c, 100 + n, is_named).simulate() for n, c in enumerate(calls)]
    path = write_programs(programs, tmp_path_factory.mktemp("program") / "t.sqlite")
    trace, found = load(path)
    expected = {((p.pid, f"k{a}"), (p.pid, f"k{b}")) for p in programs for a, b in p.edges}
    assert edges_by_name(trace, found) == expected
    assert len(found.events.producer) == len(expected)
    assert found.n_waits_paired == sum(program.n_paired for program in programs)
    assert found.n_waits == sum(call.what == WAIT for program in programs for call in program.calls)


def test_previous_op_is_that_of_the_same_stream_process_and_context(tmp_path: Path) -> None:
    export = TinyExport()
    for start, where in (
        (0, {}),
        (10, {"stream": 8}),
        (20, {}),
        (30, {"pid": 101}),
        (40, {"context": 2}),
        (50, {}),
    ):
        export.kernel(f"k{start}", start, start + 5, **where)
    trace, found = load(export.write(tmp_path / "t.sqlite"))
    names = trace.ops["name"].astype(str).to_numpy()
    previous = {names[i]: names[found.previous[i]] for i in np.flatnonzero(found.has_previous)}
    assert previous == {"k20": "k0", "k50": "k20"}


@pytest.mark.parametrize(
    ("sync", "name", "producer"),
    [
        ({"stream": 8}, "cudaStreamSynchronize_v3020", "k1"),
        ({}, "cudaDeviceSynchronize_v3020", "k0"),
        ({"event": 1}, "cudaEventSynchronize_v3020", "k0"),
        ({"event": 1}, "cudaEventQuery_v3020", None),
    ],
)
def test_blocking_calls_wait_for_the_last_op_to_end_in_their_scope(
    tmp_path: Path, sync: dict[str, int], name: str, producer: str | None
) -> None:
    """
    host        k0  record e  k1   (the call)   k2
    stream 7        [---------- k0 ----------]
    stream 8               [- k1 -]                 [- k2 -]
    """
    export = TinyExport().kernel("k0", 20, 900, launch=1).kernel("k1", 50, 300, stream=8, launch=30)
    export.kernel("k2", 950, 990, stream=8, launch=920)
    export.call("cudaEventRecord_v3020", 10, 11, correlation=70).record(1, correlation=70)
    columns = {"streamId": sync.get("stream", 4_294_967_295), "eventId": sync.get("event", 4_294_967_295)}
    where = {"contextId": 1, "globalPid": global_pid(100), "correlationId": 71, "syncType": 0}
    export.add(SYNCHRONIZATION, start=40, end=910, **columns, **where).call(name, 40, 910, correlation=71)
    trace, found = load(export.write(tmp_path / "t.sqlite"))
    names = trace.ops["name"].astype(str).to_numpy()
    blocking = found.blocking
    assert [names[p] for p in blocking.producer[blocking.has_producer]] == (
        [] if producer is None else [producer]
    )


def test_every_stream_wait_of_a_real_export_is_paired() -> None:
    _, found = load(require_trace("nsys/nsys-2022.1-stream-waits.sqlite"))
    assert (found.n_waits, found.n_waits_paired) == (40, 40)
    assert not found.events.is_recorded.any()  # before 2025.1 the export does not name the record


def test_every_event_sync_of_a_real_export_is_paired() -> None:
    trace, found = load(require_trace("nsys/nsys-2025.5-cuda-events.sqlite"))
    kinds = trace.syncs["kind"].astype(str).to_numpy()[found.blocking.sync]
    assert len(kinds) == 2005
    assert found.blocking.has_producer[kinds == "event"].sum() == 2000


def test_waits_without_any_record_are_counted_and_not_guessed() -> None:
    _, found = load(require_trace("nsys/nsys-2026.2-ulysses-2gpu.sqlite"))
    assert (found.n_waits, found.n_waits_paired, len(found.events.producer)) == (200, 0, 0)
    assert not found.has_records


@pytest.mark.parametrize("path", sorted((ROOT / "samples").glob("*.sqlite")), ids=lambda path: path.stem)
def test_no_op_of_a_sample_starts_before_what_it_waits_for_has_ended(path: Path) -> None:
    trace, found = load(path)
    start, end = trace.ops["start_ns"].to_numpy(), trace.ops["end_ns"].to_numpy()
    assert found.n_waits_paired == found.n_waits > 0
    assert (start[found.events.consumer] >= end[found.events.producer]).all()
    assert (start >= end[found.previous])[found.has_previous].all()
    assert (start >= found.launch_end_ns).all()
    assert found.blocking.has_producer.all()
