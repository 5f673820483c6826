"""Words that several findings share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cptrace.findings.case import Case

_NAMES: Final = {
    "all_gather": "all-gather attention",
    "all_gather_sliced": "sliced all-gather attention",
    "ring": "ring attention",
    "zigzag_ring": "zigzag ring attention",
    "striped_ring": "striped ring attention",
    "te": "Transformer Engine's point-to-point attention",
    "ulysses": "Ulysses attention",
    "ulysses_chunked": "chunked Ulysses attention",
    "usp": "hybrid (Ulysses and ring) attention",
    "tp": "tensor parallelism",
}
RINGS: Final = ("ring", "zigzag_ring", "striped_ring", "te", "usp")


def run_number(case: Case, name: str) -> float:
    """Return a number that the run's metadata state, 0 where they do not.

    Args:
        case: Case.
        name: Name of the entry.
    """
    value = case.scope.trace.meta.run.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0


def scheme_name(case: Case) -> str:
    """Return what people call the recognised scheme."""
    scheme = case.recognition.scheme
    return _NAMES.get(scheme, scheme)
