"""`cptrace whatif`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from cptrace.cli.analyze import compile_pattern
from cptrace.cli.output import check_output, has_color, terminal_width, write_output
from cptrace.cli.settings import CONTEXT_SETTINGS, text_or_json
from cptrace.requests import ReadOptions, ScopeRequest, WhatIfOptions, parse_window

# Said here too: what_if.fixable() takes its time to import, and help need not wait for it.
FIXABLE: Final = (
    "missing-event:host-sync",
    "shared-stream",
    "single-buffer",
    "shared-communicator",
    "late-launch:in-steps",
    "queue-order",
    "peer-wait:straggler",
    "peer-wait:slow-link",
    "imbalance",
)
"""Findings that `--fix` mends, with their forms where only some can be mended."""


@click.command(
    context_settings=CONTEXT_SETTINGS,
    help=f"""Predict the step time of a recorded run with findings mended, or with other links and devices.

The recorded run is replayed with its waits, on all ranks together, as the predictions of findings are; several changes
combine. Several files are the ranks or nodes of one job. Findings that can be mended: {", ".join(FIXABLE)};
`cptrace explain` says what each is.

Examples:

\b
  cptrace whatif report.sqlite --fix single-buffer --fix missing-event:host-sync
  cptrace whatif report.sqlite --scale-transfer 0.5     # a link of twice the bandwidth""",
)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--fix", "fixes", metavar="CODE[:FORM]", multiple=True, help="Mend this finding; may be repeated."
)
@click.option(
    "--link-gbps",
    type=float,
    help="Bandwidth of the link in Gbit/s, for emulated runs, which record their own; latency stays.",
)
@click.option(
    "--scale-transfer",
    type=float,
    help="Factor on each transfer's time once all that take part have arrived.",
)
@click.option("--scale-compute", type=float, help="Factor on each compute operation's time.")
@click.option(
    "--rank", "ranks", type=int, multiple=True, help="Rank that the factors are for; may be repeated."
)
@text_or_json("Text for people, or cptrace.whatif/1 for programs.", name="format_name")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write to a file.")
@click.option("--force", is_flag=True, help="Replace the output file if it exists.")
@click.option("--step-range", metavar="REGEX", help="NVTX ranges that are steps, as for analyze.")
@click.option("--window", metavar="A:B|all", help="Part of the trace that counts, as for analyze.")
@click.option(
    "--drop-invalid", is_flag=True, help="Leave out device work with impossible times, and count it."
)
def whatif(
    paths: tuple[Path, ...],
    fixes: tuple[str, ...],
    link_gbps: float | None,
    scale_transfer: float | None,
    scale_compute: float | None,
    ranks: tuple[int, ...],
    format_name: str,
    output: Path | None,
    force: bool,
    step_range: str | None,
    window: str | None,
    drop_invalid: bool,
) -> None:
    scope = ScopeRequest(
        step_pattern=compile_pattern(step_range), window=None if window is None else parse_window(window)
    )
    check_output(output, force=force, inputs=paths)
    from cptrace import (
        what_if,
    )  # here: pandas takes its time to import, and wrong options need not wait for it
    from cptrace.renderers import RenderOptions, whatif_text

    prediction = what_if.whatif(
        paths,
        WhatIfOptions(
            fixes, link_gbps, scale_transfer, scale_compute, ranks, scope, ReadOptions(drop_invalid)
        ),
    )
    options = RenderOptions(width=terminal_width(), has_color=output is None and has_color())
    text = prediction.to_json() if format_name == "json" else whatif_text.render(prediction, options)
    write_output(text, output)
