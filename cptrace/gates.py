"""Conditions under which a check fails: the grammar of `--fail-if`, and the findings of `--fail-on`.

    CONDITION = METRIC ( ">" | "<" ) LIMIT
    LIMIT     = [ "+" | "-" ] NUMBER [ "%" | "pp" | "ns" | "us" | "ms" | "s" ]

Without a sign the limit is the value itself: `overlap < 80%`, `step_ns > 200ms`. With a sign it is the change from the
baseline: `step_ns > +5%` is five hundredths of the baseline more, `overlap < -5pp` five percentage points less,
`exposed_comm_ns > +2ms` two milliseconds more. A change that does not exceed the noise of the steps never holds; where
the noise is not known (runs of one step), the limit alone decides. A metric that is not known in a run is an error, not
a pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from types import MappingProxyType
from typing import Final, NamedTuple

from cptrace.comparison import METRICS, Comparison
from cptrace.errors import UsageError
from cptrace.noise import NO_DIFFERENCE
from cptrace.report import Report, Row
from cptrace.units import NS_PER_UNIT, format_fraction, format_ns

_CONDITION: Final = re.compile(
    r"\s*([a-z_]+)\s*([<>])\s*([+-]?)\s*([0-9]+(?:\.[0-9]+)?)\s*(%|pp|ns|us|ms|s|)\s*"
)
_SHAPE: Final = (
    "write METRIC > LIMIT or METRIC < LIMIT, such as 'step_ns > +5%', 'overlap < -5pp' or 'step_ns > 200ms'"
)
_FRACTIONS: Final = {"%": 100, "pp": 100, "": 1}
# Said here too, so that the command line starts without the findings themselves, which take their time to import.
FORMS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "shared-stream": (),
        "missing-event": ("host-sync", "race"),
        "single-buffer": (),
        "required-order": ("data-flow", "transfer-bound"),
        "late-launch": ("in-steps", "between-steps"),
        "peer-wait": ("straggler", "slow-link", "skew"),
        "shared-communicator": (),
        "queue-order": (),
        "imbalance": ("schedule", "work"),
        "cp-off": (),
        "padding": (),
        "graph-hidden": (),
        "low-coverage": ("unclassified", "launches", "waits"),
    }
)
"""Forms of each finding that `--fail-on` knows, by its code; none where there is one only."""
CODES: Final = tuple(FORMS)
"""Codes of findings that `--fail-on` knows."""
ANY_FINDING: Final = "findings"
"""What a report calls all of them together, where none could be looked for."""


@dataclass(frozen=True, slots=True)
class Condition:
    """What must not be.

    Attributes:
        text: As it was written.
        metric: Name of one of `comparison.METRICS`.
        is_above: Holds above the limit, else below it.
        limit: Value, change, or (`is_relative`) change as a part of the baseline; signed, in ns or as a fraction.
        is_change: The limit is of the change from the baseline.
        is_relative: The limit is a part of the baseline.
    """

    text: str
    metric: str
    is_above: bool
    limit: float
    is_change: bool
    is_relative: bool


def parse_condition(text: str) -> Condition:
    """Return the condition that a text means.

    Args:
        text: As the grammar above says.

    Raises:
        UsageError: The text does not follow the grammar, names no metric, or its unit is not the metric's.
    """
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise UsageError(f"cannot read the condition {text!r}; {_SHAPE}")
    name, sign, prefix, number, unit = match.groups()
    metric = next((metric for metric in METRICS if metric.name == name), None)
    if metric is None:
        known = ", ".join(metric.name for metric in METRICS)
        raise UsageError(f"the condition {text!r} names no metric; the metrics are: {known}")
    is_relative = bool(prefix) and unit == "%"
    units = NS_PER_UNIT if metric.unit == "ns" else _FRACTIONS
    if not is_relative and unit not in units:
        raise UsageError(
            f"the condition {text!r} has no unit of {name}; use {', '.join(u for u in units if u)}"
            + (", or +N% for a change" if metric.unit == "ns" else "")
        )
    value = Decimal(number) * -1 if prefix == "-" else Decimal(number)
    scaled = value * NS_PER_UNIT[unit] if unit in NS_PER_UNIT else value / _FRACTIONS[unit]
    return Condition(text.strip(), name, sign == ">", float(scaled), bool(prefix), is_relative)


def failures(comparison: Comparison, conditions: Iterable[Condition]) -> tuple[str, ...]:
    """Return one line for each condition that holds in a run: what it was, what it is, which condition.

    Args:
        comparison: Runs side by side.
        conditions: What must not be.

    Raises:
        UsageError: A metric of a condition is not known in a run.
    """
    lines = []
    for condition in conditions:
        for row in comparison.metrics:
            if row["metric"] == condition.metric and _holds(condition, row, comparison.names):
                lines.append(_describe(condition, row, comparison.names[row["run"]]))
    return tuple(lines)


def _holds(condition: Condition, row: Row, names: Sequence[str]) -> bool:
    missing = "value" if row["value"] is None else "baseline"
    if row["value"] is None or (condition.is_change and row["baseline"] is None):
        run = names[row["run"]] if missing == "value" else names[0]
        raise UsageError(
            f"--fail-if {condition.text!r} cannot be decided: {condition.metric} is not known in {run};"
            " `cptrace analyze` says why"
        )
    if not condition.is_change:
        value = row["value"]
    elif row["verdict"] == NO_DIFFERENCE:
        return False
    elif not condition.is_relative:
        value = row["change"]
    elif row["relative_change"] is None:  # from nothing: any change is more than any part of it
        value = float("inf") if row["change"] > 0 else float("-inf") if row["change"] < 0 else 0.0
    else:
        value = row["relative_change"]
    return bool(value > condition.limit if condition.is_above else value < condition.limit)


def _describe(condition: Condition, row: Row, name: str) -> str:
    show = format_ns if row["unit"] == "ns" else format_fraction
    return f"{name}: {row['metric']} is {show(row['value'])}, was {show(row['baseline'])}; {condition.text!r} holds"


class Wanted(NamedTuple):
    """A finding that was asked for.

    Attributes:
        code: Its code.
        form: Form of it, None for any.
    """

    code: str
    form: str | None

    def __str__(self) -> str:
        """Return it as it is asked for."""
        return self.code if self.form is None else f"{self.code}:{self.form}"


def parse_code(text: str, asker: str) -> Wanted:
    """Return the finding that a text means.

    Args:
        text: CODE or CODE:FORM.
        asker: Option or command that it was given to, for the message.

    Raises:
        UsageError: There is no such code, or the code has no such form; the message lists those that there are.
    """
    code, colon, form = text.partition(":")
    if code not in FORMS:
        raise UsageError(f"there is no finding {code!r}; the codes are: {', '.join(CODES)}")
    if colon and form not in FORMS[code]:
        forms = ", ".join(FORMS[code]) or "none"
        raise UsageError(f"{asker} {text}: {code} has no form {form!r}; its forms are: {forms}")
    return Wanted(code, form or None)


def parse_codes(text: str) -> tuple[Wanted, ...]:
    """Return the findings that the text of `--fail-on` lists, each once.

    Args:
        text: CODE or CODE:FORM with commas between them, such as `shared-stream,missing-event:race`.

    Raises:
        UsageError: It is empty, or names an unknown code or form.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise UsageError(f"--fail-on {text!r} names no code; the codes are: {', '.join(CODES)}")
    return tuple(dict.fromkeys(parse_code(part, "--fail-on") for part in parts))


