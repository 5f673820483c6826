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
    from cptrace.api import analyze, compare, open_trace
    from cptrace.comparison import Comparison
    from cptrace.report import Report
    from cptrace.requests import AnalyzeOptions, CompareOptions, WhatIfOptions
    from cptrace.trace import Trace
    from cptrace.what_if import WhatIf, whatif

__version__: Final = "0.1.0"
__all__ = [
    "AnalyzeOptions",
    "CompareOptions",
    "Comparison",
    "Report",
    "Trace",
    "WhatIf",
    "WhatIfOptions",
    "__version__",
    "analyze",
    "compare",
    "open_trace",
    "whatif",
]

_HOMES: Final = {
    "AnalyzeOptions": "cptrace.requests",
    "CompareOptions": "cptrace.requests",
    "Comparison": "cptrace.comparison",
    "analyze": "cptrace.api",
    "compare": "cptrace.api",
    "open_trace": "cptrace.api",
    "Report": "cptrace.api",  # which knows how a notebook shows one
    "Trace": "cptrace.trace",
    "WhatIf": "cptrace.what_if",
    "WhatIfOptions": "cptrace.requests",
    "whatif": "cptrace.what_if",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
