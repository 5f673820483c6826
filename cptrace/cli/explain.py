"""`cptrace explain`: what the codes of findings mean."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from cptrace.capture.run_spec import RunSpec
from cptrace.cli.output import terminal_width
from cptrace.cli.settings import CONTEXT_SETTINGS, text_or_json
from cptrace.faults import FAULTS, FaultInfo, reason_not_applicable
from cptrace.gates import parse_code

if TYPE_CHECKING:
    from cptrace.findings import Diagnosis


class _Setting(NamedTuple):
    """A run to try a fault on: its options as a user types them and as a run has them."""

    options: str
    spec: RunSpec


# The first in which a fault changes something shows it.
_SETTINGS: Final = (
    _Setting("--scheme ring", RunSpec(scheme="ring")),
    _Setting("--scheme ring --link-gbps 0.2", RunSpec(scheme="ring", link_gbps=0.2)),
    _Setting("--scheme zigzag_ring --causal", RunSpec(scheme="zigzag_ring", causal=True)),
)
_CLOCK: Final = "--clock virtual"
# Not broken on purpose: these are so by themselves.
_BY_THEMSELVES: Final = (
    ("required-order", f"cptrace run --scheme ulysses {_CLOCK}"),
    ("padding", f"cptrace run --scheme zigzag_ring --causal --seq-len 250 {_CLOCK}"),
)


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("finding", metavar="[CODE[:FORM]]", required=False)
@text_or_json()
def explain(finding: str | None, output_format: str) -> None:
    """Say what a finding means: how it is detected, how it looks in the timeline, how to mend it.

    With a form too, as --fail-on and --fix take it, all of the code is said. Without CODE, list all of them.
    """
    wanted = None if finding is None else parse_code(finding, "explain")
    from cptrace.findings import FINDINGS, find_diagnosis  # here: pandas takes its time to import

    if wanted is None:
        found = [to_json(diagnosis) for diagnosis in FINDINGS]
        click.echo(json.dumps(found, indent=2) if output_format == "json" else _list_of(FINDINGS))
        return
    diagnosis = find_diagnosis(wanted.code)
    if output_format == "json":
        click.echo(json.dumps(to_json(diagnosis), indent=2))
    else:
        click.echo("\n".join(_describe(diagnosis, terminal_width())))


def _list_of(diagnoses: Iterable[Diagnosis]) -> str:
    lines = [f"{diagnosis.code:<20} {diagnosis.title}" for diagnosis in diagnoses]
    return "\n".join([*lines, "", "`cptrace explain CODE` says more."])


def _describe(diagnosis: Diagnosis, width: int) -> Iterable[str]:
    explanation = diagnosis.explanation
    yield f"{diagnosis.code}: {diagnosis.title}"
    if diagnosis.forms:
        yield f"forms: {', '.join(diagnosis.forms)}"
    for heading, text in (
        ("What it is", explanation.what),
        ("How it is detected", explanation.detected),
        ("How it looks in the timeline", explanation.looks),
        ("How to mend it", explanation.fix),
    ):
        yield from ("", heading, *_wrapped(text, width))
    yield from ("", "See it")
    yield from (f"  {command}" for command in commands(diagnosis))
    if not commands(diagnosis):
        yield from _wrapped("No option of `cptrace run` causes it.", width)
    if diagnosis.fixes:
        yield from ("", "What mending it would give")
        for fix in diagnosis.fixes:
            yield f"  cptrace whatif REPORT --fix {diagnosis.code}{f':{fix.form}' if fix.form else ''}"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, max(width, 20), initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )


def commands(diagnosis: Diagnosis) -> tuple[str, ...]:
    """Return the commands that make a run with this finding.

    Args:
        diagnosis: Line of the list of findings.
    """
    faults = (command_of(fault) for fault in FAULTS if fault.finding == diagnosis.code)
    return (*faults, *(command for code, command in _BY_THEMSELVES if code == diagnosis.code))


def command_of(fault: FaultInfo) -> str:
    """Return a command whose run has a fault and shows it.

    Args:
        fault: The fault.
    """
    asked = f"{fault.name}:1" if fault.takes_rank else fault.name
    options = next(
        setting.options for setting in _SETTINGS if reason_not_applicable(fault, setting.spec) is None
    )
    return f"cptrace run {options} --fault {asked} {_CLOCK}"


def to_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return an explanation for programs.

    Args:
        diagnosis: Line of the list of findings.
    """
    explanation = diagnosis.explanation
    return {
        "code": diagnosis.code,
        "title": diagnosis.title,
        "forms": list(diagnosis.forms),
        "what": explanation.what,
        "detected": explanation.detected,
        "looks": explanation.looks,
        "fix": explanation.fix,
        "has_prediction": bool(diagnosis.fixes),
        "faults": [fault.usage for fault in FAULTS if fault.finding == diagnosis.code],
        "commands": list(commands(diagnosis)),
    }
