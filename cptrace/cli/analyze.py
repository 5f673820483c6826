"""`cptrace analyze`."""

from __future__ import annotations

import re
from pathlib import Path

import click

from cptrace.cli.output import check_output, has_color, terminal_width, write_output
from cptrace.cli.pages import PLOTLYJS, check_page, finish_page
from cptrace.cli.progress import loading
from cptrace.cli.settings import CONTEXT_SETTINGS
from cptrace.errors import GateError, UsageError
from cptrace.gates import CODES, found, parse_codes
from cptrace.renderers import RENDERERS, RenderOptions, find_renderer
from cptrace.requests import AnalyzeOptions, ReadOptions, ScopeRequest, parse_window
from cptrace.sources import SOURCES, Readings

_FORMATS = [renderer.name for renderer in RENDERERS]
_SOURCES = "\b\n" + "\n".join(f"  {source.name:12} {source.summary}" for source in SOURCES)


@click.command(
    context_settings=CONTEXT_SETTINGS,
    help=f"""Explain where the time of a trace goes: communication share, overlap, exposed communication, idle.

Several PATHs are the ranks or nodes of one job. Formats read:

{_SOURCES}

Without --window the steps are accounted for where the trace marks them with NVTX ranges, else everything from the
first to the last operation on each device.""",
)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--format",
    "format_name",
    type=click.Choice(_FORMATS),
    default="text",
    show_default=True,
    help="Form of the report.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write to a file.")
@click.option("--force", is_flag=True, help="Replace the output file if it exists.")
@click.option(
    "--step-range",
    metavar="REGEX",
    help="NVTX ranges that are steps, searched in their names.  [default: step, iteration, ProfilerStep and a number]",
)
@click.option(
    "--window",
    metavar="A:B|all",
    help="Part to account for, in trace time with units, such as 1.2s:1300ms; `all`: first to last operation.",
)
@click.option("--rank", "ranks", type=int, multiple=True, help="Only this rank; may be repeated.")
@click.option(
    "--drop-invalid", is_flag=True, help="Leave out device work with impossible times, and count it."
)
@click.option(
    "--findings/--no-findings",
    default=True,
    show_default=True,
    help="Look for causes too, or give the figures alone (in about half the time).",
)
@click.option("--details", is_flag=True, help="Text with every table and evidence, not one screen.")
@click.option("--open", "is_opened", is_flag=True, help="Show the page in a browser (--format html with -o).")
@click.option(
    "--plotlyjs",
    type=click.Choice(PLOTLYJS),
    default="inline",
    show_default=True,
    help="Where a page has plotly.js from: within itself, a file beside it, or the network.",
)
@click.option(
    "--fail-on",
    metavar="CODE[:FORM][,...]",
    help="Exit with code 10 if the report has such a finding, in that form if one is given, and with 2 if that could"
    f" not be looked for: {', '.join(CODES)}. `cptrace explain CODE` says which forms it has.",
)
def analyze(
    paths: tuple[Path, ...],
    format_name: str,
    output: Path | None,
    force: bool,
    step_range: str | None,
    window: str | None,
    ranks: tuple[int, ...],
    drop_invalid: bool,
    findings: bool,
    details: bool,
    is_opened: bool,
    plotlyjs: str,
    fail_on: str | None,
) -> None:
    stops = () if fail_on is None else parse_codes(fail_on)
    if stops and not findings:
        raise UsageError("--fail-on asks for findings and --no-findings for none; leave out one of them")
    request = ScopeRequest(
        step_pattern=compile_pattern(step_range),
        window=None if window is None else parse_window(window),
        ranks=ranks,
    )
    renderer = find_renderer(format_name)
    check_page(format_name, output, plotlyjs, is_opened=is_opened)
    check_output(output, force=force, inputs=paths)
    with loading() as progress, Readings(paths, ReadOptions(drop_invalid, progress)) as readings:
        from cptrace.api import (
            analyze_readings,
        )  # here: pandas takes its time to import, and the files are being read

        report = analyze_readings(
            readings,
            AnalyzeOptions(request, has_findings=findings, has_timeline=renderer.needs_timeline),
        )
    options = RenderOptions(
        terminal_width(), output is None and has_color(), has_details=details, plotlyjs=plotlyjs
    )
    write_output(renderer.render(report, options), output)
    if format_name == "html":
        finish_page(output, plotlyjs, is_opened=is_opened)
    if held := found(report, stops):
        raise GateError(
            f"found {', '.join(map(str, held))} in {', '.join(map(str, paths))}, which --fail-on stops at"
        )


def compile_pattern(pattern: str | None) -> re.Pattern[str] | None:
    """Return the regular expression of --step-range."""
    try:
        return None if pattern is None else re.compile(pattern)
    except re.error as error:
        raise UsageError(f"--step-range {pattern!r} is not a regular expression: {error}") from error
