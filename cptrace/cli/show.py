"""Shows a report on the terminal, for commands that end with one."""

from __future__ import annotations

from cptrace.cli.output import has_color, terminal_width, write_output
from cptrace.renderers import RenderOptions, find_renderer
from cptrace.report import Report


def show_report(report: Report) -> None:
    """Write a report to standard output as text.

    Args:
        report: Report to show.
    """
    options = RenderOptions(terminal_width(), has_color(), has_details=False)
    write_output(find_renderer("text").render(report, options), None)
