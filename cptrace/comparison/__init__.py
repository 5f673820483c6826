"""What differs between runs: their reports side by side, and whether a difference is more than noise.

The first run is the baseline. Comparing what was not run alike (another length, another number of ranks) says nothing
about a change, so it is refused unless the difference is named as deliberate.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Final, TypeVar

from cptrace.comparison.checks import check_account
from cptrace.errors import UsageError
from cptrace.labels import CPU_EMULATED
from cptrace.names import function_name
from cptrace.noise import FLOOR, NO_DIFFERENCE, UNKNOWN, judge, noise
from cptrace.report import Report, Row

SCHEMA: Final = "cptrace.comparison/1"
BETTER: Final = "better"
WORSE: Final = "worse"
GONE, NEW, KEPT = "gone", "new", "kept"
_EXACT_CLOCK: Final = "virtual"
_ENDINGS: Final = re.compile(r"(\.(sqlite3?|db|nsys-rep|pt|trace|json|gz))+$")
_Key = TypeVar("_Key", bound=tuple[str | None, ...])


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure that runs are compared by.

    Attributes:
        name: Stable name, as conditions and JSON write it.
        title: What people read.
        unit: `ns`, or `fraction` for 0..1.
        is_high_good: Whether more of it is better; None where that depends on what else changed.
        of_step: Its value in one step, from that step's rows of all ranks; None where it does not apply.
    """

    name: str
    title: str
    unit: str
    is_high_good: bool | None
    of_step: Callable[[Sequence[Row]], float | None]


def _mean(field: str) -> Callable[[Sequence[Row]], float | None]:
    return lambda rows: None if any(row[field] is None for row in rows) else fmean(row[field] for row in rows)


def _ratio(part: str, whole: str, fraction: str) -> Callable[[Sequence[Row]], float | None]:
    """Return the ratio over all ranks, where the fraction applies to each rank that has any of the whole."""

    def of_step(rows: Sequence[Row]) -> float | None:
        total = sum(row[whole] for row in rows)
        is_hidden = any(row[fraction] is None and row[whole] for row in rows)
        return None if is_hidden or not total else sum(row[part] for row in rows) / total

    return of_step


METRICS: Final[tuple[Metric, ...]] = (
    Metric("step_ns", "step time", "ns", False, lambda rows: max(r["window_ns"] for r in rows)),
    Metric(
        "exposed_comm_share",
        "exposed comm share",
        "fraction",
        False,
        _ratio("exposed_comm_ns", "window_ns", "exposed_comm_share"),
    ),
    Metric("exposed_comm_ns", "exposed comm", "ns", False, _mean("exposed_comm_ns")),
    Metric("overlap", "overlap", "fraction", True, _ratio("overlapped_comm_ns", "comm_ns", "overlap")),
    Metric("comm_share", "comm share", "fraction", None, _ratio("comm_ns", "window_ns", "comm_share")),
    Metric("comm_ns", "comm", "ns", None, _mean("comm_ns")),
    Metric("peer_wait_ns", "waiting for peers", "ns", False, _mean("peer_wait_ns")),
    Metric("compute_ns", "compute", "ns", False, _mean("compute_ns")),
    Metric("idle_ns", "idle", "ns", False, _mean("idle_ns")),
)
"""Per step: the slowest rank's time, else the mean over ranks of times and the ratio of their sums."""

_RUN_KEYS: Final = (
    "scheme", "model", "cp_size", "tp_size", "ulysses_size", "seq_len", "padded_tokens", "heads", "kv_heads",
    "head_dim", "hidden", "ffn", "layers", "dtype", "message_dtype", "causal", "passes", "clock", "impl", "transport",
    "link_gbps", "link_latency_us", "compute_gflops", "memory_gbytes_per_s",
)  # fmt: skip
KEYS: Final = ("device_kind", "ranks", "window", "comm", *_RUN_KEYS)
"""What must be alike: `ranks` is their number, `window` what is accounted for, `comm` whether there is any."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs side by side; the first is the baseline. Rows hold plain values, None where one is missing.

    Attributes:
        names: Short name of each run, all different.
        inputs: Inputs of each run's report.
        different: What was deliberately different: key and its value in each run.
        n_steps: Steps of each run; 0 where its whole window is one.
        metrics: Per run and metric: baseline, value, change, noise, verdict (better, worse, higher, lower,
            no-difference, unknown).
        findings: Per run, code and form: gone, new or kept, and the recoverable time before and after.
        collectives: Per run, kind and name: time and exposed time before and after, per step and rank.
        kernels: Per run, role and function: time before and after, per step and rank.
    """

    names: tuple[str, ...]
    inputs: tuple[tuple[Row, ...], ...]
    different: tuple[Row, ...]
    n_steps: tuple[int, ...]
    metrics: tuple[Row, ...]
    findings: tuple[Row, ...] = ()
    collectives: tuple[Row, ...] = ()
    kernels: tuple[Row, ...] = ()

    def to_json(self) -> str:
        """Return the comparison as JSON of the schema `cptrace.comparison/1`: the same bytes for the same input."""
        document = {
            "schema": SCHEMA,
            "runs": [
                {"name": name, "n_steps": n_steps, "inputs": [dict(row) for row in inputs]}
                for name, n_steps, inputs in zip(self.names, self.n_steps, self.inputs, strict=True)
            ],
            "different": [dict(row) for row in self.different],
            **{
                section: [dict(row) for row in getattr(self, section)]
                for section in ("metrics", "findings", "collectives", "kernels")
            },
        }
        return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def of_run(self, section: str, run: int) -> list[Row]:
        """Return the rows of a section that are about one run.

        Args:
            section: `metrics`, `findings`, `collectives` or `kernels`.
            run: Number of the run, 1 for the first after the baseline.
        """
        return [row for row in getattr(self, section) if row["run"] == run]


