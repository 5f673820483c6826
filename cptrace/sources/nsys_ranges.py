"""NVTX ranges and marks of an Nsight Systems export."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from cptrace import schema
from cptrace.intervals import BoolArray, Int64Array
from cptrace.sources.columns import category
from cptrace.sources.nsys_raw import RawTable
from cptrace.sources.sqlite_columns import decode_text
from cptrace.trace import Note

_RANGE_KINDS: Final = {
    59: "push_pop",
    70: "push_pop",
    60: "start_end",
    71: "start_end",
    34: "mark",
    65: "mark",
}
_KINDS: Final = ("mark", "push_pop", "start_end")
_DOMAIN_CREATE: Final = 75

# The upper 40 bits of a global thread id are the global process id.
PROCESS_MASK: Final = ~0xFFFFFF


def make_ranges(raw: RawTable) -> tuple[pd.DataFrame, list[Note]]:
    """Return the table of ranges, and what a reader should know about it.

    Args:
        raw: What was read of NVTX_EVENTS.
    """
    event_type, _ = raw.ints("type")
    (start, no_start), (end, no_end), (thread, _) = (
        raw.ints(name) for name in ("start_ns", "end_ns", "thread")
    )
    kind = _kinds(event_type)
    columns: dict[str, Any] = {
        "start_ns": start,
        "end_ns": raw.optional("end_ns"),
        "process": thread & PROCESS_MASK,
        "thread": thread,
        "kind": category(kind, list(_KINDS)),
        "domain": _domains(raw, event_type, thread & PROCESS_MASK),
        "name": _names(raw),
        "payload": raw.optional("payload"),
    }
    has_end = np.ones(len(end), bool) if no_end is None else ~no_end
    is_reversed = (kind >= 0) & (end < start) & has_end
    if no_start is not None:
        is_reversed |= (kind >= 0) & no_start
    notes = []
    if is_reversed.any():
        n_reversed = int(np.count_nonzero(is_reversed))
        notes.append(
            Note(
                "dropped-rows",
                f"{raw.name}: ranges without a start, or that end before it, were left out",
                n_reversed,
            )
        )
    keep = (kind >= 0) & ~is_reversed
    return schema.make_frame(schema.RANGES, _keep(columns, keep)), notes


def _keep(columns: dict[str, Any], keep: BoolArray) -> dict[str, Any]:
    return columns if keep.all() else {name: column[keep] for name, column in columns.items()}


def _kinds(event_type: Int64Array) -> Int64Array:
    """Return the code of each row's kind of range, -1 for rows that are no range."""
    slot, types = pd.factorize(event_type)
    codes = [_KINDS.index(_RANGE_KINDS[code]) if code in _RANGE_KINDS else -1 for code in types.tolist()]
    return np.array(codes, np.int64)[slot]


def _names(raw: RawTable) -> pd.Categorical:
    """Return the texts of ranges: written out in the row or as an id of a registered string, mixed in one file."""
    registered = raw.texts("text_id")
    text = raw.columns.get("text")
    if not isinstance(text, pa.ChunkedArray):
        return registered
    column = text.combine_chunks()
    written = pc.if_else(pc.equal(column, b""), None, column).dictionary_encode()
    codes = written.indices.fill_null(-1).to_numpy().astype(np.int64)
    n_written = len(written.dictionary)
    from_id = np.where(registered.codes < 0, -1, registered.codes.astype(np.int64) + n_written)
    texts = pa.concat_arrays([_as_text(written.dictionary), pa.array(registered.categories, pa.string())])
    return category(np.where(codes < 0, from_id, codes), texts)


def _as_text(raw: pa.Array) -> pa.Array:
    """Return bytes as text; only where some are not UTF-8, one by one."""
    try:
        return raw.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([decode_text(text) for text in raw.to_pylist()], pa.string())


def _domains(raw: RawTable, event_type: Int64Array, process: Int64Array) -> pd.Categorical:
    """Return the domain name of each row; ids are per process and named by a row of their own, which may be missing."""
    domain, _ = raw.ints("domain_id")
    is_create = event_type == _DOMAIN_CREATE
    codes = np.full(len(domain), -1, np.int64)
    if not is_create.any():
        return category(codes, [])
    names = _names(raw.take(is_create))
    for position, row in enumerate(np.flatnonzero(is_create)):
        codes[(process == process[row]) & (domain == domain[row])] = position
    is_named = np.append(names.codes >= 0, False)
    return category(
        np.where(is_named[codes], codes, -1), ["" if name is None else str(name) for name in names]
    )
