"""`cptrace doctor`: what this machine can run and record."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from cptrace.cli.output import fit_lines, terminal_width, write_output
from cptrace.cli.settings import CONTEXT_SETTINGS, text_or_json

if TYPE_CHECKING:
    from cptrace.doctor import Finding

SCHEMA: Final = "cptrace.doctor/1"


@click.command(context_settings=CONTEXT_SETTINGS)
@text_or_json()
def doctor(output_format: str) -> None:
    """Say what is here to run and record with, what each lack costs, and how to mend it.

    nsys is tried on a tiny report, torch is asked in a process of its own. That something lacks is no error.
    """
    from cptrace.doctor import examine

    findings = examine()
    text = (
        json.dumps(to_json(findings), indent=2) + "\n"
        if output_format == "json"
        else describe(findings, terminal_width())
    )
    write_output(text, None)


def to_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return findings for programs."""
    return {"schema": SCHEMA, "findings": [asdict(finding) for finding in findings]}


def describe(findings: Sequence[Finding], width: int) -> str:
    """Return findings for people: what is there in a line, what lacks with its cost and its mend.

    Args:
        findings: What was found.
        width: Columns to write for.
    """
    name_width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        head = f"{finding.state:<8}{finding.name:<{name_width}}  {finding.found}"
        lines.append(fit_lines(head, width, hang=name_width + 10))
        details = (("costs:", finding.cost), ("mend:", finding.mend))
        lines += [fit_lines(f"        {name:<7}{text}", width, hang=7) for name, text in details if text]
    return "\n".join(lines) + "\n"
