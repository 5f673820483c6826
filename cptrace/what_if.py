"""What a step would take if something were different: causes of findings taken out, other transfers, other compute.

A prediction replays the recorded run with the changes that the findings themselves are judged by, several at once if
asked for. Its JSON has the schema `cptrace.whatif/1`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final, NamedTuple

import numpy as np

from cptrace import labels
from cptrace.analyses import make_scope
from cptrace.analyses.scope import device_work_missing
from cptrace.errors import SourceError, TraceError, UsageError
from cptrace.findings import FINDINGS, Case, Diagnosis, Fix, find_diagnosis, make_case, outcomes
from cptrace.findings.finding import Finding
from cptrace.intervals import BoolArray, Int64Array
from cptrace.job import read_job
from cptrace.names import finding_name
from cptrace.outcome import NotApplicable
from cptrace.peers import peers_missing
from cptrace.replay import Changes, StepTimes, combine, replay, step_times
from cptrace.requests import WhatIfOptions
from cptrace.sources import as_paths
from cptrace.trace import Trace

SCHEMA: Final = "cptrace.whatif/1"

APPLIED: Final = "applied"
NOT_FOUND: Final = "not-found"
NOT_APPLICABLE: Final = "not-applicable"

_LARGEST_FACTOR: Final = 1_000.0  # beyond it, times of long traces leave 64 bits
_LINK: Final = "--link-gbps"
_MODELLED_CLOCKS: Final = ("virtual", "paced")
_ALL_REDUCE_ROUNDS: Final = 2


@dataclass(frozen=True, slots=True)
class FixOutcome:
    """What became of one fix that was asked for.

    Attributes:
        code: Code of the finding.
        form: Form of it, None for all.
        status: `applied`, `not-found` (the trace does not have the cause) or `not-applicable`.
        reason: Why it is not applied, None where it is.
        alone_step_ns: Predicted step time with this fix alone, None where it is not applied.
    """

    code: str
    form: str | None
    status: str
    reason: str | None = None
    alone_step_ns: int | None = None


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """Mean time of a step of one rank, in ns, from the start of its first op to the end of its last."""

    rank: int
    recorded_step_ns: int
    predicted_step_ns: int


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A prediction.

    Attributes:
        path: File of the trace.
        device_kind: `cuda` or `cpu-emulated`.
        scheme: Recognised scheme, or `unknown`.
        n_steps: Steps that the times are means of; 0 where none are known and the window stands for one.
        recorded_step_ns: Mean recorded time of a step of the slowest rank.
        predicted_step_ns: The same with the changes.
        ranks: The same for each rank.
        fixes: What became of each fix.
        assumptions: What the prediction assumes, one sentence each.
    """

    path: str
    device_kind: str
    scheme: str
    n_steps: int
    recorded_step_ns: int
    predicted_step_ns: int
    ranks: tuple[RankOutcome, ...]
    fixes: tuple[FixOutcome, ...]
    assumptions: tuple[str, ...]

    def to_json(self) -> str:
        """Return the prediction as JSON: the same bytes for the same input, one final newline."""
        document = {"schema": SCHEMA, **asdict(self)}
        return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def whatif(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Trace, options: WhatIfOptions
) -> WhatIf:
    """Return what a step of a recorded run would take with some changes.

    Args:
        source: Path of a trace, or paths of the ranks or nodes of one job, or a trace.
        options: What is to be different.

    Raises:
        SourceError: The file is missing, unreadable, damaged, of no known format or without device work.
        TraceError: Its content contradicts itself, or several files cannot be put on one clock.
        UsageError: Nothing was asked for, or something that cannot be meant for this trace.

    Example:
        cptrace.whatif("report.sqlite", WhatIfOptions(fixes=("single-buffer",))).predicted_step_ns
    """
    wanted = parse_fixes(options.fixes)
    check_factors(options)
    trace = source if isinstance(source, Trace) else read_job(as_paths(source), options.read)
    missing = device_work_missing(trace, "whatif")
    if missing is not None:
        raise SourceError(f"cannot predict step times: {missing.reason}")
    case = make_case(make_scope(trace, options.scope))
    return _predict(case, wanted, options)


class WantedFix(NamedTuple):
    """A fix that was asked for: a diagnosis, and the form of it, None for all."""

    diagnosis: Diagnosis
    form: str | None


def parse_fixes(texts: Sequence[str]) -> tuple[WantedFix, ...]:
    """Return the fixes that texts ask for, each once.

    Args:
        texts: CODE or CODE:FORM each.

    Raises:
        UsageError: There is no such code or form, or no gain is predicted for it; the message lists those that do.
    """
    return tuple(_parse_fix(text) for text in dict.fromkeys(texts))


def fixable() -> tuple[str, ...]:
    """Return the codes of findings whose gain can be predicted, with their forms where only some can."""
    return tuple(
        f"{diagnosis.code}:{fix.form}" if fix.form else diagnosis.code
        for diagnosis in FINDINGS
        for fix in diagnosis.fixes
    )


