"""Where in a step each communication and attention op belongs: which pass of which layer, which hop, what travels.

A *block* is one pass of one layer on one rank in one step: the ops between which a scheme's data flow speaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from cptrace import labels
from cptrace.intervals import BoolArray, Int64Array
from cptrace.launches import (
    Launches,
    call_times,
    closed_ranges,
    distinct_names,
    innermost_ranges,
    names_match,
)
from cptrace.trace import Trace

BY_LABEL: Final = "label"
BY_PATTERN: Final = "pattern"

_PASS_LABEL: Final = rf"^({'|'.join(labels.PASSES)})( |$)"
_OP_LABEL: Final = rf"^({'|'.join(labels.OPS)})( |$)"
_UNKNOWN_LAYER: Final = -1


@dataclass(frozen=True, slots=True)
class Kinds:
    """The kinds of ops that a trace holds: pairs of a label's name and what travels.

    Attributes:
        what: Name of the label of each kind.
        tensor: What travels, empty where nothing does.
    """

    what: tuple[str, ...]
    tensor: tuple[str, ...]

    def __len__(self) -> int:
        """Return the number of kinds."""
        return len(self.what)

    def are(self, *names: str) -> BoolArray:
        """Return which kinds have one of some labels, bool of shape (K,)."""
        return np.isin(np.array(self.what, object), names)

    def carry(self, tensor: str) -> BoolArray:
        """Return in which kinds a tensor travels, bool of shape (K,)."""
        return np.array([name == tensor for name in self.tensor], bool)


@dataclass(frozen=True, slots=True)
class Places:
    """Places of M ops.

    Attributes:
        rows: Rows in the table of ops, ascending, int64 of shape (M,).
        block: Number of the block, int64 of shape (M,).
        kind: Number of the kind, int64 of shape (M,).
        hop: Hop, slice or chunk within the block, int64 of shape (M,).
        layer: Layer, int64 of shape (M,); -1 where it is not known.
        is_backward: Whether the block is a backward pass, bool of shape (M,).
        n_bytes: What the rank sends, int64 of shape (M,); 0 where nothing or not known.
        kinds: The kinds.
        basis: `label` (ranges of ours name them) or `pattern` (found from the order and mix of ops).
    """

    rows: Int64Array
    block: Int64Array
    kind: Int64Array
    hop: Int64Array
    layer: Int64Array
    is_backward: BoolArray
    n_bytes: Int64Array
    kinds: Kinds
    basis: str

    def __len__(self) -> int:
        """Return the number of ops that have a place."""
        return len(self.rows)

    def is_what(self, *names: str) -> BoolArray:
        """Return which ops have one of some labels, bool of shape (M,)."""
        return self.kinds.are(*names)[self.kind]

    def of_ops(self, n_ops: int) -> Int64Array:
        """Return the position here of each op of the trace, -1 for those without a place, int64 of shape (N,)."""
        position = np.full(n_ops, -1, np.int64)
        position[self.rows] = np.arange(len(self.rows))
        return position


def no_places(basis: str = BY_PATTERN) -> Places:
    """Return the places of no op."""
    none = np.zeros(0, np.int64)
    return Places(none, none, none, none, none, none.astype(bool), none, Kinds((), ()), basis)


def places_by_label(trace: Trace, launches: Launches) -> Places:
    """Return the places of all ops that were launched inside our op labels.

    Args:
        trace: Classified trace.
        launches: The launching call of each op.
    """
    if labels.DOMAIN not in trace.ranges["domain"].cat.categories or not launches.is_known.any():
        return no_places(BY_LABEL)
    ours = closed_ranges(trace.ranges[(trace.ranges["domain"] == labels.DOMAIN).to_numpy()])
    rows = np.flatnonzero(launches.is_known)
    call = call_times(trace.api_calls, launches)
    thread, instant = call["thread"][rows], call["start_ns"][rows]
    op_ranges, pass_ranges = (ours[names_match(ours["name"], which)] for which in (_OP_LABEL, _PASS_LABEL))
    label, has_label = innermost_ranges(op_ranges, thread, instant)
    block, has_block = innermost_ranges(pass_ranges, thread, instant)
    is_placed = has_label & has_block
    if not is_placed.any():
        return no_places(BY_LABEL)
    texts, slot = distinct_names(op_ranges["name"])
    return _placed(texts, rows[is_placed], slot[label[is_placed]], block[is_placed])


def _placed(texts: list[str | None], rows: Int64Array, text: Int64Array, block: Int64Array) -> Places:
    """Return the places that label texts state."""
    parsed = [_parse(text) for text in texts]
    what, tensor, pass_name = ([fields[name] for fields in parsed] for name in ("what", "tensor", "pass"))
    hop, layer, n_bytes = (
        np.array([fields[name] for fields in parsed], np.int64)[text] for name in ("hop", "layer", "bytes")
    )
    pairs = list(zip(what, tensor, strict=True))
    kinds = list(dict.fromkeys(pairs))
    kind = np.array([kinds.index(pair) for pair in pairs], np.int64)[text]
    is_backward = np.array([name == labels.BACKWARD for name in pass_name], bool)[text]
    names = Kinds(tuple(name for name, _ in kinds), tuple(carried for _, carried in kinds))
    number = pd.factorize(block)[0].astype(np.int64)
    return Places(rows, number, kind, hop, layer, is_backward, n_bytes, names, BY_LABEL)


def _parse(text: str | None) -> Mapping[str, Any]:
    label = labels.parse_label(text or "")
    fields = {} if label is None else label.fields
    return {
        "what": "" if label is None else label.name,
        "tensor": fields.get("tensor", "") or _purpose(fields),
        "pass": fields.get("pass", ""),
        "hop": _number(fields.get("hop"), 0),
        "layer": _number(fields.get("layer"), _UNKNOWN_LAYER),
        "bytes": _number(fields.get("bytes"), 0),
    }


def _purpose(fields: Mapping[str, str]) -> str:
    """Return what a copy is for, such as `packs:kv`; empty where its label does not say."""
    return next((f"{name}:{fields[name]}" for name in labels.PURPOSES if name in fields), "")


def _number(text: str | None, otherwise: int) -> int:
    return int(text) if text is not None and text.isdecimal() else otherwise


def by_hop(places: Places, which: npt.NDArray[np.bool_]) -> pd.DataFrame:
    """Return block, hop and position of some ops, for joins of one hop with another.

    Args:
        places: Places of M ops.
        which: Which of them, bool of shape (M,).
    """
    position = np.flatnonzero(which)
    return pd.DataFrame({"block": places.block[position], "hop": places.hop[position], "position": position})
