"""`cptrace schemes`: what can be run."""

from __future__ import annotations

import json
from typing import Any

import click

from cptrace.cli.settings import CONTEXT_SETTINGS
from cptrace.schemes import SCHEMES, SchemeInfo

_SYMBOLS = (
    "Bytes are what one rank sends in one layer, batch 1: S tokens, P ranks, e bytes per element,\n"
    "q = (S/P) Hq D e is one rank's queries, c = (S/P) Hkv D e its keys or its values."
)


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option(
    "--format",
    "output_format",
    type=click.Choice(("text", "json")),
    default="text",
    show_default=True,
    help="Text for people, or a JSON list.",
)
def schemes(output_format: str) -> None:
    """List the context-parallel schemes that `cptrace run` knows, with what each one sends."""
    if output_format == "json":
        click.echo(json.dumps([to_json(scheme) for scheme in SCHEMES], indent=2))
        return
    for scheme in SCHEMES:
        click.echo(describe(scheme))
    click.echo(f"\n{_SYMBOLS}")


def describe(scheme: SchemeInfo) -> str:
    """Return what a user should know about a scheme, in a few lines."""
    rows = {
        "communication": scheme.pattern,
        "layout": _layouts(scheme),
        "forward": scheme.forward_formula,
        "backward": scheme.backward_formula,
        "limits": scheme.limits,
    }
    details = "\n".join(f"    {name:<14}{text}" for name, text in rows.items())
    return f"{scheme.name}\n    {scheme.summary}\n{details}"


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
