"""The algorithms, one file each, under the names that `cptrace.schemes` describes."""

from __future__ import annotations

from typing import Final

from instrumented.schemes import (
    all_gather,
    all_gather_sliced,
    ring,
    single,
    striped_ring,
    te,
    tp,
    ulysses,
    ulysses_chunked,
    usp,
    zigzag_ring,
)
from instrumented.schemes.base import Attention, Implementation, Monitors

__all__ = ["IMPLEMENTATIONS", "Attention", "Implementation", "Monitors", "find"]

IMPLEMENTATIONS: Final[tuple[Implementation, ...]] = (
    Implementation("single", single.SingleAttention, single.layout),
    Implementation("all_gather", all_gather.make, all_gather.layout),
    Implementation("all_gather_sliced", all_gather_sliced.make, all_gather_sliced.layout),
    Implementation("ring", ring.make, ring.layout),
    Implementation("zigzag_ring", zigzag_ring.make, zigzag_ring.layout),
    Implementation("striped_ring", striped_ring.make, striped_ring.layout),
    Implementation("te", te.TeAttention, te.layout),
    Implementation("ulysses", ulysses.make, ulysses.layout),
    Implementation("ulysses_chunked", ulysses_chunked.make, ulysses_chunked.layout),
    Implementation("usp", usp.make, usp.layout),
    Implementation("tp", tp.TensorParallelAttention, tp.layout),
)


def find(name: str) -> Implementation:
    """Return the code of a scheme that `cptrace.schemes` knows."""
    return next(item for item in IMPLEMENTATIONS if item.name == name)
