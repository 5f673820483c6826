"""Renderer `json`: the report as the schema `cptrace.report/1`."""

from __future__ import annotations

from typing import Final

from cptrace.renderers.base import Renderer, RenderOptions
from cptrace.report import Report


def render(report: Report, _options: RenderOptions) -> str:
    """Return the report as JSON.

    Args:
        report: Report to render.
        _options: Not used: JSON does not depend on the reader.
    """
    return report.to_json()


RENDERER: Final = Renderer("json", "cptrace.report/1, for programs", render)
