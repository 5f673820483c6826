"""Report: what all analyses of one or more traces found, and its JSON (schema `cptrace.report/1`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn

from cptrace.errors import SourceError, UsageError
from cptrace.labels import CPU_EMULATED
from cptrace.outcome import NotApplicable

if TYPE_CHECKING:
    import pandas as pd

    from cptrace.timeline import Timeline

SCHEMA: Final = "cptrace.report/1"
SECTIONS: Final = (
    "ranks",
    "steps",
    "collectives",
    "streams",
    "kernels",
    "traffic",
    "messages",
    "peer_waits",
    "schemes",
    "start_causes",
    "findings",
)

_ACCOUNT: Final = (
    "rank", "window_ns", "compute_ns", "comm_ns", "overlapped_comm_ns", "exposed_comm_ns", "idle_ns", "peer_wait_ns",
    "comm_share", "exposed_comm_share", "overlap",
)  # fmt: skip
_NEEDED: Final = {
    "inputs": ("path", "device_kind", "clock", "run"),
    "ranks": (*_ACCOUNT, "window_basis"),
    "steps": (*_ACCOUNT, "step"),
    "collectives": ("kind", "name", "total_ns", "exposed_ns"),
    "kernels": ("role", "name", "total_ns"),
    "findings": ("code", "form", "recoverable_ns", "predicted_step_ns"),
}
"""What is read of the rows of a saved report."""

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Report:
    """What the analyses found. Rows hold plain integers, floats, texts and None for missing values.

    Attributes:
        inputs: One row per trace: path, format, versions, device kind, clock.
        sections: Rows of each of `SECTIONS`.
        not_applicable: Analyses that could not be made, and why.
        coverage: How much of the traces the figures rest on.
        timeline: When what ran where, for those who draw it; not in the JSON, and None unless it was asked for.
        notebook_view: What makes the HTML that a notebook shows of a report. Those who show set it: a report does not
            depend on them.
    """

    notebook_view: ClassVar[Callable[[Report], str] | None] = None

    inputs: tuple[Row, ...]
    sections: Mapping[str, tuple[Row, ...]] = field(default_factory=lambda: MappingProxyType({}))
    not_applicable: tuple[NotApplicable, ...] = ()
    coverage: Row = field(default_factory=lambda: MappingProxyType({}))
    timeline: Timeline | None = field(default=None, compare=False, repr=False)

    def rows(self, section: str) -> tuple[Row, ...]:
        """Return the rows of a section, none where it is empty.

        Args:
            section: One of `SECTIONS`.

        Raises:
            UsageError: There is no such section.
        """
        if section not in SECTIONS:
            raise UsageError(
                f"a report has no section {section!r}; its sections are {', '.join(SECTIONS)}; inputs, not_applicable,"
                " coverage and timeline are attributes, such as report.coverage"
            )
        return self.sections.get(section, ())

    def frame(self, section: str) -> pd.DataFrame:
        """Return a section as a frame.

        Args:
            section: One of `SECTIONS`.

        Raises:
            UsageError: There is no such section.
        """
        import pandas as pd  # here: a report can be made, read and rendered without it

        return pd.DataFrame(list(self.rows(section)))

    def _repr_html_(self) -> str | None:
        """Return what a notebook shows of a report, None where nothing is there to make it."""
        view = type(self).notebook_view
        return None if view is None else view(self)

    def to_json(self) -> str:
        """Return the report as JSON: the same bytes for the same input, missing values as null, one final newline."""
        document = {
            "schema": SCHEMA,
            "inputs": [dict(row) for row in self.inputs],
            **{section: [dict(row) for row in self.rows(section)] for section in SECTIONS},
            "not_applicable": [
                {"analysis": entry.analysis, "reason": entry.reason, "missing": list(entry.missing)}
                for entry in self.not_applicable
            ],
            "coverage": dict(self.coverage),
        }
        return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Return the report that a JSON text holds.

        Args:
            text: JSON of the schema `cptrace.report/1`; additions to it are ignored.

        Raises:
            SourceError: The text is no JSON, or of another schema.
        """
        try:
            document = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise SourceError(f"not a report: the text is no JSON ({error})") from error
        found = document.get("schema") if isinstance(document, dict) else None
        if found != SCHEMA:
            raise SourceError(
                f"not a report of schema {SCHEMA}, found {found!r}; make it again with this version"
            )
        try:
            return cls._from_document(document)
        except (KeyError, TypeError, AttributeError) as error:
            raise SourceError(
                f"not a report: it lacks a part of {SCHEMA} ({error}); make it again with this version"
            ) from error

    @classmethod
    def _from_document(cls, document: Mapping[str, Any]) -> Report:
        for section in ("inputs", *SECTIONS):
            _check_rows(section, document.get(section, []))
        return cls(
            inputs=tuple(document["inputs"]),
            sections=MappingProxyType({section: tuple(document.get(section, ())) for section in SECTIONS}),
            not_applicable=tuple(
                NotApplicable(entry["analysis"], entry["reason"], tuple(entry["missing"]))
                for entry in document["not_applicable"]
            ),
            coverage=document["coverage"],
        )


def emulation(inputs: Iterable[Row]) -> str:
    """Return that no figure of emulated inputs is a GPU's; nothing where none of them is emulated.

    Args:
        inputs: Rows of `Report.inputs`.
    """
    clocks = {str(row["clock"] or "unknown") for row in inputs if row["device_kind"] == CPU_EMULATED}
    return f"CPU emulation, {' and '.join(sorted(clocks))} clock: no figure is a GPU's" if clocks else ""


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _check_rows(section: str, rows: Any) -> None:
    """Check that rows of a saved report have what is read of them, and times that are numbers."""
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise TypeError(f"{section} is no list of objects")
    for row in rows:
        if lacking := [name for name in _NEEDED.get(section, ()) if name not in row]:
            raise TypeError(f"{section} has a row without {lacking[0]}")
        for name in row:
            if name.endswith("_ns") and not (row[name] is None or type(row[name]) in (int, float)):
                raise TypeError(f"{section} has a row whose {name} is no number")