def _parse_fix(text: str) -> WantedFix:
    code, colon, form = text.partition(":")
    diagnosis = find_diagnosis(code)
    if colon and form not in diagnosis.forms:
        forms = ", ".join(diagnosis.forms) or "none"
        raise UsageError(f"--fix {text}: {code} has no form {form!r}; its forms are: {forms}")
    wanted = WantedFix(diagnosis, form or None)
    if not _fixes_of(wanted):
        raise UsageError(
            f"--fix {text}: no gain is predicted for it (`cptrace explain {code}` says what to do); --fix knows"
            f" {', '.join(fixable())}"
        )
    return wanted


def _fixes_of(wanted: WantedFix) -> tuple[Fix, ...]:
    return tuple(
        fix for fix in wanted.diagnosis.fixes if None in (fix.form, wanted.form) or fix.form == wanted.form
    )


def check_factors(options: WhatIfOptions) -> None:
    """Check what can be said of the numbers before a trace is read.

    Args:
        options: What is to be different.

    Raises:
        UsageError: A number cannot be meant, two contradict each other, or nothing was asked for.
    """
    numbers = {
        _LINK: options.link_gbps,
        "--scale-transfer": options.transfer_scale,
        "--scale-compute": options.compute_scale,
    }
    given = {name: value for name, value in numbers.items() if value is not None}
    if not given and not options.fixes:
        raise UsageError(
            f"nothing was asked for; give --fix CODE ({', '.join(fixable())}), --link-gbps, --scale-transfer or"
            " --scale-compute"
        )
    if options.link_gbps is not None and options.transfer_scale is not None:
        raise UsageError(
            "--link-gbps and --scale-transfer both say how long transfers take; give one of them"
        )
    if options.ranks and not given:
        raise UsageError(
            "--rank says whose transfers or compute change; give --scale-transfer or --scale-compute"
        )
    for name, value in given.items():
        if not (math.isfinite(value) and value > 0):
            raise UsageError(f"{name} {value:g} cannot be meant; give a number above 0")
        if name != _LINK:
            _check_factor(name, value)


def _check_factor(name: str, factor: float) -> None:
    if not 1 / _LARGEST_FACTOR <= factor <= _LARGEST_FACTOR:
        raise UsageError(
            f"{name} {factor:g} cannot be meant; give a factor between {1 / _LARGEST_FACTOR:g} and {_LARGEST_FACTOR:g}"
        )


def _predict(case: Case, wanted: Sequence[WantedFix], options: WhatIfOptions) -> WhatIf:
    changes, assumptions = Changes(), list(_ALWAYS_ASSUMED)
    outcomes = []
    for fix in wanted:
        found = _changes_of(case, fix)
        outcomes.append(_outcome(case, fix, found))
        if found is not None:
            changes = combine(changes, found, case.recording.duration_ns)
            assumptions.append(f"{fix.diagnosis.code} mended: {fix.diagnosis.explanation.fix}")
    if (unmatched := peers_missing(case.scope.arrivals)) is not None:
        assumptions.append(unmatched.reason)
    scaled, said = _scaled(case, options)
    changes = combine(changes, scaled, case.recording.duration_ns)
    recorded, predicted = _times(case, Changes()), _times(case, changes)
    meta = case.scope.trace.meta
    return WhatIf(
        path=meta.path,
        device_kind=meta.device_kind,
        scheme=case.recognition.scheme,
        n_steps=len(recorded.job_step) if case.has_steps else 0,
        recorded_step_ns=_mean(recorded.job_time_ns),
        predicted_step_ns=_mean(predicted.job_time_ns),
        ranks=_by_rank(recorded, predicted),
        fixes=tuple(outcomes),
        assumptions=(*assumptions, *said),
    )


def _changes_of(case: Case, wanted: WantedFix) -> Changes | None:
    """Return what all fixes of a wanted one change together, None where the trace has none of their causes."""
    made = [found for fix in _fixes_of(wanted) if (found := fix.changes(case)) is not None]
    if not made:
        return None
    changes = made[0]
    for other in made[1:]:
        changes = combine(changes, other, case.recording.duration_ns)
    return changes


def _outcome(case: Case, wanted: WantedFix, changes: Changes | None) -> FixOutcome:
    code, form = wanted.diagnosis.code, wanted.form
    if changes is not None:
        return FixOutcome(code, form, APPLIED, alone_step_ns=_mean(_times(case, changes).job_time_ns))
    name = finding_name(code, form)
    for looked in outcomes(case, wanted.diagnosis):
        if isinstance(looked, NotApplicable) and (form is None or looked.analysis in (code, name)):
            return FixOutcome(code, form, NOT_APPLICABLE, looked.reason)
        if isinstance(looked, Finding) and form in (None, looked.form):
            found = finding_name(looked.code, looked.form)
            return FixOutcome(
                code, form, NOT_APPLICABLE, f"{found} was found, and no gain can be predicted for it"
            )
    return FixOutcome(code, form, NOT_FOUND, f"{name} was not found; nothing to fix")


