"""Reports of simulated runs and of tiny exports, and what their diagnoses say."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cptrace
from cptrace.report import Report
from tests.support.simulated_run import Host, write
from tests.support.tiny_export import TinyExport

Row = Mapping[str, Any]
Key = tuple[str, str | None]
_ONE_OF_MANY = re.compile(
    r"(?<![\w.,])1 (\w+ )?(ops|transfers|waits|kernels|steps|ranks|copies|calls|events|are|were)\b"
    r"|\branks \d+ |\brank \d+ wait\b"
)


def report_of(run: Sequence[Host] | TinyExport, folder: Path, **how: object) -> Report:
    """Return the report of a simulated run, written as `how` says, or of an export."""
    path = folder / f"{len(list(folder.iterdir()))}.sqlite"
    return cptrace.analyze(run.write(path) if isinstance(run, TinyExport) else write(run, path, **how))


def findings(report: Report) -> dict[Key, Row]:
    """Return all findings by code and form."""
    rows = {(row["code"], row["form"]): row for row in report.rows("findings")}
    assert len(rows) == len(report.rows("findings")), "two findings of one code and form"
    for row in rows.values():
        wrong = _ONE_OF_MANY.search(row["summary"])
        assert wrong is None, f"{row['code']} counts one as several: {row['summary']}"
    return rows


def lost_time(report: Report) -> set[Key]:
    """Return the findings that say what went wrong: all but those that are told for information."""
    return {key for key, row in findings(report).items() if row["severity"] != "info"}


def not_looked_for(report: Report) -> dict[str, str]:
    """Return why what could not be looked for was not, by the names that the report gives."""
    return {name: entry.reason for entry in report.not_applicable for name in entry.analysis.split(", ")}


def step_before(row: Row) -> int:
    """Return the recorded step time that a finding's gain is counted from."""
    return row["predicted_step_ns"] + row["recoverable_ns"]
