"""Export `perfetto`: a timeline for ui.perfetto.dev, one process per rank, one track per stream and host thread.

It is the Chrome trace format, which Perfetto opens as it is; its own format needs a package for protocol buffers and
would show the same.

Source: "Trace Event Format" (Google, 2016), and "Other trace formats" in the documentation of Perfetto.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa

from cptrace.classify import classify
from cptrace.exports import json_events as events
from cptrace.exports.identity import shift_ns
from cptrace.intervals import Int64Array
from cptrace.labels import CPU_EMULATED
from cptrace.launches import Launches, closed_ranges, find_launches
from cptrace.trace import Trace

_HOST_TRACKS: Final = 1_000_000  # above the numbers of the tracks of streams
# Colours that the Chrome trace format has names for.
_COLOR: Final = {"compute": "good", "comm": "bad", "copy": "yellow", "other": "grey"}


def write(trace: Trace, path: Path) -> None:
    """Write a trace as a timeline.

    Args:
        trace: Trace to write.
        path: File to write; gzip where it ends in `.gz`.
    """
    launches = find_launches(trace.ops, trace.api_calls)
    trace = classify(trace, launches)
    head = {
        "displayTimeUnit": "ns",
        "otherData": {
            "source": trace.meta.path,
            "device_kind": trace.meta.device_kind,
            "clock": trace.meta.clock or "",
            "note": "CPU emulation: no figure is a GPU's" if trace.meta.device_kind == CPU_EMULATED else "",
        },
    }
    events.write_document(path, head, "traceEvents", _parts(trace, launches))


def _parts(trace: Trace, launches: Launches) -> Iterator[pa.Array]:
    tracks = _Tracks(trace)
    yield tracks.names()
    yield _ops(trace.ops, tracks)
    for rows, category in ((closed_ranges(trace.ranges), "nvtx"), (trace.api_calls, "api")):
        yield _host(rows, category, tracks)
    yield from _flows(trace, launches, tracks)


class _Tracks:
    """Numbers of tracks: a stream's and a host thread's place among those of its rank."""

    def __init__(self, trace: Trace) -> None:
        """Number the tracks of a trace."""
        ops = trace.ops[["rank", "context", "stream"]].drop_duplicates()
        self._streams = ops.sort_values(["rank", "context", "stream"], ignore_index=True)
        hosts = pd.concat([trace.api_calls[["process", "thread"]], trace.ranges[["process", "thread"]]])
        self._hosts = hosts.drop_duplicates().sort_values(["process", "thread"], ignore_index=True)
        self._ranks = trace.ranks
        self.moved_ns = shift_ns(trace)
        # Of several ranks in one process the lowest has its host threads.
        first = trace.ranks.drop_duplicates("process")
        self._rank_of = dict(zip(first["process"].tolist(), first["rank"].tolist(), strict=True))

    def stream(self, ops: pd.DataFrame) -> Int64Array:
        """Return the track of each op."""
        keys = pd.MultiIndex.from_frame(self._streams)
        return np.asarray(
            keys.get_indexer(pd.MultiIndex.from_frame(ops[["rank", "context", "stream"]])), np.int64
        )

    def thread(self, rows: pd.DataFrame) -> Int64Array:
        """Return the track of each row of a host thread."""
        keys = pd.MultiIndex.from_frame(self._hosts)
        place = keys.get_indexer(pd.MultiIndex.from_frame(rows[["process", "thread"]]))
        return _HOST_TRACKS + np.asarray(place, np.int64)

    def process(self, rows: pd.DataFrame) -> Int64Array:
        """Return the rank whose process each row is of; processes without a rank come behind all ranks."""
        slot, processes = pd.factorize(rows["process"].to_numpy())
        behind = max(self._ranks["rank"].tolist(), default=-1) + 1
        others = sorted(set(self._hosts["process"].tolist()) - self._rank_of.keys())
        numbers = {**self._rank_of, **{process: behind + place for place, process in enumerate(others)}}
        return np.array([numbers[process] for process in processes.tolist()], np.int64)[slot]

    def names(self) -> pa.Array:
        """Return what the tracks are called."""
        lines = []
        ranks = zip(*(self._ranks[name].tolist() for name in ("rank", "device", "pid")), strict=True)
        for rank, device, pid in ranks:
            lines.append(_name("process_name", rank, 0, f"rank {rank} (device {device}, pid {pid})"))
        streams = zip(*(self._streams[name].tolist() for name in ("rank", "context", "stream")), strict=True)
        for track, (rank, context, stream) in enumerate(streams):
            lines.append(_name("thread_name", rank, track, f"stream {stream} (context {context})"))
        owners, threads = self.process(self._hosts).tolist(), self.thread(self._hosts).tolist()
        for owner, track in zip(owners, threads, strict=True):
            lines.append(_name("thread_name", owner, track, f"host thread {track - _HOST_TRACKS}"))
        return pa.array([events.one(line).as_py() for line in lines], pa.string())


def _name(key: str, pid: int, tid: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": key, "pid": pid, "tid": tid, "args": {"name": text}}


def _times(rows: pd.DataFrame, moved_ns: int) -> dict[str, events.Texts]:
    start = rows["start_ns"].to_numpy(dtype=np.int64)
    end = rows["end_ns"].to_numpy(dtype=np.int64)
    return {"ts": events.microseconds(start + moved_ns), "dur": events.microseconds(end - start)}


def _ops(ops: pd.DataFrame, tracks: _Tracks) -> pa.Array:
    roles = ops["role"].cat
    colors = [f'"{_COLOR[str(role)]}"' for role in roles.categories]
    args = {
        "role": events.texts(ops["role"]),
        "collective": events.texts(ops["collective"]),
        "stream": events.numbers(ops["stream"].to_numpy()),
        "bytes": events.numbers(ops["bytes"].array),
        "start_ns": events.numbers(ops["start_ns"].to_numpy()),
        "end_ns": events.numbers(ops["end_ns"].to_numpy()),
    }
    fields = {
        "ph": events.one("X"),
        "cat": args["role"],
        "name": events.texts(ops["name"]),
        "pid": events.numbers(ops["rank"].to_numpy()),
        "tid": events.numbers(tracks.stream(ops)),
        "cname": events.coded(roles.codes.to_numpy(), colors),
        **_times(ops, tracks.moved_ns),
        "args": events.objects(args, len(ops)),
    }
    return events.objects(fields, len(ops))


def _host(rows: pd.DataFrame, category: str, tracks: _Tracks) -> pa.Array:
    fields = {
        "ph": events.one("X"),
        "cat": events.one(category),
        "name": events.texts(rows["name"]),
        "pid": events.numbers(tracks.process(rows)),
        "tid": events.numbers(tracks.thread(rows)),
        **_times(rows, tracks.moved_ns),
    }
    return events.objects(fields, len(rows))


def _flows(trace: Trace, launches: Launches, tracks: _Tracks) -> Iterator[pa.Array]:
    """Yield the arrows from calls to what they launched."""
    ops, calls = trace.ops[launches.is_known], trace.api_calls.iloc[launches.call[launches.is_known]]
    common = {
        "cat": events.one("launch"),
        "name": events.one("launch"),
        "id": events.numbers(np.arange(1, len(ops) + 1)),
    }
    ends: tuple[tuple[str, dict[str, events.Texts], Int64Array, Int64Array, pd.DataFrame], ...] = (
        ("s", {}, tracks.process(calls), tracks.thread(calls), calls),
        ("f", {"bp": events.one("e")}, ops["rank"].to_numpy(), tracks.stream(ops), ops),
    )
    for phase, extra, pid, tid, rows in ends:
        fields = {
            "ph": events.one(phase),
            **extra,
            **common,
            "pid": events.numbers(pid),
            "tid": events.numbers(tid),
            "ts": events.microseconds(rows["start_ns"].to_numpy() + tracks.moved_ns),
        }
        yield events.objects(fields, len(ops))
