"""Export `kineto`: the JSON of the PyTorch profiler, which our own source and other tools of that format read.

One file holds all ranks. What the format has no place for stands in `cptrace` at the top, and in the arguments `domain`
and `payload` of ranges: other readers pass over both.

Source: the writer in Kineto, libkineto/src/output_json.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa

from cptrace.exports import json_events as events
from cptrace.exports.identity import Identity, shift_ns
from cptrace.intervals import Int64Array
from cptrace.launches import Launches, calls_of, closed_ranges, find_launches
from cptrace.process_groups import parse_group
from cptrace.trace import Trace

_CATEGORY: Final = {"kernel": "kernel", "memcpy": "gpu_memcpy", "memset": "gpu_memset", "graph": "gpu_graph"}
_SYNC_NAMES: Final = {
    "context": "Context Sync",
    "stream": "Stream Sync",
    "event": "Event Sync",
    "stream_wait": "Stream Wait Event",
}
_NONE: Final = -1
_ENDS: Final = {"H": "Pageable", "D": "Device", "A": "Array", "P": "Device"}


def write(trace: Trace, path: Path) -> None:
    """Write a trace as Kineto does.

    Args:
        trace: Trace to write.
        path: File to write; gzip where it ends in `.gz`.
    """
    identity, moved_ns = Identity.of(trace), shift_ns(trace)
    head = _head(trace, identity, moved_ns)
    events.write_document(path, head, "traceEvents", _parts(trace, identity, moved_ns))


def _head(trace: Trace, identity: Identity, moved_ns: int) -> dict[str, Any]:
    meta, ranks = trace.meta, trace.ranks
    rows = [
        dict(zip(ranks, row, strict=True)) for row in zip(*(ranks[n].tolist() for n in ranks), strict=True)
    ]
    own_ranks = [
        {
            "rank": row["rank"],
            "pid": identity.pids[row["process"]],
            "device": identity.devices[row["rank"]],
            "is_recorded": row["is_recorded"],
        }
        for row in rows
    ]
    head: dict[str, Any] = {
        "schemaVersion": 1,
        "deviceProperties": [
            {"id": identity.devices[row["rank"]], "name": row["device_name"]}
            for row in rows
            if isinstance(row["device_name"], str)
        ],
        "cptrace": {
            "device_kind": meta.device_kind,
            "clock": meta.clock,
            "run": _plain(meta.run) or None,
            "ranks": own_ranks,
        },
        "displayTimeUnit": "ms",
        "traceName": meta.trace_name or meta.path,
        # Rounded down nowhere: time 0 is what it was, moved by the shift.
        "baseTimeNanoseconds": (meta.session_start_utc_ns or 0) - moved_ns,
    }
    if len(rows) == 1:
        n_ranks = meta.n_job_ranks or 1
        head["distributedInfo"] = {"backend": "nccl", "rank": rows[0]["rank"], "world_size": n_ranks}
    return head


def _plain(value: Any) -> Any:
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _parts(trace: Trace, identity: Identity, moved_ns: int) -> Iterator[pa.Array]:
    launches = find_launches(trace.ops, trace.api_calls)
    yield _names(trace, identity)
    yield _ops(trace.ops, identity, moved_ns)
    yield _calls(trace.api_calls, identity, moved_ns)
    yield _ranges(closed_ranges(trace.ranges), identity, moved_ns)
    yield _syncs(trace, identity, moved_ns)
    yield _records(trace, identity, moved_ns)
    yield from _flows(trace, launches, identity, moved_ns)


def _complete(
    rows: pd.DataFrame, moved_ns: int, fields: Mapping[str, events.Texts], args: Mapping[str, events.Texts]
) -> pa.Array:
    """Return complete events of rows with a start and an end."""
    start, end = (rows[name].to_numpy(dtype=np.int64) for name in ("start_ns", "end_ns"))
    times = {"ts": events.microseconds(start + moved_ns), "dur": events.microseconds(end - start)}
    everything = {"ph": events.one("X"), **fields, **times, "args": events.objects(args, len(rows))}
    return events.objects(everything, len(rows))


def _names(trace: Trace, identity: Identity) -> pa.Array:
    """Return what viewers call processes and devices."""

    def say(pid: int, key: str, name: str, value: str) -> dict[str, Any]:
        return {"ph": "M", "name": key, "pid": pid, "tid": 0, "ts": 0, "args": {name: value}}

    lines = []
    for pid in sorted(identity.pids.values()):
        lines += [say(pid, "process_name", "name", "python"), say(pid, "process_labels", "labels", "CPU")]
    for rank, device in sorted(identity.devices.items()):
        lines.append(say(device, "process_labels", "labels", f"GPU {device} (rank {rank})"))
    return pa.array([events.one(line).as_py() for line in lines], pa.string())


def _ops(ops: pd.DataFrame, identity: Identity, moved_ns: int) -> pa.Array:
    kinds, names = ops["kind"].cat, _op_names(ops)
    device, is_kernel = events.numbers(identity.device(ops["rank"])), (ops["kind"] == "kernel").to_numpy(bool)
    size, has_size = events.numbers(ops["bytes"].array), ops["bytes"].notna().to_numpy()
    args = {
        "device": device,
        "context": events.numbers(ops["context"].to_numpy()),
        "stream": events.numbers(ops["stream"].to_numpy()),
        "correlation": events.numbers(ops["correlation_id"].array),
        "bytes": events.where(size, has_size & ~is_kernel),
        # What a rank hands to a collective: as many elements of one byte.
        "In msg nelems": events.where(size, has_size & is_kernel),
        "dtype": events.coded(np.where(has_size & is_kernel, 0, -1), ['"Byte"']),
        **_group_args(ops),
    }
    categories = [f'"{_CATEGORY.get(str(kind), "kernel")}"' for kind in kinds.categories]
    fields = {
        "cat": events.coded(kinds.codes.to_numpy(), categories),
        "name": names,
        "pid": device,
        "tid": args["stream"],
    }
    return _complete(ops, moved_ns, fields, args)


def _group_args(ops: pd.DataFrame) -> dict[str, pa.Array]:
    """Return the process groups of collectives."""
    codes = ops["group"].cat.codes.to_numpy()
    groups = [parse_group(str(text)) for text in ops["group"].cat.categories]
    has_size = np.array([*(group.n_ranks is not None for group in groups), False], bool)[codes]
    has_ranks = np.array([*(group.ranks is not None for group in groups), False], bool)[codes]
    return {
        "Group size": events.coded(np.where(has_size, codes, -1), [str(group.n_ranks) for group in groups]),
        "Process Group Name": events.coded(codes, [events.one(group.name).as_py() for group in groups]),
        "Process Group Ranks": events.coded(
            np.where(has_ranks, codes, -1), [f'"{list(group.ranks or ())}"' for group in groups]
        ),
    }


def _op_names(ops: pd.DataFrame) -> pa.Array:
    """Return names, copies as Kineto calls them: `Memcpy DtoD (Device -> Device)`."""
    plain = events.texts(ops["name"])
    names = ops["name"].cat
    kineto = [events.one(_copy_name(str(name))).as_py() for name in names.categories]
    is_copy = ops["kind"].isin(["memcpy", "memset"]).to_numpy()
    is_peer = ops["is_peer_copy"].to_numpy()
    copies = events.coded(np.where(is_copy & ~is_peer, names.codes.to_numpy(), -1), kineto)
    peers = events.coded(np.where(is_copy & is_peer, 0, -1), [events.one(_copy_name("memcpy PtoP")).as_py()])
    return pa.compute.coalesce(copies, peers, plain)


def _copy_name(name: str) -> str:
    word, _, direction = name.partition(" ")
    source, to, target = direction.partition("to")
    if word == "memset":
        return "Memset (Device)"
    if not to or len(source) != 1 or len(target) != 1:
        return name
    return f"Memcpy {direction} ({_ENDS.get(source, source)} -> {_ENDS.get(target, target)})"


def _host_fields(rows: pd.DataFrame, identity: Identity) -> dict[str, events.Texts]:
    return {
        "name": events.texts(rows["name"]),
        "pid": events.numbers(identity.pid(rows["process"])),
        "tid": events.numbers(identity.tid(rows["thread"])),
    }


def _calls(calls: pd.DataFrame, identity: Identity, moved_ns: int) -> pa.Array:
    names = calls["name"].cat
    is_driver = [name.startswith("cu") and not name.startswith("cuda") for name in map(str, names.categories)]
    driver = np.append(np.array(is_driver, bool), False)[names.codes.to_numpy()]
    category = events.coded(driver.astype(np.int64), ['"cuda_runtime"', '"cuda_driver"'])
    args = {"correlation": events.numbers(calls["correlation_id"].array)}
    return _complete(calls, moved_ns, {"cat": category, **_host_fields(calls, identity)}, args)


def _ranges(ranges: pd.DataFrame, identity: Identity, moved_ns: int) -> pa.Array:
    args = {"domain": events.texts(ranges["domain"]), "payload": events.numbers(ranges["payload"].array)}
    fields = {"cat": events.one("user_annotation"), **_host_fields(ranges, identity)}
    return _complete(ranges, moved_ns, fields, args)


def _syncs(trace: Trace, identity: Identity, moved_ns: int) -> pa.Array:
    syncs = trace.syncs
    device = events.numbers(identity.device_of_context(syncs))
    records = trace.event_records[["process", "event_sync_id", "stream", "correlation_id"]].dropna()
    # Nullable, since some waits find no record.
    records = records.drop_duplicates(["process", "event_sync_id"]).astype({"stream": "Int64"})
    waited = syncs[["process", "event_sync_id"]].merge(records, on=["process", "event_sync_id"], how="left")
    kinds = syncs["kind"].cat
    names = [events.one(_SYNC_NAMES[str(kind)]).as_py() for kind in kinds.categories]
    stream = events.numbers(syncs["stream"].fillna(_NONE).to_numpy(np.int64))
    is_event = syncs["event_id"].notna().to_numpy()
    args = {
        "cuda_sync_kind": events.coded(kinds.codes.to_numpy(), names),
        "device": device,
        "context": events.numbers(syncs["context"].to_numpy()),
        "stream": stream,
        "correlation": events.numbers(syncs["correlation_id"].array),
        "wait_on_stream": events.where(events.numbers(waited["stream"].array), is_event),
        "wait_on_cuda_event_record_corr_id": events.where(
            events.numbers(waited["correlation_id"].array), is_event
        ),
        "wait_on_cuda_event_id": events.numbers(syncs["event_id"].array),
    }
    fields = {"cat": events.one("cuda_sync"), "name": args["cuda_sync_kind"], "pid": device, "tid": stream}
    return _complete(syncs, moved_ns, fields, args)


def _records(trace: Trace, identity: Identity, moved_ns: int) -> pa.Array:
    """Return records of events at the start of the calls that made them; those without a known call are left out."""
    call, is_known = calls_of(trace.event_records, trace.api_calls)
    records, instant = trace.event_records[is_known], _call_starts(trace, call[is_known])
    device = events.numbers(identity.device_of_context(records))
    args = {
        "device": device,
        "context": events.numbers(records["context"].to_numpy()),
        "stream": events.numbers(records["stream"].to_numpy()),
        "correlation": events.numbers(records["correlation_id"].array),
        "event_id": events.numbers(records["event_id"].to_numpy()),
    }
    fields = {
        "cat": events.one("cuda_event"),
        "name": events.one("Event Record"),
        "pid": device,
        "tid": args["stream"],
    }
    return _complete(pd.DataFrame({"start_ns": instant, "end_ns": instant}), moved_ns, fields, args)


def _call_starts(trace: Trace, call: Int64Array) -> Int64Array:
    return np.asarray(trace.api_calls["start_ns"].to_numpy()[call], np.int64)


def _flows(trace: Trace, launches: Launches, identity: Identity, moved_ns: int) -> Iterator[pa.Array]:
    """Yield the arrows from calls to what they launched, which viewers draw."""
    ops, calls = trace.ops[launches.is_known], trace.api_calls.iloc[launches.call[launches.is_known]]
    common = {
        "cat": events.one("ac2g"),
        "name": events.one("ac2g"),
        "id": events.numbers(np.arange(1, len(ops) + 1)),
    }
    yield events.objects(
        {
            "ph": events.one("s"),
            **common,
            "pid": events.numbers(identity.pid(calls["process"])),
            "tid": events.numbers(identity.tid(calls["thread"])),
            "ts": events.microseconds(calls["start_ns"].to_numpy() + moved_ns),
        },
        len(ops),
    )
    yield events.objects(
        {
            "ph": events.one("f"),
            "bp": events.one("e"),
            **common,
            "pid": events.numbers(identity.device(ops["rank"])),
            "tid": events.numbers(ops["stream"].to_numpy()),
            "ts": events.microseconds(ops["start_ns"].to_numpy() + moved_ns),
        },
        len(ops),
    )
