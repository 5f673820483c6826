"""Measures how often the diagnosis is right: runs with known faults, and what the report says of them.

    python tests/benchmarks/bench_diagnosis.py                      every scheme and fault, virtual clock
    python tests/benchmarks/bench_diagnosis.py --clock paced --repeats 20
    python tests/benchmarks/bench_diagnosis.py --schemes ring,te --cp-sizes 4 --check

Prints a confusion matrix (what was injected against the finding on top), the false alarms of runs without a fault,
and how far the predicted step time of each fix is from the step time that the same run without the fault has. A seed
picks sizes too, because in the virtual clock the numbers in the tensors change no time.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from cptrace.capture.run_spec import RunSpec
from cptrace.errors import CptraceError, UsageError
from cptrace.faults import FAULTS, find_fault, parse_fault
from cptrace.findings.case import MIN_SHARE
from cptrace.schemes import SCHEMES

SERIALISING = ("shared-stream", "host-sync", "single-buffer", "shared-communicator")
"""Faults whose fix has a step time to predict: that of the same run without the fault."""
ALARMS = (
    "shared-stream",
    "missing-event",
    "single-buffer",
    "shared-communicator",
    "late-launch",
    "queue-order",
)
"""Findings that a run without a fault must not have."""
NO_FAULT = "(none)"
UNSEEN_TOGETHER = (frozenset(("no-wait", "single-buffer")),)
"""Of these pairs one takes away what shows the other: without waits nothing tells how many buffers there are."""
ALWAYS_FOUND = ("no-wait", "late-launch")
"""Faults that are to be found though they lengthen no step: a race, and a pause between steps."""
MAX_PREDICTION_ERROR = {"virtual": 0.02, "paced": 0.10}
MIN_RIGHT = {"virtual": 1.0, "paced": 0.95}

SIZES = (
    {"seq_len": 1024, "heads": 8, "kv_heads": 8, "layers": 1},
    {"seq_len": 768, "heads": 8, "kv_heads": 4, "layers": 2},
    {"seq_len": 1536, "heads": 8, "kv_heads": 8, "head_dim": 16, "layers": 1},
)
SLOW_LINK_GBPS = 0.15
"""For faults that a fast link hides."""


@dataclass(frozen=True)
class Trial:
    """One run: its options, what was injected, and whether it stands for a run without a fault."""

    spec: RunSpec
    faults: tuple[str, ...]

    @property
    def injected(self) -> str:
        """What was injected, without ranks."""
        return " + ".join(parse_fault(fault).name for fault in self.faults) or NO_FAULT


@dataclass(frozen=True)
class Verdict:
    """What the report of a run says.

    Attributes:
        trial: The run.
        findings: Code and form of each finding, the most important first.
        ranks: The rank that each names.
        step_ns: Mean recorded time of a step of the slowest rank.
        predicted_ns: Predicted step time of each finding.
        n_unknown: Communication ops without a start cause.
        n_violations: Ops that started before what they waited for ended.
    """

    trial: Trial
    findings: tuple[str, ...]
    ranks: tuple[int | None, ...]
    step_ns: float
    predicted_ns: tuple[int | None, ...]
    n_unknown: int
    n_violations: int

    @property
    def top(self) -> str:
        """The finding on top that has a gain or an error to tell, else none."""
        return self.findings[0] if self.findings else NO_FAULT

    @property
    def alarms(self) -> list[str]:
        """Findings that a run without a fault must not have."""
        return [name for name in self.findings if name.partition(":")[0] in ALARMS]

    @property
    def extras(self) -> list[str]:
        """Findings beside what was injected that a run without it must not have."""
        expected = {find_fault(parse_fault(fault).name).finding for fault in self.trial.faults}
        return [name for name in self.alarms if name.partition(":")[0] not in expected]

    @property
    def is_right(self) -> bool:
        """Whether what was injected, and nothing else, is on top."""
        if not self.trial.faults:
            return not self.alarms
        return not self.missed

    @property
    def missed(self) -> list[str]:
        """What was injected and is not on top."""
        n_faults = len(self.trial.faults)
        found = dict(zip(self.findings[:n_faults], self.ranks[:n_faults], strict=True))
        return [fault for fault in self.trial.faults if not _matches(fault, found)]


def _matches(fault: str, found: dict[str, int | None]) -> bool:
    request = parse_fault(fault)
    expected = find_fault(request.name)
    for name, rank in found.items():
        code, _, form = name.partition(":")
        if code == expected.finding and expected.form in (None, form):
            return request.rank is None or rank == request.rank
    return False


def trials(options: argparse.Namespace) -> Iterator[Trial]:
    """Yield all runs that the options ask for, those without a fault first."""
    schemes = [info.name for info in SCHEMES if info.name != "single"]
    chosen = options.schemes.split(",") if options.schemes else schemes
    axes = itertools.product(chosen, options.cp_sizes, options.masks, options.passes, options.seeds)
    for scheme, cp_size, mask, passes, seed in axes:
        base = RunSpec(
            scheme=scheme,
            cp_size=cp_size,
            causal=mask == "causal",
            forward_only=passes == "forward",
            seed=seed,
            clock=options.clock,
            check=False,
            steps=options.steps,
            **SIZES[seed % len(SIZES)],
        )
        for faults in _fault_sets(options, cp_size):
            specs = list(_valid_specs(base, faults))
            # What a fast link hides of one fault beside another shows on a slow one.
            for spec in specs if len(faults) > 1 else specs[:1]:
                yield Trial(spec, faults)


def _valid_specs(base: RunSpec, faults: tuple[str, ...]) -> Iterator[RunSpec]:
    """Yield the runs with some faults, over a fast and a slow link, in which each of them costs something alone."""
    for link_gbps in (base.link_gbps, SLOW_LINK_GBPS) if faults else (base.link_gbps,):
        spec = replace(base, faults=faults, link_gbps=link_gbps)
        if all(_is_valid(replace(spec, faults=each)) for each in (faults, *_singly(faults))):
            yield spec


def _singly(faults: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield each fault by itself."""
    return ((fault,) for fault in faults)


