"""The events of a PyTorch profiler trace, as columns per kind of event; still free of pandas.

`KINDS` says which categories of events fill which table and what is read of them. Kineto writes them all as complete
events (`"ph": "X"`) with a start and a duration; flows, counters and marks say nothing that these do not.

Source: the writer (`output_json.cpp`) and the activities' metadata in Kineto, and traces from PyTorch 1.8 to 2.13.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from cptrace.intervals import BoolArray
from cptrace.sources.column_buffers import IntColumn
from cptrace.sources.kineto_misfits import DEVICE_CATEGORIES, NO_WORK_PHASES, Misfits, may_be_work
from cptrace.sources.kineto_text import UNREADABLE, as_utf8
from cptrace.sources.kineto_times import parse_spans

_FIELDS: Final = {
    "from_device": "fromDevice",
    "in_device": "inDevice",
    "to_device": "toDevice",
    "n_elements": "In msg nelems",
    "group_size": "Group size",
    "group_name": "Process Group Name",
    "group_ranks": "Process Group Ranks",
    "sync_kind": "cuda_sync_kind",
    "wait_stream": "wait_on_stream",
    "wait_event": "wait_on_cuda_event_id",
    "wait_record": "wait_on_cuda_event_record_corr_id",
}


class Args(msgspec.Struct, gc=False, rename=_FIELDS.get):
    """What is read of an event's arguments; any may be missing or of another type than it should be."""

    device: Any = None
    context: Any = None
    stream: Any = None
    correlation: Any = None
    bytes: Any = None
    from_device: Any = None
    in_device: Any = None
    to_device: Any = None
    n_elements: Any = None
    dtype: Any = None
    group_size: Any = None
    group_name: Any = None
    group_ranks: Any = None
    sync_kind: Any = None
    wait_stream: Any = None
    wait_event: Any = None
    wait_record: Any = None
    event_id: Any = None
    domain: Any = None
    payload: Any = None
    labels: Any = None


class Event(msgspec.Struct, gc=False):
    """What is read of an event. Times stay text: as binary floating point they would be off by up to 256 ns."""

    ph: str | None = None
    cat: str | None = None
    name: str | None = None
    pid: Any = None
    tid: Any = None
    ts: msgspec.Raw = msgspec.Raw(b"")
    dur: msgspec.Raw = msgspec.Raw(b"")
    args: Args | None = None