def found(report: Report, wanted: Sequence[Wanted]) -> tuple[Wanted, ...]:
    """Return those of the findings asked for that a report has, in the order asked for.

    Args:
        report: Report to look at.
        wanted: Findings asked for; one without a form is there in any form.

    Raises:
        UsageError: None is there, but one could not be looked for: that is no pass.
    """
    there = {Wanted(row["code"], form) for row in report.rows("findings") for form in (row["form"], None)}
    if held := tuple(each for each in wanted if each in there):
        return held
    for name, reason in not_looked_for(report).items():
        if undecided := [each for each in wanted if _is_part_of(each, _meant(name))]:
            raise UsageError(
                f"--fail-on {undecided[0]} cannot be decided: {name} could not be looked for: {reason}"
            )
    return ()


def _is_part_of(wanted: Wanted, missing: Wanted) -> bool:
    """Return whether what could not be looked for is what was asked for, or a form of it, or holds it."""
    return missing.code in (wanted.code, ANY_FINDING) and (
        None in (missing.form, wanted.form) or missing.form == wanted.form
    )


def not_looked_for(report: Report) -> dict[str, str]:
    """Return what could not be looked for, and why: codes such as `peer-wait`, `missing-event (race)`, or all findings.

    Args:
        report: Report to look at.
    """
    # An analysis that a finding rests on has the finding's name, with the underscores of a section.
    reasons = {
        name.replace("_", "-"): entry.reason
        for entry in reversed(report.not_applicable)
        for name in reversed(entry.analysis.split(", "))
    }
    return {name: reasons[name] for name in reversed(reasons) if _meant(name).code in (*CODES, ANY_FINDING)}


def _meant(name: str) -> Wanted:
    """Return the finding that a report means by a name such as `peer-wait` or `missing-event (race)`."""
    code, _, form = name.removesuffix(")").partition(" (")
    return Wanted(code, form or None)