def _fault_sets(options: argparse.Namespace, cp_size: int) -> list[tuple[str, ...]]:
    """Return the faults to inject, one by one or in pairs, and none."""
    rank = cp_size - 1
    single = [f"{fault.name}:{rank}" if fault.takes_rank else fault.name for fault in FAULTS]
    if options.faults is not None:
        single = [text for text in single if parse_fault(text).name in options.faults.split(",")]
    if options.pairs:
        pairs = itertools.combinations(single, 2)
        return [pair for pair in pairs if {parse_fault(text).name for text in pair} not in UNSEEN_TOGETHER]
    return [(), *((fault,) for fault in single)]


def _is_valid(spec: RunSpec) -> bool:
    try:
        spec.validate()
    except UsageError:
        return False
    return True


def judge(trial: Trial) -> Verdict:
    """Run a trial and return what its report says."""
    import cptrace
    from instrumented.run import run

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.sqlite"
        run(trial.spec, path, lambda _text: None)
        report = cptrace.analyze(path)
    findings = report.rows("findings")
    causes = report.rows("start_causes")
    return Verdict(
        trial,
        tuple(f"{row['code']}:{row['form']}" if row["form"] else row["code"] for row in findings),
        tuple(row["rank"] for row in findings),
        _step_ns(report),
        tuple(row["predicted_step_ns"] for row in findings),
        sum(row["count"] for row in causes if row["role"] == "comm" and row["cause"] == "unknown"),
        sum(entry["n_violations"] for entry in report.coverage["dependencies"]),
    )


def _step_ns(report) -> float:
    longest: dict[int, int] = {}
    for row in report.rows("steps"):
        longest[row["step"]] = max(longest.get(row["step"], 0), row["window_ns"])
    return statistics.fmean(longest.values())


def run_all(todo: Sequence[Trial], n_workers: int) -> list[Verdict]:
    """Return the verdict of each trial, in order."""
    verdicts: list[Verdict] = []
    # Spawned, so that a worker may fork ranks before it has run any torch op.
    with ProcessPoolExecutor(n_workers, mp_context=get_context("spawn")) as pool:
        for number, verdict in enumerate(pool.map(judge, todo), 1):
            verdicts.append(verdict)
            if sys.stderr.isatty():
                print(f"\r{number} of {len(todo)}", end="", file=sys.stderr, flush=True)
    return verdicts


