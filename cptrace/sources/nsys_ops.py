"""Device work of an Nsight Systems export: kernels, copies, memsets, whole graphs, and whose ranks they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd

from cptrace import schema
from cptrace.errors import TraceError
from cptrace.intervals import BoolArray, Int64Array
from cptrace.requests import ReadOptions
from cptrace.sources.columns import all_missing, category, merge_columns, merged_places, no_category
from cptrace.sources.doubts import lost_time
from cptrace.sources.nsys_meta import FileInfo
from cptrace.sources.nsys_raw import NO_ID, RawTable
from cptrace.sources.nsys_sqlite import GRAPH, KERNEL, MEMCPY, MEMSET, OP_COLUMNS
from cptrace.trace import Note

# Of the upper 40 bits of a global id, which name the process, the lower 24 are the operating system's pid.
_PID_SHIFT: Final = 24
_PID_MASK: Final = 0xFFFFFF

_IDENTITY: Final = ("process", "device", "context", "stream")

# 146 years: times count from the start of the capture, and from 1970 at most.
_LATEST_NS: Final = 2**62
_COPY_NAMES: Final = {
    0: "memcpy",
    1: "memcpy HtoD",
    2: "memcpy DtoH",
    3: "memcpy HtoA",
    4: "memcpy AtoH",
    5: "memcpy AtoA",
    6: "memcpy AtoD",
    7: "memcpy DtoA",
    8: "memcpy DtoD",
    9: "memcpy HtoH",
    10: "memcpy PtoP",
    11: "memcpy unified HtoD",
    12: "memcpy unified DtoH",
    13: "memcpy unified DtoD",
}
_COPY_PEER: Final = 10
_COPIES_BETWEEN_DEVICES: Final = (0, 8, _COPY_PEER)

OpColumns = dict[str, Any]


def make_ops(
    tables: Sequence[RawTable], info: FileInfo, options: ReadOptions
) -> tuple[pd.DataFrame, pd.DataFrame, list[Note]]:
    """Return the tables of device work and of ranks, and what a reader should know about them.

    Args:
        tables: What was read of `OP_TABLES`.
        info: What the file says about itself.
        options: How to read it.

    Raises:
        TraceError: Device work has impossible times.
    """
    notes: list[Note] = []
    parts = [part for raw in tables if len((part := _part(raw, info, options, notes))["start_ns"])]
    if not parts:
        return schema.empty_frame(schema.OPS), schema.empty_frame(schema.RANKS), notes
    columns = parts[0] if len(parts) == 1 else _merge(parts)
    columns["rank"], ranks = assign_ranks(columns["process"], columns["device"], info)
    return schema.make_frame(schema.OPS, columns), ranks, notes


def _merge(parts: Sequence[OpColumns]) -> OpColumns:
    """Return the columns of all parts by start; popped, so that none is held twice for longer than it takes."""
    places = merged_places([part["start_ns"] for part in parts])
    return {name: merge_columns([part.pop(name) for part in parts], places) for name in list(parts[0])}


def _part(raw: RawTable, info: FileInfo, options: ReadOptions, notes: list[Note]) -> OpColumns:
    """Return the columns of `schema.OPS`, but for ranks, of one kind of device work."""
    times = {name: raw.ints(name) for name in ("start_ns", "end_ns")}
    keep = _valid_times(raw, times, info, options, notes)
    columns: OpColumns = {name: raw.ints(name)[0] for name in OP_COLUMNS if name != "correlation_id"}
    _check_ids(raw, {name: columns[name] for name in ("device", "context", "stream")})
    kind, special = OP_TABLES[raw.name]
    columns["correlation_id"] = raw.optional("correlation_id")
    columns["kind"] = category(np.zeros(raw.n_rows, np.int8), [kind])
    columns["bytes"] = all_missing(raw.n_rows)
    columns["is_peer_copy"] = np.zeros(raw.n_rows, bool)
    columns["group"] = no_category(raw.n_rows)
    columns |= special(raw)
    return columns if keep is None else {name: column[keep] for name, column in columns.items()}


def _check_ids(raw: RawTable, ids: dict[str, Int64Array]) -> None:
    for name, values in ids.items():
        for value in (int(values.min(initial=0)), int(values.max(initial=0))):
            if not 0 <= value <= NO_ID:
                raise TraceError(
                    f"{raw.file.path}: {raw.name} has the {name} {value}, which is no id of 32 bits; the file was"
                    " changed after the export: export the report again"
                )


def _kernel_columns(raw: RawTable) -> OpColumns:
    return {"name": raw.texts("name_id", fallback="(unnamed kernel)")}


def _copy_columns(raw: RawTable) -> OpColumns:
    kind, _ = raw.ints("copy_kind")
    slot, codes = pd.factorize(kind)
    names = [_COPY_NAMES.get(code, f"memcpy kind {code}") for code in codes.tolist()]
    (source, has_source), (target, has_target) = raw.ids("src"), raw.ids("dst")
    is_between = np.isin(kind, _COPIES_BETWEEN_DEVICES) & has_source & has_target & (source != target)
    return {
        "name": category(slot, names),
        "bytes": raw.optional("bytes"),
        "is_peer_copy": (kind == _COPY_PEER) | is_between,
    }


def _memset_columns(raw: RawTable) -> OpColumns:
    return {"name": _one_name(raw, "memset"), "bytes": raw.optional("bytes")}


def _graph_columns(raw: RawTable) -> OpColumns:
    return {"name": _one_name(raw, "CUDA graph launch")}


def _one_name(raw: RawTable, name: str) -> pd.Categorical:
    return category(np.zeros(raw.n_rows, np.int8), [name])


OP_TABLES: Final[dict[str, tuple[str, Callable[[RawTable], OpColumns]]]] = {
    KERNEL: ("kernel", _kernel_columns),
    MEMCPY: ("memcpy", _copy_columns),
    MEMSET: ("memset", _memset_columns),
    GRAPH: ("graph", _graph_columns),
}
"""Source tables of device work: the kind that their rows are, and what is special to it."""


def _valid_times(
    raw: RawTable,
    times: dict[str, tuple[Int64Array, BoolArray | None]],
    info: FileInfo,
    options: ReadOptions,
    notes: list[Note],
) -> BoolArray | None:
    """Return which rows have possible times, None for all; refuse the file where one has not, unless told to drop."""
    (start, no_start), (end, no_end) = times["start_ns"], times["end_ns"]
    is_bad = (end < start) | (end > _LATEST_NS) | (start < -_LATEST_NS)
    if not info.is_time_shifted:
        is_bad |= start < 0
    for mask in (no_start, no_end, *(raw.ints(name)[1] for name in _IDENTITY if name in raw.columns)):
        is_bad = is_bad if mask is None else is_bad | mask
    n_bad = int(np.count_nonzero(is_bad))
    if not n_bad:
        return None
    if not options.drop_invalid:
        row = int(np.argmax(is_bad))
        first = ", ".join(
            f"{name} {'NULL' if mask is not None and mask[row] else values[row]}"
            for name, (values, mask) in (("start", times["start_ns"]), ("end", times["end_ns"]))
        )
        raise TraceError(
            f"{raw.file.path}: {n_bad} of {len(start)} rows of {raw.name} have no device, stream or process, or"
            f" missing, negative, reversed or impossibly late times (the first: {first}); export the report again, or"
            " leave such rows out with --drop-invalid"
        )
    lost = _lost_time(is_bad, times)
    text = f"{raw.name}: rows with missing ids, or missing, negative or reversed times ({lost}) were left out"
    notes.append(Note("dropped-rows", text, n_bad))
    return ~is_bad


def _lost_time(is_bad: BoolArray, times: dict[str, tuple[Int64Array, BoolArray | None]]) -> str:
    """Return how much device time the bad rows took, for people."""
    (start, no_start), (end, no_end) = times["start_ns"], times["end_ns"]
    is_timed = is_bad & (end >= start) & (end <= _LATEST_NS) & (start >= -_LATEST_NS)
    for mask in (no_start, no_end):
        is_timed = is_timed if mask is None else is_timed & ~mask
    # As Python's integers: durations of a damaged file may add up beyond 64 bits.
    durations = (end[is_timed] - start[is_timed]).tolist()
    return lost_time(int(np.count_nonzero(is_bad)), len(durations), sum(durations))


def assign_ranks(process: Int64Array, device: Int64Array, info: FileInfo) -> tuple[Int64Array, pd.DataFrame]:
    """Return the rank of each op and the table of ranks: as recorded, the others counted on by (device, process).

    Args:
        process: Process of each op, int64 of shape (N,).
        device: Device of each op, int64 of shape (N,).
        info: What the file says about itself.
    """
    # The lower 24 bits of a global process id are zero, and device ordinals are small: one integer holds both.
    slot, first_keys = pd.factorize(process + device)
    first = np.zeros(len(first_keys), np.int64)
    first[slot] = np.arange(len(slot))
    frame = pd.DataFrame({"process": process[first], "device": device[first]})
    frame["pid"] = (frame["process"].to_numpy() >> _PID_SHIFT) & _PID_MASK
    pairs = list(zip(frame["pid"].tolist(), frame["device"].tolist(), strict=True))
    is_recorded = np.array([pair in info.recorded_ranks for pair in pairs])
    by_device = np.lexsort((frame["process"].to_numpy(), frame["device"].to_numpy(), is_recorded))
    counted = np.argsort(by_device) + max(info.recorded_ranks.values(), default=-1) + 1
    frame["rank"] = [info.recorded_ranks.get(pair, rank) for pair, rank in zip(pairs, counted, strict=True)]
    frame = frame.astype({"rank": np.int32}).assign(is_recorded=is_recorded)
    texts = [info.device_names.get(ordinal, "") for ordinal in frame["device"].tolist()]
    frame["device_name"] = category(np.array([i if text else -1 for i, text in enumerate(texts)]), texts)
    ranks = schema.make_frame(schema.RANKS, {name: frame[name].array for name in frame.columns})
    return frame["rank"].to_numpy()[slot], ranks
