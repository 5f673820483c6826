"""Makes records of a trace, so that a trace of any source can be written in the schema of Nsight Systems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pandas as pd

from cptrace import labels
from cptrace.capture.records import (
    ApiCall,
    CopyKind,
    EventRecord,
    Op,
    OpKind,
    ProcessRecord,
    Range,
    Stream,
    Synchronization,
)
from cptrace.launches import closed_ranges
from cptrace.trace import Trace

OTHER_DOMAIN: Final = "torch.profiler"

_TID_MASK: Final = 0xFFFFFF
_COPY_KINDS: Final = {
    "memcpy HtoD": CopyKind.HOST_TO_DEVICE,
    "memcpy DtoH": CopyKind.DEVICE_TO_HOST,
    "memcpy DtoD": CopyKind.DEVICE_TO_DEVICE,
    "memcpy PtoP": CopyKind.PEER_TO_PEER,
}


def process_records(trace: Trace, moved_ns: int = 0) -> list[ProcessRecord]:
    """Return a record of each rank of a trace.

    Ranges whose text is one of our labels get our domain, which traces of torch's profiler do not have. Work inside
    CUDA graphs that were traced as a whole has no place in records and is left out.

    Args:
        trace: Trace as a source read it; each rank a process of its own.
        moved_ns: Added to all times.
    """
    columns = zip(
        *(trace.ranks[name].tolist() for name in ("rank", "process", "pid", "device", "device_name")),
        strict=True,
    )
    return [
        _record(trace, rank, process, pid, device, name if isinstance(name, str) else "", moved_ns)
        for rank, process, pid, device, name in columns
    ]


def _record(
    trace: Trace, rank: int, process: int, pid: int, device: int, name: str, moved_ns: int
) -> ProcessRecord:
    ops = _moved(trace.ops[trace.ops["rank"] == rank], moved_ns)
    mine = {
        table: _of(getattr(trace, table), process)
        for table in ("api_calls", "syncs", "event_records", "ranges")
    }
    calls, syncs = _moved(mine["api_calls"], moved_ns), _moved(mine["syncs"], moved_ns)
    contexts = ops["context"].drop_duplicates().tolist()
    places = ops[["context", "stream"]].drop_duplicates()
    return ProcessRecord(
        rank=rank,
        pid=pid,
        device=device,
        device_name=name,
        context=contexts[0] if contexts else 0,
        streams=list(map(Stream, *_lists(places, "context", "stream"))),
        ops=_ops(ops, device),
        api_calls=_api_calls(calls),
        synchronizations=list(
            map(
                Synchronization,
                *_lists(
                    syncs,
                    "start_ns",
                    "end_ns",
                    "context",
                    "stream",
                    "event_id",
                    "event_sync_id",
                    "correlation_id",
                ),
            )
        ),
        event_records=list(
            map(
                EventRecord,
                *_lists(
                    mine["event_records"], "context", "stream", "event_id", "event_sync_id", "correlation_id"
                ),
            )
        ),
        ranges=_ranges(_moved(closed_ranges(mine["ranges"]), moved_ns)),
    )


def _of(frame: pd.DataFrame, process: int) -> pd.DataFrame:
    return frame[frame["process"] == process]


def _moved(frame: pd.DataFrame, moved_ns: int) -> pd.DataFrame:
    return frame.assign(start_ns=frame["start_ns"] + moved_ns, end_ns=frame["end_ns"] + moved_ns)


def _lists(frame: pd.DataFrame, *names: str) -> list[list[Any]]:
    """Return columns as lists, None where a value is missing."""
    return [frame[name].astype(object).where(frame[name].notna(), None).tolist() for name in names]


def _ops(ops: pd.DataFrame, device: int) -> Sequence[Op]:
    ops = ops[ops["kind"] != "graph"]
    starts, ends, contexts, streams, correlations, sizes, kinds, names = _lists(
        ops, "start_ns", "end_ns", "context", "stream", "correlation_id", "bytes", "kind", "name"
    )
    copies = [
        _COPY_KINDS.get(name) if kind == "memcpy" else None for kind, name in zip(kinds, names, strict=True)
    ]
    ends_of_copies = [None if kind is None or kind is CopyKind.PEER_TO_PEER else device for kind in copies]
    values = [0 if kind == "memset" else None for kind in kinds]
    n_rows = len(ops)
    places = (kinds, names, starts, ends, [device] * n_rows, contexts, streams, correlations)
    return list(
        map(Op, map(OpKind, places[0]), *places[1:], sizes, copies, ends_of_copies, ends_of_copies, values)
    )


def _api_calls(calls: pd.DataFrame) -> Sequence[ApiCall]:
    names, starts, ends, correlations = _lists(calls, "name", "start_ns", "end_ns", "correlation_id")
    named = [name or "(unnamed call)" for name in names]
    return list(map(ApiCall, named, starts, ends, _threads(calls), correlations))


def _ranges(ranges: pd.DataFrame) -> Sequence[Range]:
    texts, starts, ends, payloads = _lists(ranges, "name", "start_ns", "end_ns", "payload")
    named = [text or "" for text in texts]
    parsed = {text: labels.parse_label(text) for text in set(named)}
    domains = [OTHER_DOMAIN if parsed[text] is None else labels.DOMAIN for text in named]
    categories = [None if (label := parsed[text]) is None else label.name for text in named]
    return list(map(Range, named, starts, ends, _threads(ranges), domains, categories, payloads))


def _threads(frame: pd.DataFrame) -> list[int]:
    numbers: list[int] = (frame["thread"] & _TID_MASK).tolist()
    return numbers
