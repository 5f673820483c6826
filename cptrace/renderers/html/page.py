"""The page around the sections: style, scripts, and a policy that lets nothing else run or load."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

from cptrace.errors import UsageError
from cptrace.renderers.html.markup import text

PLOTLY_FILE: Final = "plotly.min.js"
PLOTLYJS: Final = ("inline", "directory", "cdn")
"""Where a page has plotly.js from: within itself, a file beside it, or the network."""


@dataclass(frozen=True, slots=True)
class Data:
    """Data for a script of the page.

    Attributes:
        identifier: Id of its element.
        json: JSON text.
    """

    identifier: str
    json: str


def asset(name: str) -> str:
    """Return the text of a file of this package.

    Args:
        name: Its name.
    """
    return resources.files("cptrace.renderers.html").joinpath(name).read_text(encoding="utf-8")


def dump(value: Any) -> str:
    """Return a value as JSON that cannot end the script element that holds it.

    Args:
        value: Plain value.
    """
    return escape_json(json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")))


def escape_json(json_text: str) -> str:
    """Return JSON without the characters that mean something to HTML.

    Args:
        json_text: JSON.
    """
    return json_text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def make_page(
    title: str, body: str, data: Iterable[Data], scripts: Iterable[str], *, has_figures: bool, plotlyjs: str
) -> str:
    """Return a whole page.

    Args:
        title: Title of the window.
        body: HTML.
        data: Data for the scripts.
        scripts: Names of script files of this package, in order.
        has_figures: Whether plotly.js is needed.
        plotlyjs: One of `PLOTLYJS`.
    """
    inline = [asset(script) for script in scripts]
    plotly, source = _plotly(plotlyjs) if has_figures else ("", "")
    if plotlyjs == "inline" and has_figures:
        inline.insert(0, plotly)
        plotly = ""
    policy = _policy(inline, source)
    holders = "".join(
        f'<script type="application/json" id="{entry.identifier}">{entry.json}</script>\n' for entry in data
    )
    code = "".join(f"<script>{script}</script>\n" for script in inline)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n<link rel="icon" href="data:,">\n'
        f"<title>{text(title)}</title>\n<style>\n{asset('page.css')}</style>\n</head>\n"
        f"<body>\n{body}\n{holders}{plotly}{code}</body>\n</html>\n"
    )


def plotly_code() -> str:
    """Return plotly.js."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def _plotly(plotlyjs: str) -> tuple[str, str]:
    """Return plotly.js or the element that loads it, and where it may be loaded from."""
    from plotly.offline import get_plotlyjs_version

    if plotlyjs == "inline":
        return plotly_code(), ""
    if plotlyjs == "directory":
        return f'<script src="{PLOTLY_FILE}" charset="utf-8"></script>\n', "'self' file:"
    if plotlyjs != "cdn":
        raise UsageError(f"plotly.js cannot come from {plotlyjs!r}; choose one of: {', '.join(PLOTLYJS)}")
    address = f"https://cdn.plot.ly/plotly-{get_plotlyjs_version()}.min.js"
    digest = f"sha256-{_digest(plotly_code())}"
    return (
        f'<script src="{address}" integrity="{digest}" crossorigin="anonymous" charset="utf-8"></script>\n',
        address,
    )


def _policy(inline: Iterable[str], source: str) -> str:
    """Return a policy under which only our own scripts run: what a trace calls things can never become one."""
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in inline)
    return (
        f"default-src 'none'; script-src {hashes} {source}; style-src 'unsafe-inline'; img-src data: blob:;"
        " font-src data:; base-uri 'none'; form-action 'none'"
    )


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