def compare_reports(
    reports: Sequence[Report], names: Sequence[str] = (), allow_different: Iterable[str] = ()
) -> Comparison:
    """Return the reports side by side.

    Args:
        reports: At least two; the first is the baseline.
        names: Name of each run; by default those of their first files.
        allow_different: Keys of `KEYS` in which the runs deliberately differ.

    Raises:
        UsageError: There are fewer than two, a key is unknown, or the runs cannot be compared, and why.
        SourceError: A report has no account of any rank, and why.
        TraceError: The numbers of a report contradict themselves.
    """
    if len(reports) < 2:
        raise UsageError(
            f"a comparison needs at least two runs, found {len(reports)}; the first is the baseline"
        )
    names = _distinct(list(names) or [_name(report) for report in reports])
    different = _check_alike(reports, names, frozenset(allow_different))
    others = range(1, len(reports))
    return Comparison(
        names=names,
        inputs=tuple(report.inputs for report in reports),
        different=different,
        n_steps=tuple(len({row["step"] for row in report.rows("steps")}) for report in reports),
        metrics=tuple(row for run in others for row in _metrics(reports[0], reports[run], run)),
        findings=tuple(row for run in others for row in _findings(reports[0], reports[run], run)),
        collectives=tuple(row for run in others for row in _collectives(reports[0], reports[run], run)),
        kernels=tuple(row for run in others for row in _kernels(reports[0], reports[run], run)),
    )


