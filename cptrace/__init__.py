"""Reads traces of context-parallel training and explains where the time goes.

    import cptrace

    report = cptrace.analyze("report.sqlite")
    report.frame("ranks")

The public names load on first use, so that `import cptrace` and `cptrace --help` stay quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from cptrace.api import analyze, open_trace
    from cptrace.report import Report
    from cptrace.requests import AnalyzeOptions
    from cptrace.trace import Trace

__version__: Final = "0.1.0"
__all__ = ["AnalyzeOptions", "Report", "Trace", "__version__", "analyze", "open_trace"]

_HOMES: Final = {
    "AnalyzeOptions": "cptrace.requests",
    "analyze": "cptrace.api",
    "open_trace": "cptrace.api",
    "Report": "cptrace.report",
    "Trace": "cptrace.trace",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
