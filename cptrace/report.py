"""Report: what all analyses of one or more traces found, and its JSON (schema `cptrace.report/1`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from cptrace.errors import SourceError
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
    """

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
            KeyError: There is no such section.
        """
        if section not in SECTIONS:
            raise KeyError(f"a report has no section {section!r}; it has {', '.join(SECTIONS)}")
        return self.sections.get(section, ())

    def frame(self, section: str) -> pd.DataFrame:
        """Return a section as a frame.

        Args:
            section: One of `SECTIONS`.
        """
        import pandas as pd  # here: a report can be made, read and rendered without it

        return pd.DataFrame(list(self.rows(section)))

    def _repr_html_(self) -> str:
        """Return the headline, findings and accounts as HTML: what a notebook shows of a report."""
        from importlib import import_module  # by name: a lower layer does not depend on those who show it

        shown: str = import_module("cptrace.renderers.html").summary(self)
        return shown

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
            document = json.loads(text)
        except ValueError as error:
            raise SourceError(f"not a report: the text is no JSON ({error})") from error
        found = document.get("schema") if isinstance(document, dict) else None
        if found != SCHEMA:
            raise SourceError(
                f"not a report of schema {SCHEMA}, found {found!r}; make it again with this version"
            )
        try:
            return cls._from_document(document)
        except (KeyError, TypeError) as error:
            raise SourceError(
                f"not a report: it lacks a part of {SCHEMA} ({error}); make it again with this version"
            ) from error

    @classmethod
    def _from_document(cls, document: Mapping[str, Any]) -> Report:
        return cls(
            inputs=tuple(document["inputs"]),
            sections=MappingProxyType({section: tuple(document.get(section, ())) for section in SECTIONS}),
            not_applicable=tuple(
                NotApplicable(entry["analysis"], entry["reason"], tuple(entry["missing"]))
                for entry in document["not_applicable"]
            ),
            coverage=document["coverage"],
        )
