"""When ops would start and end if waits were gone, new, or ops took another time: drawn, random and real runs."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cptrace.api import open_trace
from cptrace.classify import classify
from cptrace.dependencies import Dependencies, find_dependencies
from cptrace.errors import TraceError
from cptrace.launches import find_launches
from cptrace.outcome import NotApplicable
from cptrace.peers import Arrivals, find_arrivals
from cptrace.replay import RESOURCES, Changes, Recording, make_recording, replay, step_times
from cptrace.trace import Trace
from tests.support.plain_replay import PlainReplay, WaitsForItself
from tests.support.random_runs import Call, calls, write_run
from tests.support.shared_traces import ROOT, nsys_traces, shared_traces
from tests.support.tiny_export import NONE, SYNCHRONIZATION, TinyExport, global_pid

COMM = "ncclDevKernel_SendRecv()"
SAMPLES = sorted((ROOT / "samples").glob("*.sqlite"))


class Loaded(NamedTuple):
    trace: Trace
    dependencies: Dependencies
    arrivals: Arrivals | NotApplicable
    recording: Recording

    def rows(self, *names: str) -> np.ndarray:
        """Return a mask of the ops of these names."""
        return self.trace.ops["name"].isin(names).to_numpy()

    def row(self, name: str) -> int:
        return int(np.flatnonzero(self.rows(name))[0])

    def times(self, changes: Changes | None = None) -> dict[str, tuple[int, int]]:
        """Return start and end of each op by its name."""
        done = replay(self.recording, changes or Changes())
        pairs = zip(done.start_ns.tolist(), done.end_ns.tolist(), strict=True)
        return dict(zip(self.trace.ops["name"].astype(str), pairs, strict=True))


def load(path: Path) -> Loaded:
    trace = open_trace(path)
    launches = find_launches(trace.ops, trace.api_calls)
    trace = classify(trace, launches)
    dependencies, arrivals = find_dependencies(trace, launches), find_arrivals(trace, launches)
    return Loaded(trace, dependencies, arrivals, make_recording(trace, dependencies, arrivals))


def added(*pairs: tuple[int, int]) -> dict[str, np.ndarray]:
    producer, consumer = np.array(pairs, np.int64).reshape(-1, 2).T
    return {"added_producer": producer, "added_consumer": consumer}


def wait(export: TinyExport, event: int, recorded_in: int, at: int, waited_in: int, until: int) -> None:
    """Add a record of an event and a wait for it."""
    correlation = 900 + at
    export.call("cudaEventRecord_v3020", at, at + 1, correlation=correlation)
    export.record(event, stream=recorded_in, correlation=correlation)
    export.sync(until, until + 1, stream=waited_in, event=event)


def block(export: TinyExport, start: int, end: int, *, stream: int = NONE, correlation: int) -> None:
    """Add a call that synchronises a stream, or the device."""
    export.call("cudaStreamSynchronize_v3020", start, end, correlation=correlation)
    columns = {"contextId": 1, "streamId": stream, "eventId": NONE, "globalPid": global_pid(100)}
    export.add(SYNCHRONIZATION, start=start, end=end, **columns, correlationId=correlation, syncType=0)


# ── drawn ──────────────────────────────────────────────────────────────────────────────────────────────


def test_without_the_op_before_it_an_op_starts_after_its_launch(tmp_path: Path) -> None:
    """
    stream 7    [10 a 50) [55 comm 75) [75 b 80)      launched at 1, 3 and 5, residual 5 of comm
    replayed       [9 comm 29) [29 b 34)
    """
    export = TinyExport().kernel("a", 10, 50, launch=1).kernel(COMM, 55, 75, launch=3)
    run = load(export.kernel("b", 75, 80, launch=5).write(tmp_path / "t.sqlite"))
    assert run.times(Changes(drop_previous=run.rows(COMM))) == {"a": (10, 50), COMM: (9, 29), "b": (29, 34)}
    both = Changes(drop_previous=run.rows(COMM), drop_residual=run.rows(COMM))
    assert run.times(both) == {"a": (10, 50), COMM: (4, 24), "b": (24, 29)}


def test_without_an_event_and_with_another(tmp_path: Path) -> None:
    """
    stream 7     [10 a 50) [50 b 60)
    stream 13              [52 comm 72)     waits for a
    replayed    comm right after its launch; or after b
    """
    export = TinyExport().kernel("a", 10, 50, launch=1).kernel("b", 50, 60, launch=3)
    export.kernel(COMM, 52, 72, stream=13, launch=20)
    wait(export, 1, recorded_in=7, at=2, waited_in=13, until=10)
    run = load(export.write(tmp_path / "t.sqlite"))
    free = {"drop_event": np.ones(1, bool)}
    assert run.times(Changes(**free))[COMM] == (23, 43)
    assert run.times(Changes(**free, **added((run.row("b"), run.row(COMM)))))[COMM] == (62, 82)


def test_a_violated_wait_stays_as_it_was_but_violates_no_other(tmp_path: Path) -> None:
    """
    stream 7     [10 a 50) [50 b 60)
    stream 13           [48 c 60)           waits for a, yet starts 2 before its end
    """
    export = TinyExport().kernel("a", 10, 50, launch=1).kernel("b", 50, 60, launch=3)
    export.kernel("c", 48, 60, stream=13, launch=20)
    wait(export, 1, recorded_in=7, at=2, waited_in=13, until=10)
    run = load(export.write(tmp_path / "t.sqlite"))
    longer = run.recording.duration_ns + 10 * run.rows("a")
    assert run.times(Changes(duration_ns=longer))["c"] == (58, 70)
    assert run.times(Changes(**added((run.row("b"), run.row("c")))))["c"] == (60, 72)


def test_a_transfer_ends_after_the_last_of_its_participants_arrives(tmp_path: Path) -> None:
    """
    rank 0    [0 a 10) [10 -- comm -- 40)            comm waits for rank 1 until 30, then takes 10
    rank 1    [0 ---- b ---- 30) [30 comm 40) [40 c 45)
    """
    export = TinyExport().kernel("a", 0, 10).kernel(COMM, 10, 40)
    there = {"pid": 101, "device": 1}
    export.kernel("b", 0, 30, **there).kernel(COMM, 30, 40, **there).kernel("c", 40, 45, **there)
    run = load(export.write(tmp_path / "t.sqlite"))
    assert run.recording.duration_ns.tolist() == [10, 30, 10, 10, 5]
    shorter = np.where(run.rows("b"), 5, run.recording.duration_ns)
    done = replay(run.recording, Changes(duration_ns=shorter))
    assert (done.start_ns.tolist(), done.end_ns.tolist()) == ([0, 0, 10, 5, 20], [10, 5, 20, 20, 25])
    slower = np.where(run.rows(COMM), 25, run.recording.duration_ns)
    done = replay(run.recording, Changes(duration_ns=slower))
    assert done.end_ns.tolist() == [10, 30, 55, 55, 60]


def test_an_op_that_ended_before_another_arrived_did_not_wait_for_it(tmp_path: Path) -> None:
    """
    rank 0    [0 a 10) [10 comm 20) [20 b 25)
    rank 1                                      [30 comm 40)      which may have waited for rank 0
    """
    export = TinyExport().kernel("a", 0, 10).kernel(COMM, 10, 20).kernel("b", 20, 25)
    run = load(export.kernel(COMM, 30, 40, pid=101, device=1).write(tmp_path / "t.sqlite"))
    assert run.recording.meetings.is_met.tolist() == [False, False, False, True]
    longer = np.where(run.rows("a"), 50, run.recording.duration_ns)
    done = replay(run.recording, Changes(duration_ns=longer))
    assert (done.start_ns.tolist(), done.end_ns.tolist()) == ([0, 50, 60, 30], [50, 60, 65, 60])


def test_waits_that_cannot_have_been_are_left_out(tmp_path: Path) -> None:
    """
    rank 0, stream 7     [10 comm ----------------- 40)    then e is recorded
    rank 0, stream 13         [20 b 25)                    waits for e, but ran before rank 1 had arrived
    rank 0, host         [5 sync stream 7 8)               comm was launched at 1, and has not even started
    rank 1                              [30 comm 40)
    """
    export = TinyExport().kernel(COMM, 10, 40, launch=1).kernel("b", 20, 25, stream=13, launch=12)
    wait(export, 1, recorded_in=7, at=3, waited_in=13, until=10)
    block(export, 5, 8, stream=7, correlation=904)
    export.kernel(COMM, 30, 40, pid=101, device=1)
    run = load(export.write(tmp_path / "t.sqlite"))
    assert run.recording.meetings.is_met.tolist() == [True, False, True]
    assert run.recording.is_event_kept.tolist() == [False]
    assert len(run.dependencies.blocking.sync) == 1
    assert run.recording.host.call.tolist() == []


def test_of_ops_that_start_together_the_one_that_ends_first_waits_for_none(tmp_path: Path) -> None:
    """
    stream 7     [10 a 30)     then e is recorded
    stream 13    [10 b 20)     waits for e
    """
    export = TinyExport().kernel("a", 10, 30, launch=1).kernel("b", 10, 20, stream=13, launch=5)
    wait(export, 1, recorded_in=7, at=2, waited_in=13, until=3)
    assert load(export.write(tmp_path / "t.sqlite")).recording.is_event_kept.tolist() == [False]


def test_an_op_that_made_room_before_another_arrived_did_not_wait_for_it(tmp_path: Path) -> None:
    """
    rank 0    [10 comm ---------------- 40)
    rank 0              [20 b -- 35)          in the same stream
    rank 1                      [30 comm 40)
    """
    export = TinyExport().kernel(COMM, 10, 40).kernel("b", 20, 35)
    run = load(export.kernel(COMM, 30, 40, pid=101, device=1).write(tmp_path / "t.sqlite"))
    assert run.recording.meetings.is_met.tolist() == [False, False, True]


def blocked_run(path: Path) -> Loaded:
    """
    host       launch a [3 -- sync stream 7 -- 52)  launch b (60)     [70 sync 71)   launch c (80)
    stream 7        [10 a 50)
    stream 13                                            [64 b 68)                       [83 c 90)
    """
    export = TinyExport().kernel("a", 10, 50, launch=1)
    block(export, 3, 52, stream=7, correlation=901)
    export.kernel("b", 64, 68, stream=13, launch=60)
    block(export, 70, 71, correlation=902)
    return load(export.kernel("c", 83, 90, stream=13, launch=80).write(path))


def test_launches_follow_the_call_that_blocked_the_host(tmp_path: Path) -> None:
    run = blocked_run(tmp_path / "t.sqlite")
    shorter = np.where(run.rows("a"), 20, run.recording.duration_ns)
    # The call returns 2 after a, at 32: 20 earlier, and all behind it.
    assert run.times(Changes(duration_ns=shorter)) == {"a": (10, 30), "b": (44, 48), "c": (63, 70)}


def test_a_call_that_does_not_block_costs_what_a_quick_one_does(tmp_path: Path) -> None:
    run = blocked_run(tmp_path / "t.sqlite")
    # The quick one takes 1, so the first ends at 4 in place of 52; then the second finds b, which ends at 20, done;
    # but it does block until a is done, and returns as late as calls do, 2 after it.
    first = Changes(drop_blocking=np.array([True, False]))
    assert run.times(first) == {"a": (10, 50), "b": (16, 20), "c": (64, 71)}
    both = Changes(drop_blocking=np.array([True, True]))
    assert run.times(both) == {"a": (10, 50), "b": (16, 20), "c": (35, 42)}


def test_launches_move_together_where_the_host_pauses_less(tmp_path: Path) -> None:
    """
    As `blocked_run`, whose host takes 9 from its first call to the launch of b, 9 from there to its second, and 10
    from there to the launch of c: they become 4 each. But then the second call has to wait for b until 65.
    """
    run = blocked_run(tmp_path / "t.sqlite")
    times = run.times(Changes(host_gap_ns=4))
    assert times == {"a": (10, 50), "b": (59, 63), "c": (71, 78)}
    assert run.times(Changes(host_gap_ns=100)) == run.times()


def test_an_op_without_its_launch_starts_when_its_stream_is_free(tmp_path: Path) -> None:
    """
    host                    launch b
    stream 7    [10 a 20)            [63 b 70)
    """
    export = TinyExport().kernel("a", 10, 20, launch=1).kernel("b", 63, 70, launch=60)
    run = load(export.write(tmp_path / "t.sqlite"))
    assert run.times(Changes(drop_launch=run.rows("b")))["b"] == (22, 29)
    # With nothing left to wait for, it starts when it did.
    assert run.times(Changes(drop_launch=run.rows("b"), drop_previous=run.rows("b")))["b"] == (63, 70)


def test_a_launch_of_a_thread_that_never_blocks_moves_with_the_one_that_does(tmp_path: Path) -> None:
    """
    main thread     launch a [3 -- sync -- 52)                [70 sync 71)
    other thread                              launch b (60)
    """
    export = TinyExport().kernel("a", 10, 50, launch=1)
    block(export, 3, 52, stream=7, correlation=901)
    block(export, 70, 71, stream=7, correlation=902)
    run = load(export.kernel("b", 64, 68, stream=13, launch=60, thread=7).write(tmp_path / "t.sqlite"))
    shorter = np.where(run.rows("a"), 20, run.recording.duration_ns)
    assert run.times(Changes(duration_ns=shorter))["b"] == (44, 48)


def test_attention_kernels_of_a_device_take_turns(tmp_path: Path) -> None:
    """
    stream 7    [10_000 flash_fwd_kernel 50_000)
    stream 13                                     [50_000 flash_fwd_splitkv_kernel 70_000)    launched at 3
    """
    first, second = "flash_fwd_kernel", "flash_fwd_splitkv_kernel"
    export = TinyExport().kernel(first, 10_000, 50_000, launch=1)
    run = load(export.kernel(second, 50_000, 70_000, stream=13, launch=3).write(tmp_path / "t.sqlite"))
    resources = run.recording.resources
    assert [RESOURCES[kind] for kind in resources.kind] == ["device"]
    assert run.recording.residual_ns.tolist() == [9_998, 0]
    shorter = np.where(run.rows(first), 10_000, run.recording.duration_ns)
    assert run.times(Changes(duration_ns=shorter))[second] == (20_000, 40_000)
    assert run.times(Changes(drop_resource=np.ones(1, bool)))[second] == (4, 20_004)


def test_transfers_of_one_communicator_take_turns(tmp_path: Path) -> None:
    """
    stream 13    [10_000 comm 50_000)
    stream 14                         [51_000 comm 2 70_000)     launched at 3: nothing else held it back
    stream 15                                           [73_000 comm 3 90_000)     launched at 5: 3_000 too late to say
    """
    export = TinyExport().kernel(COMM, 10_000, 50_000, stream=13, launch=1)
    export.kernel("ncclDevKernel_AllReduce()", 51_000, 70_000, stream=14, launch=3)
    export.kernel("ncclDevKernel_AllGather()", 73_000, 90_000, stream=15, launch=5)
    run = load(export.write(tmp_path / "t.sqlite"))
    resources = run.recording.resources
    assert [RESOURCES[kind] for kind in resources.kind] == ["communicator"]
    assert (resources.producer.tolist(), resources.consumer.tolist()) == ([0], [1])
    shorter = np.where(run.rows(COMM), 10_000, run.recording.duration_ns)
    assert run.times(Changes(duration_ns=shorter))["ncclDevKernel_AllReduce()"] == (21_000, 40_000)


def test_ops_that_are_made_to_wait_for_each_other_are_refused(tmp_path: Path) -> None:
    export = TinyExport().kernel("a", 10, 20, launch=1).kernel("b", 20, 30, stream=13, launch=3)
    run = load(export.write(tmp_path / "t.sqlite"))
    with pytest.raises(
        TraceError, match=r"op [01] \([ab], rank 0\) and op [01] \([ab], rank 0\) wait for each other"
    ):
        replay(run.recording, Changes(**added((0, 1), (1, 0))))
    # An edge against the recorded order is none.
    assert run.times(Changes(**added((1, 0)))) == {"b": (20, 30), "a": (38, 48)}


def test_steps_of_a_replay(tmp_path: Path) -> None:
    """
    rank 0   [0 a 10) [10 b 30)         steps 0 and 1
    rank 1   [0 c 25)                   step 0
    """
    export = TinyExport().kernel("a", 0, 10).kernel("b", 10, 30).kernel("c", 0, 25, pid=101, device=1)
    run = load(export.write(tmp_path / "t.sqlite"))
    rows = np.array([run.row(name) for name in "abc"])
    steps = step_times(run.recording, replay(run.recording), rows, np.array([0, 1, 0]))
    assert list(zip(steps.rank.tolist(), steps.step.tolist(), steps.time_ns.tolist(), strict=True)) == [
        (0, 0, 10),
        (0, 1, 20),
        (1, 0, 25),
    ]
    assert (steps.job_step.tolist(), steps.job_time_ns.tolist()) == ([0, 1], [25, 20])


def test_nothing_to_replay(tmp_path: Path) -> None:
    export = TinyExport().call("cudaDeviceSynchronize_v3020", 1, 2, correlation=1)
    run = load(export.write(tmp_path / "t.sqlite"))
    assert run.times() == {}
    none = np.zeros(0, np.int64)
    assert step_times(run.recording, replay(run.recording), none, none).job_step.tolist() == []


# ── random ─────────────────────────────────────────────────────────────────────────────────────────────


def random_changes(run: Loaded, seed: int, kinds: Iterable[str]) -> Changes:
    """Return changes of the kinds asked for, drawn with a seed."""
    draw = np.random.default_rng(seed)
    n_ops = len(run.trace.ops)
    sizes = {
        "drop_previous": n_ops,
        "drop_event": len(run.dependencies.events.producer),
        "drop_blocking": len(run.dependencies.blocking.sync),
        "drop_launch": n_ops,
        "drop_resource": len(run.recording.resources.producer),
        "drop_residual": n_ops,
    }
    values: dict[str, object] = {}
    for kind in kinds:
        if kind in sizes:
            values[kind] = draw.random(sizes[kind]) < 0.3
        elif kind == "duration_ns":
            values[kind] = run.recording.duration_ns * draw.integers(0, 3, n_ops)
        elif kind == "host_gap_ns":
            values[kind] = int(draw.integers(0, 6)) * 700
        elif n_ops:
            values |= added(*map(tuple, draw.integers(0, n_ops, (2, 2)).tolist()))
    return Changes(**values)


KINDS = (
    "drop_previous",
    "drop_event",
    "drop_blocking",
    "drop_launch",
    "drop_resource",
    "drop_residual",
    "duration_ns",
    "host_gap_ns",
    "added",
)


# Shrinking a failing example would take minutes and gain little: print the example, and draw it.
@settings(max_examples=100, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    st.lists(calls, max_size=25),
    st.sampled_from((1, 700)),
    st.integers(0, 10**6),
    st.sets(st.sampled_from(KINDS)),
)
def test_random_runs_are_replayed_as_a_plain_replay_does(
    tmp_path_factory: pytest.TempPathFactory, program: list[Call], unit_ns: int, seed: int, kinds: set[str]
) -> None:
    run = load(write_run(program, unit_ns, seed, tmp_path_factory.mktemp("run") / "t.sqlite"))
    recorded = list(zip(run.trace.ops["start_ns"].tolist(), run.trace.ops["end_ns"].tolist(), strict=True))
    plain = PlainReplay(run.trace, run.dependencies, run.arrivals)
    assert plain.times(Changes()) == recorded
    for changes in (Changes(), random_changes(run, seed, sorted(kinds))):
        try:
            expected = plain.times(changes)
        except WaitsForItself:
            with pytest.raises(TraceError, match="wait for each other"):
                replay(run.recording, changes)
            assert len(changes.added_producer)
            continue
        done = replay(run.recording, changes)
        assert list(zip(done.start_ns.tolist(), done.end_ns.tolist(), strict=True)) == expected


def test_random_runs_have_all_that_a_replay_knows(tmp_path: Path) -> None:
    """What the test above compares is there to compare."""
    seen = dict.fromkeys(("events", "blocked", "met", *RESOURCES, "late", "early", "followers"), 0)
    for seed in range(40):
        draw = random.Random(seed)
        program = [
            Call(
                draw.choice(("compute", "attention", "comm", "record", "wait", "sync-event", "sync-device")),
                draw.randint(7, 9),
                draw.randint(1, 2),
                draw.choice((0, 0, 1)),
                draw.randint(1, 20),
                draw.randint(0, 12),
            )
            for _ in range(25)
        ]
        run = load(write_run(program, 700, seed, tmp_path / f"{seed}.sqlite"))
        recording = run.recording
        seen["events"] += int(recording.is_event_kept.sum())
        seen["blocked"] += len(recording.host.call)
        seen["met"] += int(recording.meetings.is_met.sum())
        seen["late"] += int((recording.residual_ns > 0).sum())
        seen["early"] += int((recording.residual_ns < 0).sum())
        seen["followers"] += int(recording.host.has_anchor.sum())
        for number, kind in enumerate(RESOURCES):
            seen[kind] += int((recording.resources.kind == number).sum())
    assert min(seen.values()) > 0, seen


# ── real ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", [*SAMPLES, *nsys_traces()], ids=lambda path: path.stem)
def test_without_changes_all_is_as_recorded(path: Path) -> None:
    assert_as_recorded(load(path).recording)


def test_without_changes_profiler_traces_are_as_recorded() -> None:
    folder = shared_traces()
    if folder is None:
        pytest.skip("needs the public traces in ../shared/traces, which is absent")
    for path in sorted((folder / "kineto").glob("*.gz")):
        assert_as_recorded(load(path).recording)


def assert_as_recorded(recording: Recording) -> None:
    done = replay(recording)
    assert np.array_equal(done.start_ns, recording.start_ns)
    assert np.array_equal(done.end_ns, recording.end_ns)


@pytest.mark.parametrize(
    "path", [path for path in SAMPLES if "virtual" in path.stem], ids=lambda path: path.stem
)
def test_on_the_virtual_clock_nothing_is_unexplained(path: Path) -> None:
    """There an op starts at the very moment at which all it waits for is done; the device's turns included."""
    assert not load(path).recording.residual_ns.any()


