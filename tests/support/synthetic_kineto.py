"""Writes PyTorch profiler traces: a few events by hand for tests, or many that look like training for benchmarks.

    python -m tests.support.synthetic_kineto OUT --kernels 1000000

Large traces have the timeline of `synthetic_timeline`, of one process, and the layout that Kineto writes: a launch,
its flow and the kernel, each with the usual arguments. The same arguments give the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.support.synthetic_timeline import API_NAMES, KERNELS, Layout, Rows, simulate

PID: Final = 4242
PRETTY, COMPACT, PYTHON = "pretty", "compact", "python"
STYLES: Final = (PRETTY, COMPACT, PYTHON)
"""Layouts of the same events: Kineto's own, without blanks, and as Python's `json` writes them again."""


class Number(str):
    """Text of a JSON number, written as it is."""

    __slots__ = ()


def microseconds(time_ns: int) -> Number:
    """Return a time as Kineto writes it: microseconds with three decimals."""
    sign, rest = ("-", -time_ns) if time_ns < 0 else ("", time_ns)
    return Number(f"{sign}{rest // 1000}.{rest % 1000:03}")


def dump(value: Any, style: str = PYTHON) -> str:
    """Return JSON in one of the `STYLES`; a `Number` is written as it is."""
    if isinstance(value, Number):
        return str(value)
    comma, colon = (",", ":") if style == COMPACT else (", ", ": ")
    if isinstance(value, dict):
        pairs = [f"{json.dumps(key)}{colon}{dump(item, style)}" for key, item in value.items()]
        return f"{{\n    {comma.join(pairs)}\n  }}" if style == PRETTY else f"{{{comma.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{comma.join(dump(item, style) for item in value)}]"
    return json.dumps(value)


@dataclass(slots=True)
class TinyTrace:
    """A trace of a few events; times are in ns.

    Attributes:
        events: Events in the order of the file.
        top: Other keys of the top level.
    """

    events: list[dict[str, Any]] = field(default_factory=list)
    top: dict[str, Any] = field(default_factory=lambda: {"schemaVersion": 1})

    def event(self, **fields: Any) -> TinyTrace:
        """Add any event."""
        self.events.append(fields)
        return self

    def span(self, cat: str, name: str, start: int, end: int, pid: Any, tid: Any, **args: Any) -> TinyTrace:
        """Add a complete event."""
        ts, dur = microseconds(start), microseconds(end - start)
        return self.event(ph="X", cat=cat, name=name, pid=pid, tid=tid, ts=ts, dur=dur, args=args)

    def kernel(
        self, name: str, start: int, end: int, *, stream: int = 7, device: int = 0, **args: Any
    ) -> TinyTrace:
        """Add a kernel, and the launch of its correlation id where one is named by `launch=` and its time in ns."""
        launch = args.pop("launch", None)
        if launch is not None:
            args.setdefault("correlation", len(self.events) + 1)
            self.call("cudaLaunchKernel", launch, launch + 1, args["correlation"])
        where = {"device": device, "context": 1, "stream": stream}
        return self.span("kernel", name, start, end, device, stream, **where, **args)

    def copy(self, name: str, start: int, end: int, **args: Any) -> TinyTrace:
        """Add a copy or memset, by its name."""
        cat = "gpu_memset" if name.startswith("Memset") else "gpu_memcpy"
        where = {"device": 0, "context": 1, "stream": 7, **args}
        return self.span(cat, name, start, end, where["device"], where["stream"], **where)

    def call(
        self, name: str, start: int, end: int, correlation: Any, *, pid: Any = PID, tid: Any = PID
    ) -> TinyTrace:
        """Add a call of the CUDA runtime."""
        return self.span("cuda_runtime", name, start, end, pid, tid, cbid=211, correlation=correlation)

    def range(
        self, name: str, start: int, end: int, *, cat: str = "user_annotation", tid: int = PID
    ) -> TinyTrace:
        """Add a range of the host."""
        return self.span(cat, name, start, end, PID, tid)

    def sync(self, kind: str, start: int, end: int, **args: Any) -> TinyTrace:
        """Add a synchronisation."""
        args = {"cuda_sync_kind": kind, "stream": -1, "device": 0, "context": 1, **args}
        return self.span("cuda_sync", kind, start, end, 0, args["stream"], **args)

    def text(self, style: str = PRETTY, *, shuffle: int | None = None) -> str:
        """Return the trace as JSON, its events in order or shuffled by a seed."""
        events = list(self.events)
        if shuffle is not None:
            random.Random(shuffle).shuffle(events)
        return dump({**self.top, "traceEvents": events}, style)

    def write(self, path: Path, style: str = PRETTY, *, shuffle: int | None = None) -> Path:
        """Write the trace, packed where the path ends in .gz, and return the path."""
        raw = self.text(style, shuffle=shuffle).encode()
        path.write_bytes(gzip.compress(raw, mtime=0) if path.suffix == ".gz" else raw)
        return path


def write_synthetic(path: Path, n_kernels: int, **layout: int | bool) -> None:
    """Write a large trace of one process, packed where the path ends in .gz.

    Args:
        path: The file to write.
        n_kernels: Kernels in it; there are 1.05 API calls and 0.05 ranges for each, and a flow for each launch.
        **layout: Fields of `Layout`, but for the number of processes.
    """
    shape = Layout(n_processes=1, **layout)
    tables = simulate(n_kernels, n_kernels * 21 // 20, max(n_kernels // 20, shape.n_steps), shape)
    head = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "Synthetic GPU"}],
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 1},
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 1_790_000_000_000_000_000,
    }
    with gzip.open(path, "wt", compresslevel=1) if path.suffix == ".gz" else path.open("w") as file:
        file.write(dump(head, COMPACT)[:-1] + ',"traceEvents":[')
        for text in _texts(tables, shape):
            file.write(text)
        file.write(
            '{"ph":"i","s":"g","name":"Record Window End","pid":"","tid":"","ts":1.000}],"traceName":"synthetic"}'
        )


def _texts(tables: dict[str, Rows], shape: Layout) -> Iterator[str]:
    """Yield the events as text, each with a comma behind it."""
    texts = (
        *_call_texts(tables["call"]),
        *_kernel_texts(tables["kernel"], shape),
        *_copy_texts(tables["copy"], shape),
    )
    events = [*texts, *_range_texts(tables["range"])]
    order = (
        np.random.default_rng(shape.seed).permutation(len(events))
        if shape.is_shuffled
        else range(len(events))
    )
    yield from (events[place] for place in order)


def _columns(rows: Rows, *names: str) -> Iterator[tuple[int, ...]]:
    return zip(*(rows[name].tolist() for name in names), strict=True)


def _times(start: int, end: int) -> str:
    return f'"ts":{start // 1000}.{start % 1000:03},"dur":{(end - start) // 1000}.{(end - start) % 1000:03}'


def _call_texts(rows: Rows) -> Iterator[str]:
    names = [name.partition("_v")[0] for name in API_NAMES]
    for start, end, kind, number in _columns(rows, "start", "end", "kind", "correlation"):
        yield (
            f'{{"ph":"X","cat":"cuda_runtime","name":"{names[kind]}","pid":{PID},"tid":{PID},{_times(start, end)},'
            f'"args":{{"External id":{number},"cbid":211,"correlation":{number}}}}},\n'
        )


def _where(slot: int, number: int) -> str:
    return f'"device":0,"context":1,"stream":{7 + 4 * slot},"correlation":{number}'


def _kernel_texts(rows: Rows, shape: Layout) -> Iterator[str]:
    for start, end, slot, kernel, number in _columns(rows, "start", "end", "slot", "kernel", "correlation"):
        shown = KERNELS[kernel]
        yield (
            f'{{"ph":"X","cat":"kernel","name":"{shown.demangled}","pid":0,"tid":{7 + 4 * slot},{_times(start, end)},'
            f'"args":{{"External id":{number},"queued":0,{_where(slot, number)},"registers per thread":168,'
            f'"shared memory":0,"blocks per SM":4.740741,"warps per SM":75.851852,"grid":[{shown.grid},1,1],'
            f'"block":[{shown.block},1,1],"est. achieved occupancy %":75}}}},\n'
            f'{{"ph":"s","id":{number},"pid":{PID},"tid":{PID},"ts":1.000,"cat":"ac2g","name":"ac2g"}},\n'
        )


def _copy_texts(rows: Rows, shape: Layout) -> Iterator[str]:
    for start, end, slot, number in _columns(rows, "start", "end", "slot", "correlation"):
        yield (
            f'{{"ph":"X","cat":"gpu_memcpy","name":"Memcpy DtoD (Device -> Device)","pid":0,"tid":{7 + 4 * slot},'
            f'{_times(start, end)},"args":{{{_where(slot, number)},"bytes":8388608,"memory bandwidth (GB/s)":1.5}}}},\n'
        )


def _range_texts(rows: Rows) -> Iterator[str]:
    for start, end, step in _columns(rows, "start", "end", "step"):
        cat, name = ("user_annotation", f"ProfilerStep#{step}") if step >= 0 else ("cpu_op", "aten::linear")
        yield (
            f'{{"ph":"X","cat":"{cat}","name":"{name}","pid":{PID},"tid":{PID},{_times(start, end)},'
            f'"args":{{"External id":1,"Ev Idx":0}}}},\n'
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a large trace as the command line asks."""
    parser = argparse.ArgumentParser(description="Write a synthetic PyTorch profiler trace.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--kernels", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shuffled", action="store_true")
    given = parser.parse_args(arguments)
    write_synthetic(given.out, given.kernels, seed=given.seed, is_shuffled=given.shuffled)


if __name__ == "__main__":
    main()
