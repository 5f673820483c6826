"""Renderers: forms of a report. `RENDERERS` is the list that help and tests go by."""

from __future__ import annotations

from typing import Final

from cptrace.errors import UsageError
from cptrace.renderers import json, text
from cptrace.renderers.base import Renderer, RenderOptions

RENDERERS: Final[tuple[Renderer, ...]] = (text.RENDERER, json.RENDERER)

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