def _name(report: Report) -> str:
    path = str(report.inputs[0]["path"]) if report.inputs else "run"
    file = path.replace("\\", "/").rsplit("/", 1)[-1]
    return _ENDINGS.sub("", file) or file


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names, numbered where several runs would have the same."""
    return tuple(
        name if names.count(name) == 1 else f"{name}#{names[: place + 1].count(name)}"
        for place, name in enumerate(names)
    )


def _check_alike(reports: Sequence[Report], names: Sequence[str], allowed: frozenset[str]) -> tuple[Row, ...]:
    """Return what differs and is allowed to; refuse what differs besides."""
    if unknown := sorted(allowed - set(KEYS)):
        raise UsageError(f"runs are not compared by {unknown[0]!r}; the keys are: {', '.join(KEYS)}")
    traits = [_traits(report) for report in reports]
    for report, name in zip(reports, names, strict=True):
        check_account(report, name)
    different = [
        {"key": key, "values": [of_run.get(key) for of_run in traits]}
        for key in KEYS
        if all(key in of_run for of_run in traits) and len({_text(of_run[key]) for of_run in traits}) > 1
    ]
    refused = [row for row in different if row["key"] not in allowed]
    if refused:
        what = "; ".join(
            f"{row['key']}: {' and '.join(dict.fromkeys(map(_text, row['values'])))}" for row in refused
        )
        keys = " ".join(f"--allow-different {row['key']}" for row in refused)
        raise UsageError(
            f"{', '.join(names)} cannot be compared, they were not run alike ({what}); if that is what you mean to"
            f" compare, add {keys}"
        )
    return tuple(different)


def _traits(report: Report) -> dict[str, Any]:
    """Return what must be alike, as far as the report knows it."""
    ranks = report.rows("ranks")
    run: Mapping[str, Any] = next((row["run"] for row in report.inputs if row["run"]), {})
    own = {
        "device_kind": ", ".join(sorted({row["device_kind"] for row in report.inputs})),
        "ranks": len(ranks),
        "window": ", ".join(sorted({row["window_basis"] for row in ranks})),
        "comm": "some" if any(row["comm_ns"] for row in ranks) else "none",
    }
    return {**{key: run[key] for key in _RUN_KEYS if key in run}, **own}


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def steps_of(report: Report) -> tuple[tuple[Row, ...], ...]:
    """Return the rows of all ranks of each step; where no steps are known, the whole window is one.

    Args:
        report: Report to read.
    """
    groups: dict[int, list[Row]] = {}
    for row in report.rows("steps"):
        groups.setdefault(row["step"], []).append(row)
    if not groups:
        return (report.rows("ranks"),) if report.rows("ranks") else ()
    return tuple(tuple(groups[step]) for step in sorted(groups))


def medians(report: Report) -> dict[str, float | None]:
    """Return the median over steps of each metric, by its name; None where it is not known or does not apply.

    Args:
        report: Report to read.
    """
    found = {metric.name: _values(report, metric) for metric in METRICS}
    return {name: median(values) if values else None for name, values in found.items()}


def _values(report: Report, metric: Metric) -> list[float]:
    values = [metric.of_step(rows) for rows in steps_of(report)]
    return [value for value in values if value is not None]


def _metrics(baseline: Report, report: Report, run: int) -> Iterable[Row]:
    for metric in METRICS:
        before, after = _values(baseline, metric), _values(report, metric)
        limit = _limit(baseline, report, metric, before, after) if before and after else None
        verdict = _verdict(metric, judge(before, after, limit)) if before and after else UNKNOWN
        old, new = (median(values) if values else None for values in (before, after))
        yield {
            "run": run,
            "metric": metric.name,
            "unit": metric.unit,
            "baseline": old,
            "value": new,
            "change": None if old is None or new is None else new - old,
            "relative_change": None if old is None or new is None or not old else (new - old) / old,
            "noise": limit,
            "verdict": verdict,
        }


def _limit(
    baseline: Report, report: Report, metric: Metric, before: Sequence[float], after: Sequence[float]
) -> float | None:
    """Return up to which change nothing is said: never below a hundredth of the step, unless times are computed."""
    if all(_is_exact(each) for each in (baseline, report)):
        return 0.0
    limit = noise(before, after)
    whole = min(median(_values(each, METRICS[0])) for each in (baseline, report))
    return None if limit is None else max(limit, FLOOR * (whole if metric.unit == "ns" else 1.0))


def _is_exact(report: Report) -> bool:
    """Return whether the times are computed: the same run gives the same ones."""
    return all(row["device_kind"] == CPU_EMULATED and row["clock"] == _EXACT_CLOCK for row in report.inputs)


def _verdict(metric: Metric, judged: str) -> str:
    if judged in (NO_DIFFERENCE, UNKNOWN) or metric.is_high_good is None:
        return judged
    return BETTER if (judged == "higher") == metric.is_high_good else WORSE


def _findings(baseline: Report, report: Report, run: int) -> Iterable[Row]:
    before, after = (
        _by_key(each.rows("findings"), lambda row: (row["code"], row["form"])) for each in (baseline, report)
    )
    for code, form in sorted({*before, *after}, key=lambda key: (key[0], key[1] or "")):
        old, new = before.get((code, form)), after.get((code, form))
        yield {
            "run": run,
            "code": code,
            "form": form,
            "status": GONE if new is None else NEW if old is None else KEPT,
            "baseline_recoverable_ns": None if old is None else _largest(old, "recoverable_ns"),
            "recoverable_ns": None if new is None else _largest(new, "recoverable_ns"),
            "predicted_step_ns": None if old is None else _least(old, "predicted_step_ns"),
        }


def _collectives(baseline: Report, report: Report, run: int) -> Iterable[Row]:
    fields = {"total": "total_ns", "exposed": "exposed_ns"}
    return _side_by_side(
        (baseline, report),
        run,
        "collectives",
        ("kind", "name"),
        lambda row: (row["kind"], row["name"]),
        fields,
    )


def _kernels(baseline: Report, report: Report, run: int) -> Iterable[Row]:
    return _side_by_side(
        (baseline, report), run, "kernels", ("role", "name"),
        lambda row: (row["role"], function_name(row["name"])), {"total": "total_ns"},
    )  # fmt: skip


def _side_by_side(
    reports: tuple[Report, Report],
    run: int,
    section: str,
    names: tuple[str, ...],
    key: Callable[[Row], tuple[str, ...]],
    fields: Mapping[str, str],
) -> list[Row]:
    """Return times per step and rank of each group of rows, the largest change first."""
    groups = [_by_key(report.rows(section), key) for report in reports]
    shares = [max(1, len(steps_of(report)) * len(report.rows("ranks"))) for report in reports]
    rows: list[dict[str, Any]] = []
    for name in sorted({*groups[0], *groups[1]}):
        row: dict[str, Any] = {"run": run, **dict(zip(names, name, strict=True))}
        for title, field in fields.items():
            old, new = (
                round(sum(member[field] for member in group[name]) / share) if name in group else None
                for group, share in zip(groups, shares, strict=True)
            )
            row |= {
                f"baseline_{title}_ns": old,
                f"{title}_ns": new,
                f"{title}_change_ns": (new or 0) - (old or 0),
            }
        rows.append(row)
    first = next(iter(fields))
    return sorted(rows, key=lambda row: -abs(row[f"{first}_change_ns"]))


def _by_key(rows: Iterable[Row], key: Callable[[Row], _Key]) -> dict[_Key, list[Row]]:
    groups: dict[_Key, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _largest(rows: Sequence[Row], field: str) -> Any:
    return max((row[field] for row in rows if row[field] is not None), default=None)


def _least(rows: Sequence[Row], field: str) -> Any:
    return min((row[field] for row in rows if row[field] is not None), default=None)