@pytest.mark.parametrize("is_forward", [True, False])
def test_another_link_is_predicted_to_the_nanosecond(is_forward: bool) -> None:
    """The same program ran with a fast and with a slow link: from the one and the durations of the other, the other."""
    one, other = (
        load(ROOT / "samples" / f"{name}.sqlite") for name in ("ring-virtual", "ring-slow-link-virtual")
    )
    if is_forward:
        known, there = one, matching_rows(one, other)
        duration = known.recording.duration_ns.copy()
        duration[there] = other.recording.duration_ns
        wanted = other.recording
        done = replay(known.recording, Changes(duration_ns=duration))
        found = (done.start_ns[there], done.end_ns[there])
        assert np.array_equal(found[0], wanted.start_ns)
        assert np.array_equal(found[1], wanted.end_ns)
    else:
        there = matching_rows(one, other)
        done = replay(other.recording, Changes(duration_ns=one.recording.duration_ns[there]))
        assert np.array_equal(done.start_ns, one.recording.start_ns[there])
        assert np.array_equal(done.end_ns, one.recording.end_ns[there])


def matching_rows(longer: Loaded, shorter: Loaded) -> np.ndarray:
    """Return the row in the longer run of each op of the shorter: the k-th of the same stream of the same rank."""
    keys = []
    for run in (longer, shorter):
        ops = run.trace.ops
        turn = ops.groupby(["rank", "stream"]).cumcount()
        keys.append(pd.MultiIndex.from_arrays([ops["rank"], ops["stream"], turn]))
    rows = keys[0].get_indexer(keys[1])
    assert (rows >= 0).all()
    return rows
