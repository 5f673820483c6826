"""What a diagnosis looks at: one trace with its dependency graph, start causes, scheme and replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import pandas as pd

from cptrace import intervals, labels
from cptrace.analyses.scope import Scope
from cptrace.analyses.start_causes import CAUSES, StartCauses, find_start_causes
from cptrace.analyses.windows import within_steps
from cptrace.classify import COMM, COMPUTE, ROLES
from cptrace.dependencies import Dependencies, find_dependencies
from cptrace.dependencies.unrecorded import with_inferred_syncs
from cptrace.intervals import BoolArray, Int64Array, Intervals
from cptrace.labels import CUDA
from cptrace.names import finding_name
from cptrace.outcome import NotApplicable
from cptrace.recognition import Flow, Places, Recognition, recognise
from cptrace.replay import Changes, Recording, Replayed, make_recording, replay, step_times

MIN_SHARE: Final = 0.01
"""A finding that costs less than this share of the step is not worth a reader's time."""

Result = TypeVar("Result")

_EXACT_CLOCK: Final = "virtual"


class Prediction(NamedTuple):
    """What a change would give.

    Attributes:
        step_ns: Mean time of a step of the slowest rank with the change.
        recoverable_ns: How much less that is than recorded; negative where it would be slower.
    """

    step_ns: int
    recoverable_ns: int


class Steps(NamedTuple):
    """Which ops belong to which step.

    Attributes:
        op: Rows of ops that belong to a step, int64 of shape (M,).
        step: Number of that step, int64 of shape (M,).
    """

    op: Int64Array
    step: Int64Array


class ToMend(NamedTuple):
    """Something that a replay can take out of a run.

    Attributes:
        code: Code of its finding.
        form: Form of that, None for all.
        changes: Returns what is different without it; None where the case does not have it.
        is_wrong: Results may be wrong with it, so that it is to be mended whatever that costs.
        trades_work: Mending it moves work between ranks, so that it may cost more than it gives while another is there.
    """

    code: str
    form: str | None
    changes: Callable[[Case], Changes | None]
    is_wrong: bool = False
    trades_work: bool = False

    @property
    def name(self) -> str:
        """What people call it."""
        return finding_name(self.code, self.form)


@dataclass(frozen=True, slots=True)
class Case:
    """One trace under diagnosis, with N ops.

    Attributes:
        scope: The trace as the analyses see it.
        dependencies: What each op had to wait for.
        causes: Why each op started when it did.
        recognition: The scheme that the trace shows, and where its ops belong.
        recording: The run, ready to be replayed.
        steps: Which ops belong to which step.
        step_ns: Mean recorded time of a step of the slowest rank.
        exposed_ns: Part of each communication op in which no compute runs, within the window, int64 of shape (N,);
            0 for other ops.
        position: Position of each op in the table of places, -1 without a place, int64 of shape (N,).
        stream_before: Row of the op with a place that comes before each op with a place in its stream, -1 where there
            is none, int64 of shape (N,).
        causes_to_mend: All that a replay can take out of the run, by the name of its finding: what one of them hides
            of another is looked for among these.
        n_inferred_syncs: Blocking calls that the trace has no record of; what they waited for is inferred.
        memo: What several findings ask for, found once; see `remembered`.
    """

    scope: Scope
    dependencies: Dependencies
    causes: StartCauses
    recognition: Recognition
    recording: Recording
    steps: Steps
    step_ns: int
    exposed_ns: Int64Array
    position: Int64Array
    stream_before: Int64Array
    causes_to_mend: tuple[ToMend, ...] = ()
    n_inferred_syncs: int = 0
    memo: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def remembered(self, name: str, find: Callable[[Case], Result]) -> Result:
        """Return what a function finds in this case; it is called once.

        Args:
            name: Name of the result.
            find: Finds it.
        """
        if name not in self.memo:
            self.memo[name] = find(self)
        found: Result = self.memo[name]
        return found

    @property
    def ops(self) -> pd.DataFrame:
        """Device work."""
        return self.scope.trace.ops

    @property
    def places(self) -> Places:
        """Where ops belong."""
        return self.recognition.places

    @property
    def flow(self) -> Flow | None:
        """Data flow of the scheme, None where it is not known."""
        return self.recognition.flow

    @property
    def start_ns(self) -> Int64Array:
        """Start of each op in ns."""
        return self.ops["start_ns"].to_numpy()

    @property
    def end_ns(self) -> Int64Array:
        """End of each op in ns."""
        return self.ops["end_ns"].to_numpy()

    @property
    def rank(self) -> Int64Array:
        """Rank of each op."""
        return self.ops["rank"].to_numpy().astype(np.int64)

    @property
    def is_comm(self) -> BoolArray:
        """Which ops communicate."""
        return np.asarray(self.ops["role"].cat.codes.to_numpy() == ROLES.index(COMM))

    @property
    def is_compute(self) -> BoolArray:
        """Which ops compute."""
        return np.asarray(self.ops["role"].cat.codes.to_numpy() == ROLES.index(COMPUTE))

    @property
    def has_steps(self) -> bool:
        """Whether the trace says what its steps are; else the window stands for one."""
        return not isinstance(self.scope.steps, NotApplicable) and not self.scope.steps.empty

    def is_measured(self, rows: Int64Array) -> BoolArray:
        """Return which ops are in the account: in a step, or in the window where there are none.

        What is said of a run is said of these; a replay changes the others too, such as those of a warm-up.

        Args:
            rows: Rows of ops, int64 of shape (M,).
        """
        return np.isin(rows, self.steps.op)

    @property
    def is_exact(self) -> bool:
        """Whether residuals are those of a device: an emulated one's are the threads' of a busy machine."""
        meta = self.scope.trace.meta
        return meta.device_kind == CUDA or meta.clock == _EXACT_CLOCK

    def exposed_together_ns(self, rows: Int64Array, start_ns: Int64Array, end_ns: Int64Array) -> int:
        """Return for how long some of its communication is exposed: what runs at once on a rank counts once.

        Args:
            rows: Rows of communication ops, int64 of shape (M,).
            start_ns: Start of the part of each that counts, int64 of shape (M,).
            end_ns: End of that part, int64 of shape (M,).
        """
        total, rank = 0, self.rank[rows]
        for number in self.scope.ranks:
            mine = rank == number
            parts = intervals.union(Intervals(start_ns[mine], end_ns[mine]))
            free = self.scope.without_compute(number)
            total += intervals.total_ns(intervals.intersect(parts, free))
        return total

    def is_what(self, *names: str) -> BoolArray:
        """Return which ops have a place with one of some labels, bool of shape (N,)."""
        which = np.zeros(len(self.ops), bool)
        which[self.places.rows] = self.places.is_what(*names)
        return which

    def has_cause(self, *causes: str) -> BoolArray:
        """Return which ops have one of some start causes, bool of shape (N,)."""
        return np.isin(self.causes.cause, [CAUSES.index(cause) for cause in causes])

    def is_needed(self, consumer: Int64Array, producer: Int64Array) -> BoolArray:
        """Return whether ops need others, by the scheme's data flow; both are rows of ops with a place."""
        assert self.flow is not None, "asked for needs where no data flow is known"
        return self.flow.is_needed(self.position[consumer], self.position[producer])

    def predict(self, changes: Changes) -> Prediction:
        """Return what a change would give.

        Args:
            changes: What is different.

        Raises:
            TraceError: With the change ops would wait for each other.
        """
        times = step_times(self.recording, replay(self.recording, changes), *self.steps)
        predicted = int(times.job_time_ns.mean()) if len(times.job_time_ns) else 0
        return Prediction(predicted, self.step_ns - predicted)


