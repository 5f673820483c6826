"""Renderers: forms of a report and of a comparison. Help and tests go by `RENDERERS` and `COMPARISON_RENDERERS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cptrace.comparison import Comparison
from cptrace.errors import UsageError
from cptrace.renderers.base import Renderer, RenderOptions, Subject
from cptrace.report import Report


def _text(report: Report, options: RenderOptions) -> str:
    from cptrace.renderers import text  # here: rich takes its time to import, and other forms do without

    return text.render(report, options)


def _html(report: Report, options: RenderOptions) -> str:
    from cptrace.renderers import html  # here: pandas and plotly take their time to import

    return html.render(report, options)


def _markdown(report: Report, options: RenderOptions) -> str:
    from cptrace.renderers import markdown  # here: as above

    return markdown.render(report, options)


def _comparison_markdown(comparison: Comparison, options: RenderOptions) -> str:
    from cptrace.renderers import markdown  # here: as above

    return markdown.render_comparison(comparison, options)


def _comparison_html(comparison: Comparison, options: RenderOptions) -> str:
    from cptrace.renderers import html  # here: as above

    return html.render_comparison(comparison, options)


def _comparison_text(comparison: Comparison, options: RenderOptions) -> str:
    from cptrace.renderers import comparison_text  # here: as above

    return comparison_text.render(comparison, options)


def _picture(image_format: str) -> Callable[[Report, RenderOptions], bytes]:
    def render(report: Report, _options: RenderOptions) -> bytes:
        from cptrace.renderers import images  # here: as above

        return images.render(report, image_format)

    return render


def _comparison_picture(image_format: str) -> Callable[[Comparison, RenderOptions], bytes]:
    def render(comparison: Comparison, _options: RenderOptions) -> bytes:
        from cptrace.renderers import images  # here: as above

        return images.render_comparison(comparison, image_format)

    return render


RENDERERS: Final[tuple[Renderer[Report], ...]] = (
    Renderer("text", "one screen for people", _text),
    Renderer("json", "cptrace.report/1, for programs", lambda report, _options: report.to_json()),
    Renderer("markdown", "a summary for a pull request", _markdown),
    Renderer("html", "one page that explains the trace, works offline", _html, needs_timeline=True),
    Renderer("png", "a picture, where a browser can draw it", _picture("png"), is_binary=True),
    Renderer("svg", "likewise, to scale", _picture("svg"), is_binary=True),
)
COMPARISON_RENDERERS: Final[tuple[Renderer[Comparison], ...]] = (
    Renderer("text", "for people", _comparison_text),
    Renderer("json", "cptrace.comparison/1, for programs", lambda comparison, _options: comparison.to_json()),
    Renderer("markdown", "a summary for a pull request", _comparison_markdown),
    Renderer("html", "one page, works offline", _comparison_html),
    Renderer("png", "a picture, where a browser can draw it", _comparison_picture("png"), is_binary=True),
    Renderer("svg", "likewise, to scale", _comparison_picture("svg"), is_binary=True),
)

__all__ = [
    "COMPARISON_RENDERERS",
    "RENDERERS",
    "RenderOptions",
    "Renderer",
    "find_comparison_renderer",
    "find_renderer",
]


def find_renderer(name: str) -> Renderer[Report]:
    """Return the renderer of reports of a name.

    Args:
        name: Name of one of `RENDERERS`.

    Raises:
        UsageError: There is none of that name.
    """
    return _find(name, RENDERERS)


def find_comparison_renderer(name: str) -> Renderer[Comparison]:
    """Return the renderer of comparisons of a name.

    Args:
        name: Name of one of `COMPARISON_RENDERERS`.

    Raises:
        UsageError: There is none of that name.
    """
    return _find(name, COMPARISON_RENDERERS)


def _find(name: str, renderers: tuple[Renderer[Subject], ...]) -> Renderer[Subject]:
    for renderer in renderers:
        if renderer.name == name:
            return renderer
    raise UsageError(f"there is no format {name!r}; the formats are: {', '.join(r.name for r in renderers)}")