def confusion(verdicts: Sequence[Verdict]) -> list[str]:
    """Return the lines of the confusion matrix."""
    counts = Counter((verdict.trial.injected, _shown_top(verdict)) for verdict in verdicts)
    rows = list(dict.fromkeys(injected for injected, _ in counts))
    columns = sorted({top for _, top in counts})
    width = max(map(len, rows)) + 2
    lines = ["injected (rows) against the finding on top (columns)", ""]
    lines += [f"  {number} = {name}" for number, name in enumerate(columns, 1)]
    lines.append("\n" + " " * width + "".join(f"{number:>6}" for number in range(1, len(columns) + 1)))
    for row in rows:
        cells = "".join(f"{counts[row, column] or '.':>6}" for column in columns)
        lines.append(f"{row:<{width}}{cells}")
    return lines


def _shown_top(verdict: Verdict) -> str:
    """Return the finding on top; for runs without a fault the alarm on top, or none."""
    if verdict.trial.faults:
        return verdict.top
    return verdict.alarms[0] if verdict.alarms else NO_FAULT


def rates(verdicts: Sequence[Verdict]) -> list[str]:
    """Return the share of right verdicts for each injected fault."""
    lines = []
    for injected in dict.fromkeys(verdict.trial.injected for verdict in verdicts):
        mine = [verdict for verdict in verdicts if verdict.trial.injected == injected]
        n_right = sum(verdict.is_right for verdict in mine)
        lines.append(f"{injected:<44}{n_right:>5} of {len(mine):<5}{n_right / len(mine):>8.1%}")
    return lines


def prediction_errors(verdicts: Sequence[Verdict]) -> dict[str, list[tuple[float, Verdict]]]:
    """Return for each serialising fault how far each prediction is from the run without the fault, as a fraction."""
    measured: dict[RunSpec, list[float]] = {}
    for verdict in verdicts:
        if not verdict.trial.faults:
            measured.setdefault(verdict.trial.spec, []).append(verdict.step_ns)
    errors: dict[str, list[tuple[float, Verdict]]] = {}
    for verdict in verdicts:
        name = verdict.trial.injected
        sound = measured.get(replace(verdict.trial.spec, faults=()))
        if name in SERIALISING and sound and verdict.is_right:
            predicted = verdict.predicted_ns[0]
            if predicted is not None:
                step_ns = statistics.median(sound)
                errors.setdefault(name, []).append((predicted / step_ns - 1, verdict))
    return errors


def predictions(errors: dict[str, list[tuple[float, Verdict]]]) -> list[str]:
    """Return the lines of the prediction table."""
    lines = [f"{'fault':<24}{'runs':>6}{'median':>10}{'worst':>10}"]
    for name, of_fault in errors.items():
        sizes = [abs(error) for error, _ in of_fault]
        lines.append(f"{name:<24}{len(sizes):>6}{statistics.median(sizes):>10.2%}{max(sizes):>10.2%}")
    return lines


def describe(trial: Trial) -> str:
    """Return the command that repeats a trial."""
    spec = trial.spec
    words = [
        f"--scheme {spec.scheme} --cp-size {spec.cp_size} --seq-len {spec.seq_len} --kv-heads {spec.kv_heads}"
    ]
    words += [
        f"--head-dim {spec.head_dim} --layers {spec.layers} --link-gbps {spec.link_gbps} --clock {spec.clock}"
    ]
    words += ["--causal"] * spec.causal + ["--forward-only"] * spec.forward_only
    return " ".join([*words, *(f"--fault {fault}" for fault in trial.faults)])


def with_sound_runs(todo: Sequence[Trial]) -> list[Trial]:
    """Return the trials with the run without the fault of each that needs one to compare with."""
    there = {trial.spec for trial in todo}
    needed = (spec for trial in todo for spec in _without(trial) if _is_compared(trial))
    missing = dict.fromkeys(spec for spec in needed if spec not in there)
    return [*(Trial(spec, spec.faults) for spec in missing), *todo]


def _is_compared(trial: Trial) -> bool:
    """Return whether a run says something only beside the run without one of its faults."""
    return trial.injected in SERIALISING or len(trial.faults) > 1


def _without(trial: Trial) -> dict[RunSpec, str]:
    """Return the same run without one of its faults, with that fault, for each of them."""
    faults = trial.faults
    return {
        replace(trial.spec, faults=tuple(other for other in faults if other != fault)): fault
        for fault in faults
    }


