"""`cptrace schemes`: what can be run."""

from __future__ import annotations

import click

from cptrace.schemes import SCHEMES, SchemeInfo


@click.command()
def schemes() -> None:
    """List the context-parallel schemes that `cptrace run` knows."""
    for scheme in SCHEMES:
        click.echo(describe(scheme))


def describe(scheme: SchemeInfo) -> str:
    """Return what a user should know about a scheme, in a few lines."""
    rows = (("communication", scheme.pattern), ("layout", scheme.layout), ("limits", scheme.limits))
    details = "\n".join(f"    {name:<14}{text}" for name, text in rows)
    return f"{scheme.name}\n    {scheme.summary}\n{details}"