def _times(case: Case, changes: Changes) -> StepTimes:
    try:
        return step_times(case.recording, replay(case.recording, changes), *case.steps)
    except TraceError as error:
        raise TraceError(
            f"cannot predict with these changes together; ask for them one by one: {error}"
        ) from error


def _mean(times_ns: Int64Array) -> int:
    return int(times_ns.mean()) if len(times_ns) else 0


def _by_rank(recorded: StepTimes, predicted: StepTimes) -> tuple[RankOutcome, ...]:
    """Return the mean step time of each rank."""
    return tuple(
        RankOutcome(
            rank,
            _mean(recorded.time_ns[recorded.rank == rank]),
            _mean(predicted.time_ns[predicted.rank == rank]),
        )
        for rank in np.unique(recorded.rank).tolist()
    )


_ALWAYS_ASSUMED: Final = (
    "the order of operations in each stream, and of the host's calls, is as recorded but where a fix changes it",
    "operations take as long as recorded but where a change says otherwise, whatever runs beside them",
)


def _scaled(case: Case, options: WhatIfOptions) -> tuple[Changes, list[str]]:
    """Return the changes of durations that were asked for, and what they assume."""
    here = _on_ranks(case, options.ranks)
    where = f" on rank {', '.join(map(str, options.ranks))}" if options.ranks else ""
    recorded = case.recording.duration_ns
    duration, said = recorded.astype(np.float64), []
    if options.link_gbps is not None:
        fixed_ns, factor = _link(case, options.link_gbps)
        mine = case.is_comm & here
        duration[mine] = fixed_ns[mine] + (duration[mine] - fixed_ns[mine]) * factor
        said.append(
            f"what transfers take for their bytes{where} is {factor:g} times as long, as the recorded link of"
            f" {_recorded_link(case):g} Gbit/s against {options.link_gbps:g}; the link's latency stays"
        )
    if options.transfer_scale is not None:
        duration[case.is_comm & here] *= options.transfer_scale
        said.append(
            f"each transfer{where} takes {options.transfer_scale:g} times as long once all that take part have arrived"
        )
    if options.compute_scale is not None:
        duration[case.is_compute & here] *= options.compute_scale
        said.append(
            f"each compute operation{where} takes {options.compute_scale:g} times as long; copies do not"
        )
    if not said:
        return Changes(), said
    return Changes(duration_ns=np.asarray(np.rint(duration), np.int64)), said


def _on_ranks(case: Case, ranks: Sequence[int]) -> BoolArray:
    """Return which ops are of some ranks, of all where none is named."""
    there = case.scope.trace.ranks["rank"].tolist()
    unknown = sorted(set(ranks) - set(there))
    if unknown:
        raise UsageError(
            f"--rank {unknown[0]} is not in {case.scope.trace.meta.path}; it has ranks {', '.join(map(str, there))}"
        )
    return np.isin(case.rank, list(ranks)) if ranks else np.ones(len(case.ops), bool)


def _link(case: Case, link_gbps: float) -> tuple[Int64Array, float]:
    """Return the part of each op that no bandwidth changes, and the factor on the rest."""
    factor = _recorded_link(case) / link_gbps
    _check_factor(f"{_LINK} {link_gbps:g}: the time for bytes times", factor)
    latency_us = case.scope.trace.meta.run.get("link_latency_us")
    latency_ns = 1_000 * float(latency_us) if isinstance(latency_us, (int, float)) else 0.0
    # An all-reduce is a reduce-scatter and an all-gather, each a round that pays the latency.
    rounds = np.where(case.ops["collective"].to_numpy() == labels.ALL_REDUCE, _ALL_REDUCE_ROUNDS, 1)
    fixed = np.asarray(np.rint(latency_ns * rounds), np.int64)
    return np.minimum(fixed, case.recording.duration_ns), factor


def _recorded_link(case: Case) -> float:
    """Return the link bandwidth that the run modelled.

    Raises:
        UsageError: The trace has none: it was a real link, or the run says nothing of one.
    """
    meta = case.scope.trace.meta
    recorded = meta.run.get("link_gbps")
    is_modelled = meta.device_kind == labels.CPU_EMULATED and meta.clock in _MODELLED_CLOCKS
    if not is_modelled or not isinstance(recorded, (int, float)) or recorded <= 0:
        raise UsageError(
            f"--link-gbps needs the bandwidth of the recorded link, and {meta.path} does not state it (emulated runs on"
            " the paced or virtual clock do); say with --scale-transfer how much longer transfers take"
        )
    return float(recorded)