def costless(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts that miss only faults which cost no more than a finding is worth: nothing is to be found.

    Beside another fault, what one costs is what the run takes longer than with the other alone.
    """
    step_ns = {verdict.trial.spec: verdict.step_ns for verdict in verdicts}
    found = []
    for verdict in verdicts:
        free = set()
        for spec, fault in _without(verdict.trial).items():
            has_cost = spec not in step_ns or verdict.step_ns > (1 + MIN_SHARE) * step_ns[spec]
            if not has_cost and parse_fault(fault).name not in ALWAYS_FOUND:
                free.add(fault)
        if verdict.missed and free.issuperset(verdict.missed):
            found.append(verdict)
    return found


def report(verdicts: Sequence[Verdict], clock: str) -> tuple[str, bool]:
    """Return all tables as text, and whether every target is met."""
    left_out = costless(verdicts)
    verdicts = [verdict for verdict in verdicts if verdict not in left_out]
    errors = prediction_errors(verdicts)
    wrong = [verdict for verdict in verdicts if not verdict.is_right]
    parts = ["\n".join(confusion(verdicts)), "\n".join(rates(verdicts)), "\n".join(predictions(errors))]
    unknown, violations = (sum(getattr(v, name) for v in verdicts) for name in ("n_unknown", "n_violations"))
    parts.append(
        f"communication ops without a start cause: {unknown}; ops before their predecessors: {violations}"
    )
    extras = [v for v in verdicts if v.trial.faults and v.extras]
    parts.append(
        f"runs with a finding beside what was injected, that a sound run must not have: {len(extras)}"
    )
    parts += [f"beside it: {describe(v.trial)}\n       {', '.join(v.findings)}" for v in extras[:20]]
    parts += [
        f"wrong: {describe(v.trial)}\n       {', '.join(v.findings) or 'no finding'}" for v in wrong[:40]
    ]
    parts += [
        f"{' and '.join(v.missed)} costs nothing here, not counted: {describe(v.trial)}" for v in left_out
    ]
    limit = MAX_PREDICTION_ERROR[clock]
    far = [(error, v) for of_fault in errors.values() for error, v in of_fault if abs(error) > limit]
    if clock == "virtual":
        parts += [f"prediction off by {error:+.1%}: {describe(v.trial)}" for error, v in far[:40]]
        is_close = not far
    else:
        medians = (statistics.median(abs(error) for error, _ in of_fault) for of_fault in errors.values())
        is_close = all(median <= limit for median in medians)
    is_right = all(_rate(verdicts, name) >= MIN_RIGHT[clock] for name in {v.trial.injected for v in verdicts})
    return "\n\n".join(parts), is_close and is_right and not (unknown or _false_alarms(verdicts))


def _rate(verdicts: Sequence[Verdict], injected: str) -> float:
    mine = [verdict.is_right for verdict in verdicts if verdict.trial.injected == injected]
    return sum(mine) / len(mine)


def _false_alarms(verdicts: Sequence[Verdict]) -> int:
    return sum(bool(verdict.alarms) for verdict in verdicts if not verdict.trial.faults)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description="How often is the diagnosis right?")
    parser.add_argument("--clock", choices=("virtual", "paced"), default="virtual")
    parser.add_argument("--schemes", help="comma-separated; all by default")
    parser.add_argument("--faults", help="comma-separated; all by default")
    parser.add_argument("--cp-sizes", type=_numbers, default=[2, 4])
    parser.add_argument("--seeds", type=_numbers, default=[0, 1, 2], help="each picks sizes of its own")
    parser.add_argument("--masks", type=_words, default=["full", "causal"])
    parser.add_argument("--passes", type=_words, default=["forward", "both"])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument(
        "--pairs", action="store_true", help="two faults at once; both must be reported on top"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--check", action="store_true", help="exit code 1 where a target is missed")
    return parser.parse_args(arguments)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _words(text: str) -> list[str]:
    return text.split(",")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line and return the exit code."""
    options = parse(arguments)
    todo = with_sound_runs(list(trials(options))) * options.repeats
    try:
        verdicts = run_all(todo, options.workers)
    except CptraceError as error:
        print(f"bench_diagnosis: {error}", file=sys.stderr)
        return error.exit_code
    text, is_met = report(verdicts, options.clock)
    print(f"{len(verdicts)} runs, {options.clock} clock\n\n{text}")
    return int(options.check and not is_met)


if __name__ == "__main__":
    sys.exit(main())
