"""What a user can ask for, before any file is opened; it imports nothing heavy."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from cptrace.errors import UsageError
from cptrace.units import parse_ns


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read a file.

    Attributes:
        drop_invalid: Leave out device work with impossible times, and count it, in place of refusing the file.
        progress: Called with the number of rows read so far and in all, from any thread.
    """

    drop_invalid: bool = False
    progress: Callable[[int, int], None] | None = None


@dataclass(frozen=True, slots=True)
class WindowRequest:
    """A window that was asked for.

    Attributes:
        is_all: From the first to the last op of each rank, whatever the steps are.
        start_ns: Inclusive start in trace time, None for the first op.
        end_ns: Exclusive end in trace time, None for the last op.
    """

    is_all: bool = False
    start_ns: int | None = None
    end_ns: int | None = None


@dataclass(frozen=True, slots=True)
class ScopeRequest:
    """Which part of a trace to look at.

    Attributes:
        step_pattern: What step ranges are called; None for the usual names.
        window: Window asked for; None for the union of the steps, else everything.
        ranks: Ranks asked for; empty for all.
    """

    step_pattern: re.Pattern[str] | None = None
    window: WindowRequest | None = None
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AnalyzeOptions:
    """How to analyse.

    Attributes:
        scope: Which part of the traces to look at.
        read: How to read the files.
        has_timeline: Whether the report gets a timeline to draw, beside what its JSON has.
        has_findings: Whether to look for the causes of start times and for findings.
    """

    scope: ScopeRequest = field(default_factory=ScopeRequest)
    read: ReadOptions = field(default_factory=ReadOptions)
    has_timeline: bool = False
    has_findings: bool = True


@dataclass(frozen=True, slots=True)
class WhatIfOptions:
    """What is to be different in a prediction.

    Attributes:
        fixes: Findings whose cause is taken out, each as CODE or CODE:FORM.
        link_gbps: Link bandwidth in gigabits per second; for runs whose own is recorded.
        transfer_scale: Factor on the time of each transfer once all that take part have arrived.
        compute_scale: Factor on the time of each compute op.
        ranks: Ranks that the factors are for; empty for all.
        scope: Which part of the trace the steps are taken from.
        read: How to read the file.
    """

    fixes: tuple[str, ...] = ()
    link_gbps: float | None = None
    transfer_scale: float | None = None
    compute_scale: float | None = None
    ranks: tuple[int, ...] = ()
    scope: ScopeRequest = field(default_factory=ScopeRequest)
    read: ReadOptions = field(default_factory=ReadOptions)


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """How to compare.

    Attributes:
        analyze: How to analyse the files of the runs.
        allow_different: In what the runs deliberately differ, keys of `cptrace.comparison.KEYS`.
        names: What to call the runs; by default as their files are called.
    """

    analyze: AnalyzeOptions = field(default_factory=AnalyzeOptions)
    allow_different: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


def parse_window(text: str) -> WindowRequest:
    """Return the window that an option's text asks for.

    Args:
        text: `all`, or `START:END` in trace time with units, either side optional, such as `1.2s:1300ms`.

    Raises:
        UsageError: The text is neither, or the window is empty.
    """
    if text == "all":
        return WindowRequest(is_all=True)
    start, colon, end = text.partition(":")
    if not colon or not (start.strip() or end.strip()):
        raise UsageError(
            f"cannot read window {text!r}; write `all`, or START:END with units, such as 1.2s:1300ms"
        )
    request = WindowRequest(
        start_ns=parse_ns(start) if start.strip() else None, end_ns=parse_ns(end) if end.strip() else None
    )
    if request.start_ns is not None and request.end_ns is not None and request.end_ns <= request.start_ns:
        raise UsageError(f"window {text!r} is empty: its end is not after its start")
    return request
