"""`cptrace schemes`: what can be run."""

from __future__ import annotations

import json
from typing import Any, Final

import click

from cptrace.cli.output import fit_lines, terminal_width
from cptrace.cli.settings import CONTEXT_SETTINGS, text_or_json
from cptrace.schemes import SCHEMES, SchemeInfo

_NAME_WIDTH: Final = 14
_SYMBOLS: Final = (
    "Bytes are what one rank sends in one layer, batch 1: S tokens, P ranks, e bytes per element, "
    "q = (S/P) Hq D e is one rank's queries, c = (S/P) Hkv D e its keys or its values."
)


@click.command(context_settings=CONTEXT_SETTINGS)
@text_or_json("Text for people, or a JSON list.")
def schemes(output_format: str) -> None:
    """List the context-parallel schemes that `cptrace run` knows, with what each one sends."""
    if output_format == "json":
        click.echo(json.dumps([to_json(scheme) for scheme in SCHEMES], indent=2))
        return
    for scheme in SCHEMES:
        click.echo(describe(scheme, terminal_width()))
    click.echo("\n" + fit_lines(_SYMBOLS, terminal_width(), hang=0))


def describe(scheme: SchemeInfo, width: int) -> str:
    """Return what a user should know about a scheme, in a few lines.

    Args:
        scheme: The scheme.
        width: Columns to write for.
    """
    rows = {
        "communication": scheme.pattern,
        "layout": _layouts(scheme),
        "forward": scheme.forward_formula,
        "backward": scheme.backward_formula,
        "limits": scheme.limits,
    }
    details = "\n".join(f"    {name:<{_NAME_WIDTH}}{text}" for name, text in rows.items())
    summary = fit_lines(f"    {scheme.summary}", width, hang=0)
    return f"{scheme.name}\n{summary}\n{fit_lines(details, width, hang=_NAME_WIDTH)}"


def to_json(scheme: SchemeInfo) -> dict[str, Any]:
    """Return the same for programs."""
    return {
        "name": scheme.name,
        "summary": scheme.summary,
        "communication": scheme.pattern,
        "layout": scheme.layout,
        "causal_layout": scheme.causal_layout,
        "forward_bytes": scheme.forward_formula,
        "backward_bytes": scheme.backward_formula,
        "limits": scheme.limits,
        "min_cp_size": scheme.min_cp_size,
        "max_cp_size": scheme.max_cp_size,
        "options": list(scheme.options),
    }


def _layouts(scheme: SchemeInfo) -> str:
    if scheme.layout == scheme.causal_layout:
        return scheme.layout
    return f"{scheme.layout}; {scheme.causal_layout} with --causal"
