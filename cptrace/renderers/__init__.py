"""Renderers: forms of a report. `RENDERERS` is the list that help and tests go by."""

from __future__ import annotations

from typing import Final

from cptrace.errors import UsageError
from cptrace.renderers.base import Renderer, RenderOptions
from cptrace.report import Report


def _text(report: Report, options: RenderOptions) -> str:
    from cptrace.renderers import text  # here: rich takes its time to import, and other forms do without

    return text.render(report, options)


RENDERERS: Final[tuple[Renderer, ...]] = (
    Renderer("text", "one screen for people", _text),
    Renderer("json", "cptrace.report/1, for programs", lambda report, _options: report.to_json()),
)

__all__ = ["RENDERERS", "RenderOptions", "Renderer", "find_renderer"]


def find_renderer(name: str) -> Renderer:
    """Return the renderer of a name.

    Args:
        name: Name of one of `RENDERERS`.

    Raises:
        UsageError: There is none of that name.
    """
    for renderer in RENDERERS:
        if renderer.name == name:
            return renderer
    raise UsageError(f"there is no format {name!r}; the formats are: {', '.join(r.name for r in RENDERERS)}")
