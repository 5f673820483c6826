"""A prediction as text: step times before and after, what became of each fix, and what is assumed."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from cptrace.labels import CPU_EMULATED
from cptrace.names import finding_name
from cptrace.renderers.base import RenderOptions
from cptrace.renderers.comparison_text import clean
from cptrace.units import format_ns
from cptrace.what_if import APPLIED, FixOutcome, WhatIf


def render(prediction: WhatIf, options: RenderOptions) -> str:
    """Return the prediction as text for a terminal.

    Args:
        prediction: What to show.
        options: Width; colour is not used.
    """
    lines = [line for block in _blocks(prediction) for line in _wrapped(block, options.width)]
    return "\n".join(lines) + "\n"


def _blocks(prediction: WhatIf) -> Iterable[str]:
    yield f"{clean(prediction.path)} ({clean(prediction.scheme)})"
    if prediction.device_kind == CPU_EMULATED:
        yield "CPU EMULATION: no figure below is a GPU's"
    what = "step" if prediction.n_steps else "window"
    steps = {0: "no steps are known", 1: "one step"}.get(
        prediction.n_steps, f"mean of {prediction.n_steps} steps"
    )
    change = _change(prediction.recorded_step_ns, prediction.predicted_step_ns)
    yield ""
    yield f"{what} {change}: slowest rank, {steps}"
    yield from ("", *(_fix(fix, what) for fix in prediction.fixes)) if prediction.fixes else ()
    yield ""
    yield f"{'rank':>4}  {'recorded':>9}  {'predicted':>9}  {'change':>8}"
    for row in prediction.ranks:
        times = (row.recorded_step_ns, row.predicted_step_ns)
        yield f"{row.rank:>4}  {format_ns(times[0]):>9}  {format_ns(times[1]):>9}  {_share(*times):>8}"
    yield from ("", "Assumed")
    yield from (f" - {clean(text)}" for text in prediction.assumptions)


def _fix(fix: FixOutcome, what: str) -> str:
    name = clean(finding_name(fix.code, fix.form))
    if fix.status == APPLIED and fix.alone_step_ns is not None:
        return f"{name}: mended; alone it gives a {what} of {format_ns(fix.alone_step_ns)}"
    reason = clean(fix.reason or "")
    return reason if reason.startswith(name) else f"{name}: could not be looked for: {reason}"


def _change(recorded_ns: int, predicted_ns: int) -> str:
    return f"{format_ns(recorded_ns)} -> {format_ns(predicted_ns)} ({_share(recorded_ns, predicted_ns)})"


def _share(recorded_ns: int, predicted_ns: int) -> str:
    return f"{100 * (predicted_ns - recorded_ns) / recorded_ns:+.1f} %" if recorded_ns else "-"


def _wrapped(text: str, width: int) -> list[str]:
    indent = "   " if text.startswith(" - ") else ""
    if len(text) <= width:
        return [text]
    return textwrap.wrap(text, max(width, 8), subsequent_indent=indent, drop_whitespace=True)
