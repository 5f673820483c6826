"""A run is broken in a known way and replayed without the fault: its steps take what they do in the run without it.

On the virtual clock both are exact, so the two agree to the nanosecond, or to the host calls that only one makes.
Which waits a run without the fault has is read from such a run; finding them in the broken one is the diagnoses'
business, not the replay's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cptrace.analyses import make_scope
from cptrace.analyses.scope import Scope
from cptrace.api import open_trace
from cptrace.dependencies import find_dependencies
from cptrace.replay import Changes, Recording, StepTimes, make_recording, replay, step_times
from cptrace.requests import ScopeRequest
from tests.support.command_line import cptrace

Fix = Callable[[Recording, Recording, np.ndarray, Scope], Changes]


class Run:
    """One run, ready to be replayed."""

    def __init__(self, path: Path) -> None:
        self.scope = make_scope(open_trace(path), ScopeRequest())
        dependencies = find_dependencies(self.scope.trace, self.scope.launches)
        self.recording = make_recording(self.scope.trace, dependencies, self.scope.arrivals)

    def steps(self, changes: Changes) -> StepTimes:
        """Return how long steps take in a replay; the runs have one each, and ops before it that are in none."""
        rows = np.flatnonzero(self.scope.is_inside)
        return step_times(
            self.recording, replay(self.recording, changes), rows, np.zeros(len(rows), np.int64)
        )

    def in_launch_order(self) -> np.ndarray:
        """Return the rows of ops, rank by rank, as the host launched them."""
        launch_ns = self.recording.dependencies.launch_start_ns
        return np.lexsort((launch_ns, self.scope.trace.ops["rank"].to_numpy()))


def other_waits(broken: Recording, sound: Recording, there: np.ndarray, scope: Scope) -> Changes:
    """Take all order between ops away, and blocked calls but those for the whole device; put the sound run's in."""
    waits = sound.dependencies
    later = np.flatnonzero(waits.has_previous)
    producers, consumers = (waits.events.producer, waits.previous[later]), (waits.events.consumer, later)
    kind = scope.trace.syncs["kind"].astype(str).to_numpy()[broken.dependencies.blocking.sync]
    return Changes(
        drop_previous=np.ones(len(there), bool),
        drop_event=np.ones(len(broken.is_event_kept), bool),
        drop_blocking=kind != "context",
        added_producer=there[np.concatenate(producers)],
        added_consumer=there[np.concatenate(consumers)],
    )


def other_durations(broken: Recording, sound: Recording, there: np.ndarray, scope: Scope) -> Changes:
    duration = broken.duration_ns.copy()
    duration[there] = sound.duration_ns
    return Changes(duration_ns=duration)


def shorter_pauses(broken: Recording, sound: Recording, there: np.ndarray, scope: Scope) -> Changes:
    return Changes(host_gap_ns=10_000)


# A replay makes no host calls that the broken run did not make: an event's record or wait takes 2 us, which may delay a
# step's first transfer. Pauses are cut to a round 10 us, where the sound run has some longer and some shorter ones.
CASES = [
    ("ring", "shared-stream", other_waits, 2_000),
    ("ring", "host-sync", other_waits, 0),
    ("ring", "shared-communicator", other_waits, 0),
    ("ring", "late-launch", shorter_pauses, 10_000),
    ("ring", "straggler:1", other_durations, 0),
    ("ring", "slow-link:1", other_durations, 0),
    ("te", "host-sync", other_waits, 0),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Return a function that returns the run of a scheme with a fault, made once."""
    folder, made = tmp_path_factory.mktemp("runs"), dict[tuple[str, ...], Run]()

    def make(scheme: str, *faults: str) -> Run:
        if (scheme, *faults) not in made:
            path = folder / f"{len(made)}.sqlite"
            options = ["--steps", "1", "--clock", "virtual", "--link-gbps", "0.2", "--no-check", "-o", path]
            broken = [word for fault in faults for word in ("--fault", fault)]
            done = cptrace("run", "--scheme", scheme, *options, *broken)
            assert done.exit_code == 0, done
            made[(scheme, *faults)] = Run(path)
        return made[(scheme, *faults)]

    return make


@pytest.mark.parametrize(
    ("scheme", "fault", "fix", "most_off_ns"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES]
)
def test_a_fault_taken_out_leaves_the_run_without_it(
    run: Callable[..., Run], scheme: str, fault: str, fix: Fix, most_off_ns: int
) -> None:
    sound, broken = run(scheme), run(scheme, fault)
    there = np.empty(len(sound.recording.ops), np.int64)
    there[sound.in_launch_order()] = broken.in_launch_order()
    names = [one.scope.trace.ops["name"].astype(str).to_numpy() for one in (sound, broken)]
    assert (names[0] == names[1][there]).all()
    wanted, recorded = sound.steps(Changes()), broken.steps(Changes())
    assert recorded.job_time_ns[0] > wanted.job_time_ns[0] + 100 * most_off_ns, (
        "the fault costs next to nothing"
    )
    found = broken.steps(fix(broken.recording, sound.recording, there, broken.scope))
    assert np.abs(found.time_ns - wanted.time_ns).max() <= most_off_ns
