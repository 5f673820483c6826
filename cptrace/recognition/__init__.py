"""Which context-parallel scheme a trace shows, and what its ops need of each other.

Our labels tell it, where they are; else the mix of ops per attention call does. The name of the scheme decides which
order is needed and which is accidental, so it comes with its evidence and with how sure it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd

from cptrace import labels
from cptrace.launches import Launches
from cptrace.recognition.blocks import (
    COUNTED,
    IS_FORWARD,
    N_BEHIND,
    N_GATHERS_BESIDE_ATTENTION,
    N_GATHERS_BESIDE_GEMMS,
    RANK,
    STARTS_APART,
    find_blocks,
)
from cptrace.recognition.flow import Flow, bind
from cptrace.recognition.pattern import places_by_pattern
from cptrace.recognition.places import Places, places_by_label
from cptrace.recognition.te import fits_te, streams_text, te_places
from cptrace.schemes.dataflow import find_flow
from cptrace.trace import Trace
from cptrace.units import format_fraction

__all__ = ["UNKNOWN", "Flow", "Places", "Recognition", "recognise"]

UNKNOWN: Final = "unknown"
NO_COMMUNICATION: Final = "single"

HIGH: Final = "high"
MEDIUM: Final = "medium"
LOW: Final = "low"

_ENOUGH: Final = 0.8  # of the blocks that communicate must look alike
_COMMUNICATION: Final = tuple(name for name in COUNTED if name != labels.ATTENTION)
_TE: Final = "te"
_RING_NAMES: Final = ("ring", "zigzag_ring", "striped_ring")
_LAYOUT_SCHEMES: Final = {"zigzag": "zigzag_ring", "striped": "striped_ring"}


@dataclass(frozen=True, slots=True)
class Recognition:
    """What scheme a trace shows.

    Attributes:
        scheme: Name of a scheme, or `unknown`.
        confidence: `high`, `medium` or `low`.
        evidence: What it was recognised by, for people.
        places: Where the ops belong.
        flow: The scheme's data flow for these ops; None where the scheme is not known.
    """

    scheme: str
    confidence: str
    evidence: str
    places: Places
    flow: Flow | None

    def to_row(self) -> dict[str, Any]:
        """Return what a report states."""
        return {
            "scheme": self.scheme,
            "basis": self.places.basis,
            "confidence": self.confidence,
            "evidence": self.evidence,
        }


def recognise(trace: Trace, launches: Launches) -> Recognition:
    """Return the scheme that a trace shows.

    Args:
        trace: Classified trace.
        launches: The launching call of each op.
    """
    places = places_by_label(trace, launches)
    if len(places):
        scheme, evidence = _by_label(places, trace)
        confidence = HIGH
    else:
        places = places_by_pattern(trace)
        scheme, confidence, evidence, places = _by_pattern(places, trace.ops)
    flow = find_flow(scheme)
    return Recognition(scheme, confidence, evidence, places, None if flow is None else bind(flow, places))


def _by_label(places: Places, trace: Trace) -> tuple[str, str]:
    """Return the scheme that labels show, and how."""
    pairs = set(zip(places.kinds.what, places.kinds.tensor, strict=True))
    what = {name for name, _ in pairs}
    listed = ", ".join(
        sorted(f"{name} {tensor}".strip() for name, tensor in pairs if name in labels.COMMUNICATION)
    )
    evidence = f"labels of the run name {listed or 'no communication'}"
    if labels.SEND_RECV in what and labels.ALL_TO_ALL in what:
        return "usp", evidence
    if labels.SEND_RECV in what:
        return _ring_by_label(places, trace, pairs, evidence)
    if labels.ALL_TO_ALL in what:
        return _by_slices(places, labels.ALL_TO_ALL, ("ulysses", "ulysses_chunked"), evidence)
    if labels.ALL_GATHER in what:
        return _by_slices(places, labels.ALL_GATHER, ("all_gather", "all_gather_sliced"), evidence)
    if pairs & {(labels.ALL_REDUCE, "out"), (labels.ALL_REDUCE, "dq")}:
        return "tp", evidence
    return (NO_COMMUNICATION if labels.ATTENTION in what else UNKNOWN), evidence


def _by_slices(places: Places, what: str, names: tuple[str, str], evidence: str) -> tuple[str, str]:
    """Return one of two schemes: whole, or in slices that run beside attention on others."""
    n_slices = int(places.hop[places.is_what(what)].max()) + 1
    return (names[1], f"{evidence}, in {n_slices} slices") if n_slices > 1 else (names[0], evidence)


def _ring_by_label(
    places: Places, trace: Trace, pairs: set[tuple[str, str]], evidence: str
) -> tuple[str, str]:
    """Return which ring it is: gradients behind the keys, or attention on two streams, are Transformer Engine's."""
    run = trace.meta.run
    stated, layout = str(run.get("scheme", "")), str(run.get("layout", ""))
    if stated in (*_RING_NAMES, _TE):
        return stated, f"{evidence}; the run's metadata call it {stated}"
    rows = places.rows[places.is_what(labels.ATTENTION)]
    n_streams = int(trace.ops.iloc[rows].groupby("rank")["stream"].nunique().max())
    if (labels.SEND_RECV, "kv+dkv") in pairs or n_streams > 1:
        return _TE, f"{evidence}; attention runs on {n_streams} stream(s)"
    scheme = _LAYOUT_SCHEMES.get(layout, _RING_NAMES[0])
    return scheme, f"{evidence}; layout {layout}" if layout else evidence


