"""`cptrace compare`."""

from __future__ import annotations

from pathlib import Path

import click

from cptrace.cli.analyze import compile_pattern
from cptrace.cli.output import check_output, has_color, terminal_width, write_output
from cptrace.cli.pages import PLOTLYJS, check_page, finish_page
from cptrace.cli.settings import CONTEXT_SETTINGS
from cptrace.comparison import KEYS
from cptrace.errors import GateError
from cptrace.gates import failures, parse_condition
from cptrace.renderers import COMPARISON_RENDERERS, RenderOptions, find_comparison_renderer
from cptrace.requests import AnalyzeOptions, CompareOptions, ReadOptions, ScopeRequest, parse_window


@click.command(
    context_settings=CONTEXT_SETTINGS,
    help=f"""Say what differs between runs, and whether it is more than their steps differ among themselves.

Each PATH is one run: a trace, or a report saved with `cptrace analyze --format json`, which is also how several files
of one run become one. The first is the baseline.

Runs that were not run alike are refused; --allow-different KEY is for those that deliberately differ in KEY:
{", ".join(KEYS)}.""",
)
@click.argument("paths", metavar="PATH PATH...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--format",
    "format_name",
    type=click.Choice([renderer.name for renderer in COMPARISON_RENDERERS]),
    default="text",
    show_default=True,
    help="Form of the comparison.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write to a file.")
@click.option("--force", is_flag=True, help="Replace the output file if it exists.")
@click.option(
    "--fail-if",
    "conditions",
    metavar="CONDITION",
    multiple=True,
    help="Exit with code 10 if it holds, such as 'exposed_comm_share > +5%', 'overlap < -5pp' or 'step_ns > 200ms': a"
    " sign makes it a change from the baseline, which noise never is. May be repeated.",
)
@click.option(
    "--allow-different",
    metavar="KEY",
    multiple=True,
    help="The runs deliberately differ in it; may be repeated.",
)
@click.option("--step-range", metavar="REGEX", help="NVTX ranges that are steps, as for analyze.")
@click.option("--window", metavar="A:B|all", help="Part of each trace to account for, as for analyze.")
@click.option(
    "--drop-invalid", is_flag=True, help="Leave out device work with impossible times, and count it."
)
@click.option("--open", "is_opened", is_flag=True, help="Show the page in a browser (--format html with -o).")
@click.option(
    "--plotlyjs",
    type=click.Choice(PLOTLYJS),
    default="inline",
    show_default=True,
    help="Where a page has plotly.js from: within itself, a file beside it, or the network.",
)
def compare(
    paths: tuple[Path, ...],
    format_name: str,
    output: Path | None,
    force: bool,
    conditions: tuple[str, ...],
    allow_different: tuple[str, ...],
    step_range: str | None,
    window: str | None,
    drop_invalid: bool,
    is_opened: bool,
    plotlyjs: str,
) -> None:
    parsed = [parse_condition(text) for text in conditions]
    request = ScopeRequest(
        step_pattern=compile_pattern(step_range), window=None if window is None else parse_window(window)
    )
    check_page(format_name, output, plotlyjs, is_opened=is_opened)
    check_output(output, force=force, inputs=paths)
    from cptrace import api  # here: pandas takes its time to import, and wrong options need not wait for it

    comparison = api.compare(
        paths,
        CompareOptions(AnalyzeOptions(scope=request, read=ReadOptions(drop_invalid)), allow_different),
    )
    held = failures(comparison, parsed)
    options = RenderOptions(terminal_width(), output is None and has_color(), plotlyjs=plotlyjs)
    write_output(find_comparison_renderer(format_name).render(comparison, options), output)
    if format_name == "html":
        finish_page(output, plotlyjs, is_opened=is_opened)
    if held:
        raise GateError("; ".join(held))
