"""Items among the events of a PyTorch profiler trace that are no events as they should be.

What among them may be device work must not be lost unseen: every figure would lack it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from cptrace.sources.kineto_times import LATEST_NS, Text, parse_spans

DEVICE_CATEGORIES: Final = ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset", "gpu_graph")
"""Categories of device work, in lower case."""
NO_WORK_PHASES: Final = frozenset("stfMiIRCPNODcVv()")
"""Phases of flows, metadata, marks, counters and snapshots: whatever their category says, they are no device work."""


class _Misfit(msgspec.Struct, gc=False):
    """What is read of an object that is no `Event`, because something in it is of another type than it should be."""

    ph: Any = None
    cat: Any = None
    dur: msgspec.Raw = msgspec.Raw(b"")
    args: Any = None


_MISFIT: Final = msgspec.json.Decoder(_Misfit)


@dataclass(slots=True)
class Misfits:
    """Items among the events that could not be understood.

    Attributes:
        n_others: How many are certainly no device work.
        n_works: How many are device work, or may be.
        n_timed: How many of these have a duration.
        duration_ns: Sum of their durations in ns.
    """

    n_others: int = 0
    n_works: int = 0
    n_timed: int = 0
    duration_ns: int = 0

    def add_item(self, item: bytes) -> None:
        """Count an item that is no event.

        Args:
            item: Its text, whole JSON in UTF-8.
        """
        try:
            misfit = _MISFIT.decode(item)
        except msgspec.DecodeError:  # no object: nothing that any version writes for device work
            self.n_others += 1
            return
        args = misfit.args
        names_device = isinstance(args, dict) and not args.keys().isdisjoint(("device", "stream"))
        if may_be_work(misfit.ph, misfit.cat, names_device=names_device):
            self.add_work(misfit.dur)
        else:
            self.n_others += 1

    def add_work(self, duration_us: Text) -> None:
        """Count an event that may be device work.

        Args:
            duration_us: Its duration as JSON in us; of any type, or empty.
        """
        spans = parse_spans([b"0"], [duration_us])
        duration_ns = int(spans.end_ns[0])
        is_timed = bool(spans.is_valid[0]) and 0 <= duration_ns <= LATEST_NS
        self.n_works += 1
        self.n_timed += is_timed
        self.duration_ns += duration_ns if is_timed else 0

    def join(self, other: Misfits) -> None:
        """Count those of another run too."""
        self.n_others += other.n_others
        self.n_works += other.n_works
        self.n_timed += other.n_timed
        self.duration_ns += other.duration_ns


def may_be_work(phase: Any, category: Any, *, names_device: bool) -> bool:
    """Return whether an event that does not fit any table may all the same be device work.

    Args:
        phase: Its phase, of any type.
        category: Its category, of any type.
        names_device: Whether its arguments name a device or a stream.
    """
    if isinstance(phase, str) and phase in NO_WORK_PHASES:
        return False
    if isinstance(category, str) and category:
        return category.lower() in DEVICE_CATEGORIES
    return names_device or (category is not None and category != "")