def _by_pattern(places: Places, ops: pd.DataFrame) -> tuple[str, str, str, Places]:
    """Return the scheme that the mix of ops per attention call shows, how sure that is, the evidence, and the places.

    Args:
        places: Places that the mix of ops gives.
        ops: Device work.
    """
    if not len(places):
        evidence = "no attention kernel with communication of an attention scheme was found"
        return UNKNOWN, LOW, evidence, places
    blocks = find_blocks(places, ops)
    talking = blocks[blocks[list(_COMMUNICATION)].sum(axis=1) > 0]
    if talking.empty:
        evidence = f"none of {len(blocks)} attention calls has communication beside it"
        return UNKNOWN, LOW, evidence, places
    for scheme, fits_pattern, text in _PATTERNS:
        fits = fits_pattern(talking)
        share = float(fits.mean())
        if share >= _ENOUGH:
            described = f"{format_fraction(share)} of {len(talking)} attention calls that communicate: {text}"
            if scheme == _TE:
                described += f"; {streams_text(talking)}"
                places = te_places(places, ops, talking.index[fits].to_numpy(np.int64))
            return scheme, MEDIUM, described + f"; typically {_typical(talking)}", places
    evidence = (
        f"no known pattern fits {100 * _ENOUGH:.0f} % of {len(talking)} calls; typically {_typical(talking)}"
    )
    return UNKNOWN, LOW, evidence, places


def _typical(talking: pd.DataFrame) -> str:
    """Return the most frequent mix of a block."""
    counts = talking[list(COUNTED)].value_counts().sort_index().idxmax()
    assert isinstance(counts, tuple)
    return " + ".join(f"{count} {name}" for name, count in zip(COUNTED, counts, strict=True) if count)


def _is_ring(blocks: pd.DataFrame) -> pd.Series:
    hops = blocks[labels.ATTENTION] - 1
    n_transfers = blocks[labels.SEND_RECV]
    # Forward P - 1 transfers, backward 2P - 1; K and V apart make twice as many, unless one comes behind all attention,
    # as exchanges of heads do. Backward two between two attentions may as well be Transformer Engine's, kv and dkv.
    is_double = n_transfers.eq(2 * hops) & np.where(blocks[IS_FORWARD], blocks[N_BEHIND] == 0, hops > 1)
    fits = n_transfers.eq(hops) | is_double | n_transfers.eq(2 * hops + 1)
    return (hops >= 1) & fits & (blocks[labels.ALL_TO_ALL] == 0)


def _is_zigzag(blocks: pd.DataFrame) -> pd.Series:
    """Return which blocks are of a ring that begins with a causal block and goes on with others, on several ranks.

    With contiguous chunks a causal mask leaves all of a ring's blocks to the last rank alone. Where it cuts every
    block, as with stripes, or there is none, one kernel does them all.
    """
    forward = blocks[IS_FORWARD]
    has_ranks = blocks[RANK][forward].nunique() > 1
    return _is_ring(blocks) & (blocks[STARTS_APART] | ~forward) & has_ranks


def _is_ulysses(blocks: pd.DataFrame) -> pd.Series:
    others = blocks[[labels.SEND_RECV, labels.ALL_GATHER, labels.REDUCE_SCATTER]].sum(axis=1)
    return (blocks[labels.ATTENTION] == 1) & (blocks[labels.ALL_TO_ALL] >= 1) & (others == 0)


def _is_all_gather(blocks: pd.DataFrame) -> pd.Series:
    """Return which blocks gather before attention what it works on."""
    return _gathers(blocks) & (~blocks[IS_FORWARD] | (blocks[N_GATHERS_BESIDE_ATTENTION] == 0))


def _is_sliced(blocks: pd.DataFrame) -> pd.Series:
    """Return which blocks gather slices, the next beside the attention on the last, where any forward one does."""
    forward, is_even = blocks[IS_FORWARD], blocks[labels.ATTENTION] == blocks[labels.ALL_GATHER]
    is_sliced = is_even & (blocks[N_GATHERS_BESIDE_ATTENTION] >= 1)
    return _gathers(blocks) & (is_sliced | ~forward) & bool((is_sliced & forward).any())


def _gathers(blocks: pd.DataFrame) -> pd.Series:
    """Return which blocks gather what the matrix products before attention made, and attention alone uses.

    Sharded weights are gathered ahead of time, beside the matrix products of the layer before.
    """
    others = blocks[[labels.SEND_RECV, labels.ALL_TO_ALL]].sum(axis=1)
    is_ahead = blocks[IS_FORWARD] & (2 * blocks[N_GATHERS_BESIDE_GEMMS] > blocks[labels.ALL_GATHER])
    return (blocks[labels.ALL_GATHER] >= 1) & (others == 0) & ~is_ahead


def _is_usp(blocks: pd.DataFrame) -> pd.Series:
    return (blocks[labels.ALL_TO_ALL] >= 2) & (blocks[labels.SEND_RECV] >= 1)


# The first that fits: a ring's pattern holds for those of its kind that are told apart by more.
_PATTERNS: Final[tuple[tuple[str, Callable[[pd.DataFrame], pd.Series], str], ...]] = (
    ("ulysses", _is_ulysses, "one attention with exchanges before and after it, and none beside it"),
    (
        _TE,
        fits_te,
        "P attentions, forward with P - 1 messages, backward with P, each behind one attention and beside the next",
    ),
    (
        "zigzag_ring",
        _is_zigzag,
        "P attentions with a transfer between each two, on several ranks, and forward the first is a kernel of its own,"
        " the causal one",
    ),
    ("ring", _is_ring, "P attentions with a transfer between each two"),
    ("usp", _is_usp, "exchanges around several attentions with transfers between them"),
    (
        "all_gather_sliced",
        _is_sliced,
        "several attentions, each after an all-gather, beside that of the next",
    ),
    ("all_gather", _is_all_gather, "attention after an all-gather"),
)