def make_case(scope: Scope) -> Case:
    """Return a trace under diagnosis.

    Args:
        scope: What to look at; its trace has device work.
    """
    trace, n_inferred = with_inferred_syncs(scope.trace, scope.launches)
    scope, ops = within_steps(replace(scope, trace=trace)), trace.ops
    dependencies = find_dependencies(trace, scope.launches)
    recognition = recognise(trace, scope.launches)
    recording = make_recording(trace, dependencies, scope.arrivals)
    steps = _steps(scope)
    recorded = step_times(recording, Replayed(recording.start_ns, recording.end_ns), *steps)
    position = recognition.places.of_ops(len(ops))
    return Case(
        scope=scope,
        dependencies=dependencies,
        causes=find_start_causes(ops, dependencies),
        recognition=recognition,
        recording=recording,
        steps=steps,
        step_ns=int(recorded.job_time_ns.mean()) if len(recorded.job_time_ns) else 0,
        exposed_ns=_exposed(scope),
        position=position,
        stream_before=_stream_before(ops, dependencies.queue, recognition.places.rows),
        n_inferred_syncs=n_inferred,
    )


def _steps(scope: Scope) -> Steps:
    """Return the ops of each step; without steps, all that lies in the window is one."""
    ops = scope.trace.ops
    inside = np.flatnonzero(scope.is_inside)
    if isinstance(scope.steps, NotApplicable) or scope.steps.empty:
        return Steps(inside, np.zeros(len(inside), np.int64))
    rank, start = ops["rank"].to_numpy()[inside], ops["start_ns"].to_numpy()[inside]
    found = np.full(len(inside), -1, np.int64)
    # Steps may overlap on the device: what belongs to one that the window cuts is not another one's.
    known = pd.concat([scope.steps, scope.cut_steps]).sort_values("start_ns", kind="stable")
    for number in scope.ranks:
        mine = np.flatnonzero(rank == number)
        steps = known[known["rank"] == number]
        if steps.empty:
            continue
        place = np.searchsorted(steps["start_ns"].to_numpy(), start[mine], side="right") - 1
        is_in = (place >= 0) & (start[mine] < steps["end_ns"].to_numpy()[np.maximum(place, 0)])
        found[mine[is_in]] = steps["step"].to_numpy()[place[is_in]]
    is_whole = np.isin(found, scope.steps["step"].to_numpy())
    return Steps(inside[is_whole], found[is_whole])


def _exposed(scope: Scope) -> Int64Array:
    """Return the part of each communication op in its rank's window in which no compute runs."""
    ops = scope.trace.ops
    exposed = np.zeros(len(ops), np.int64)
    rows = np.flatnonzero((ops["role"].cat.codes.to_numpy() == ROLES.index(COMM)) & scope.is_inside)
    start, end, rank = (ops[name].to_numpy()[rows] for name in ("start_ns", "end_ns", "rank"))
    for number in scope.ranks:
        mine = np.flatnonzero(rank == number)
        free = scope.without_compute(number)
        exposed[rows[mine]] = intervals.covered_ns(free, start[mine], end[mine])
    return exposed


def _stream_before(ops: pd.DataFrame, queue: Int64Array, rows: Int64Array) -> Int64Array:
    """Return for each op with a place the one before it in its stream, -1 where there is none."""
    before = np.full(len(ops), -1, np.int64)
    order = rows[np.argsort(queue[rows], kind="stable")]
    is_same = queue[order[1:]] == queue[order[:-1]]
    before[order[1:][is_same]] = order[:-1][is_same]
    return before


def is_attention_work(case: Case) -> BoolArray:
    """Return which ops compute attention or merge its parts, bool of shape (N,)."""
    return case.is_what(labels.ATTENTION, labels.MERGE)