_NO_ARGS: Final = Args()
_EVENT: Final = msgspec.json.Decoder(Event)
_EVENTS: Final = msgspec.json.Decoder(list[Event])
_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of event.

    Attributes:
        name: Name of the table that it fills.
        categories: Categories, in lower case; the first releases of Kineto began them with capitals.
        ints: Arguments to read as integers.
        texts: Arguments to read as text.
    """

    name: str
    categories: tuple[str, ...]
    ints: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()


DEVICE: Final = Kind(
    "device",
    DEVICE_CATEGORIES,
    (
        "device",
        "context",
        "stream",
        "correlation",
        "bytes",
        "from_device",
        "in_device",
        "to_device",
        "n_elements",
        "group_size",
    ),
    ("dtype", "group_name", "group_ranks"),
)
CALLS: Final = Kind(
    "calls",
    (
        "cuda_runtime",
        "cuda_driver",
        "runtime",
        "xpu_runtime",
        "xpu_driver",
        "privateuse1_runtime",
        "privateuse1_driver",
    ),
    ("correlation",),
)
SYNCS: Final = Kind(
    "syncs",
    ("cuda_sync",),
    ("device", "context", "stream", "correlation", "wait_stream", "wait_event", "wait_record"),
    ("sync_kind",),
)
RECORDS: Final = Kind("records", ("cuda_event",), ("device", "context", "stream", "correlation", "event_id"))
RANGES: Final = Kind("ranges", ("user_annotation", "cpu_op", "operator"), ("payload",), ("domain",))
KINDS: Final = (DEVICE, CALLS, SYNCS, RECORDS, RANGES)

_DEVICE_ANNOTATION: Final = "gpu_user_annotation"
_KIND_OF: Final = {category: kind for kind in KINDS for category in kind.categories}
_LEFT_OUT: Final = frozenset(
    (
        "python_function",
        _DEVICE_ANNOTATION,
        "overhead",
        "trace",
        "external_correlation",
        "cuda_profiler_range",
    )
)
# A trace has several cpu_ops per kernel, and each would cost 1 us and 50 bytes. As ranges only those are needed that
# name a step, as in old traces, or a collective; `aten::broadcast_to` and its like are none.
_OPERATORS: Final = frozenset(("cpu_op", "operator"))
_TELLING_OPERATOR: Final = re.compile(r"(?i)(?:step|iter|profilerstep)|_?c10d|nccl|rccl|gloo")
_LIKE_STEP: Final = re.compile(r"(?i)(?:step|iteration|iter|profilerstep)(?:[^a-z]|$)")
_INTEGER: Final = re.compile(r"(?:stream )?(?:(-?\d+)|0[xX]([0-9a-fA-F]+))")
_INT64: Final = np.iinfo(np.int64)


@dataclass(frozen=True, slots=True)
class EventColumns:
    """The columns of N events of one kind.

    Attributes:
        is_timed: Whether an event has a start and a duration, bool of shape (N,); where one has no start, it runs
            from 0 for its duration, and to -1 where it has none.
        ints: start_ns, end_ns, pid, tid and what the kind names.
        texts: category, name and what the kind names, as codes into distinct texts.
    """

    is_timed: BoolArray
    ints: dict[str, IntColumn]
    texts: dict[str, pa.DictionaryArray]


def decode_events(run: bytes) -> tuple[list[Event], Misfits] | None:
    """Return the events of a run and those that could not be understood, or None where the run is no array.

    Args:
        run: Text of an array of events.
    """
    misfits = Misfits()
    try:
        return _EVENTS.decode(run), misfits
    except UNREADABLE:
        pass
    try:
        items = _ITEMS.decode(run)
    except UNREADABLE:
        return None
    events = [event for item in items if (event := _decode_alone(item, misfits)) is not None]
    return events, misfits


def _decode_alone(item: msgspec.Raw, misfits: Misfits) -> Event | None:
    """Return an event that may hold texts that are not UTF-8; None, and it is counted, where it is no event."""
    text = as_utf8(item)
    try:
        return _EVENT.decode(text)
    except UNREADABLE:
        pass
    misfits.add_item(text)
    return None


@dataclass(slots=True)
class EventTables:
    """Tables of events, filled run by run.

    Attributes:
        host_pids: Processes that the trace labels as the CPU's.
        misfits: Events that could not be understood.
        n_unknown: How many complete events each category had that is not known here.
        n_device_steps: How many annotations on the device's side are called like a step.
    """

    host_pids: set[int] = field(default_factory=set)
    misfits: Misfits = field(default_factory=Misfits)
    n_unknown: Counter[str] = field(default_factory=Counter)
    n_device_steps: int = 0
    _parts: dict[str, list[EventColumns]] = field(default_factory=dict)
    _is_telling: dict[str, bool] = field(default_factory=dict)

    def add(self, events: Sequence[Event], misfits: Misfits) -> None:
        """Add a run of events.

        Args:
            events: Events in any order.
            misfits: Others, that could not be understood.
        """
        self.misfits.join(misfits)
        by_category: dict[str, list[Event]] = {}
        for event in events:
            if event.ph == "X":
                by_category.setdefault(event.cat or "", []).append(event)
            elif event.ph == "M" and event.args is not None and event.args.labels == "CPU":
                self.host_pids |= {pid for pid in (as_integer(event.pid),) if pid is not None}
            elif event.ph not in NO_WORK_PHASES and may_be_work(
                event.ph, event.cat, names_device=_names_device(event)
            ):
                self.misfits.add_work(
                    event.dur
                )  # such as half of a pair of begin and end, which no version writes
        for category, members in by_category.items():
            self._add_category(category.lower(), members)

    def finish(self, kind: Kind) -> EventColumns:
        """Return the columns of a kind of event, and forget them.

        Args:
            kind: One of `KINDS`.
        """
        return _join(self._parts.pop(kind.name, []) or [_columns(kind, "", [])])

    def _add_category(self, category: str, events: list[Event]) -> None:
        if not category:
            for event in filter(_names_device, events):
                self.misfits.add_work(event.dur)
            events = [event for event in events if not _names_device(event)]
        kind = _KIND_OF.get(category)
        if category in _OPERATORS:
            events = [event for event in events if self._tells(event.name or "")]
        if kind is not None and events:
            self._parts.setdefault(kind.name, []).append(_columns(kind, category, events))
        elif category == _DEVICE_ANNOTATION:
            self.n_device_steps += sum(is_called_like_step(event.name or "") for event in events)
        elif kind is None and events and category not in _LEFT_OUT:
            self.n_unknown[category] += len(events)

    def _tells(self, name: str) -> bool:
        if name not in self._is_telling:
            self._is_telling[name] = _TELLING_OPERATOR.match(name) is not None
        return self._is_telling[name]


def _names_device(event: Event) -> bool:
    return event.args is not None and not (event.args.device is None and event.args.stream is None)


def _columns(kind: Kind, category: str, events: Sequence[Event]) -> EventColumns:
    args = [event.args or _NO_ARGS for event in events]
    spans = parse_spans([event.ts for event in events], [event.dur for event in events])
    # Where a start is missing, the duration alone still says how much time is lost with the event.
    if len(untimed := np.flatnonzero(~spans.is_valid)):
        alone = parse_spans([b"0"] * len(untimed), [events[row].dur for row in untimed.tolist()])
        spans.end_ns[untimed] = np.where(alone.is_valid, alone.end_ns, -1)
    ints = {
        "start_ns": IntColumn(spans.start_ns, None),
        "end_ns": IntColumn(spans.end_ns, None),
        "pid": _integers([event.pid for event in events]),
        "tid": _integers([event.tid for event in events]),
        **{name: _integers(list(map(attrgetter(name), args))) for name in kind.ints},
    }
    texts = {
        "category": _texts([category] * len(events)),
        "name": _texts([event.name for event in events]),
        **{name: _texts(list(map(attrgetter(name), args))) for name in kind.texts},
    }
    return EventColumns(spans.is_valid, ints, texts)


def _texts(values: Sequence[Any]) -> pa.DictionaryArray:
    try:
        array = pa.array(values, pa.string())
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        array = pa.array([value if isinstance(value, str) else None for value in values], pa.string())
    return array.dictionary_encode()


def _integers(values: Sequence[Any]) -> IntColumn:
    array = _inferred(values)
    if array is not None and pa.types.is_null(array.type):
        return IntColumn(np.zeros(len(values), np.int64), np.ones(len(values), bool))
    if array is None or not pa.types.is_int64(array.type):
        array = pa.array([as_integer(value) for value in values], pa.int64())
    if not array.null_count:
        return IntColumn(array.to_numpy(), None)
    return IntColumn(array.fill_null(0).to_numpy(), array.is_null().to_numpy(zero_copy_only=False))


def _inferred(values: Sequence[Any]) -> pa.Array | None:
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return None  # of several types


def is_called_like_step(name: str) -> bool:
    """Return whether an annotation has the name of a step, or nearly so.

    Args:
        name: Its name.
    """
    return _LIKE_STEP.match(name) is not None


def as_integer(value: Any) -> int | None:
    """Return a JSON value as an integer of 64 bits: also numbers in texts, as AMD's traces and old ones have.

    Args:
        value: Any JSON value.

    Example:
        >>> [as_integer(value) for value in (7, 7.0, "7", "stream 7", "0x1f", 7.5, "Spans", None)]
        [7, 7, 7, 7, 31, None, None, None]
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    elif isinstance(value, str) and (match := _INTEGER.fullmatch(value)):
        value = int(match[1]) if match[1] else int(match[2], 16)
    is_fitting = type(value) is int and _INT64.min <= value <= _INT64.max
    return value if is_fitting else None


def _join(parts: Sequence[EventColumns]) -> EventColumns:
    """Return the columns of all runs as one."""
    ints = {name: _join_integers([part.ints[name] for part in parts]) for name in parts[0].ints}
    chunks = {name: pa.chunked_array([part.texts[name] for part in parts]) for name in parts[0].texts}
    texts = {name: column.unify_dictionaries().combine_chunks() for name, column in chunks.items()}
    return EventColumns(np.concatenate([part.is_timed for part in parts]), ints, texts)


def _join_integers(parts: Sequence[IntColumn]) -> IntColumn:
    values, masks = zip(*parts, strict=True)
    if all(mask is None for mask in masks):
        return IntColumn(np.concatenate(values), None)
    filled = [np.zeros(len(v), bool) if m is None else m for v, m in zip(values, masks, strict=True)]
    return IntColumn(np.concatenate(values), np.concatenate(filled))
