"""A run of several ranks by a plain simulation of streams, events and hosts, and the export that a profiler writes.

    hosts = [Host(rank) for rank in range(2)]
    with hosts[0].scope("step"), hosts[0].scope("forward layer=0"):
        hosts[0].launch("flash_fwd_kernel", 500_000, label="attention pass=forward layer=0 hop=0")
    write(hosts, path)

An op starts when the op before it in its stream, the events that its stream waits for and its launch are done. One that
meets the ops of the same text on other ranks ends a time after the last of them has started. Whatever a fault costs is
what the simulation says of the run without it. It shares no code and no method with the analyzer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.support.tiny_export import CUDA_EVENT, NONE, SYNCHRONIZATION, TinyExport, global_pid

CALL_NS = 1_000
_RANGE_NS = 10
_FIRST_PID = 100


@dataclass
class Call:
    """One line of a host's program."""

    what: str
    stream: int = NONE
    event: int = NONE
    ns: int = 0
    name: str = ""
    meet: str = ""
    peers: tuple[int, ...] = ()
    held_ns: int = 0


@dataclass
class Run:
    """When everything of one host happened, filled in by a pass over its program."""

    now: int = 0
    ops: list[tuple[int, int]] = field(default_factory=list)
    calls: list[tuple[int, int]] = field(default_factory=list)
    ranges: list[tuple[str, int, int]] = field(default_factory=list)
    meetings: dict[tuple[str, int], int] = field(default_factory=dict)
    open_ranges: list[tuple[str, int]] = field(default_factory=list)
    free: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """When all that is in a stream, its waits included, is done."""
    events: dict[int, int] = field(default_factory=dict)
    turns: dict[str, int] = field(default_factory=lambda: defaultdict(int))


class Host:
    """The program of one rank, which is one process with one thread."""

    def __init__(self, rank: int) -> None:
        self.rank, self.program = rank, list[Call]()

    @contextmanager
    def scope(self, text: str) -> Iterator[None]:
        """Put what is called inside into a range of the domain `cptrace`; without a text, into none."""
        self.program.append(Call("push", name=text))
        yield
        self.program.append(Call("pop"))

    def launch(self, name: str, ns: int, stream: int = 7, *, label: str = "", held_ns: int = 0) -> None:
        """Launch a kernel; it may start a time after it could, for no reason that a trace shows."""
        with self.scope(label):
            self.program.append(Call("launch", stream, ns=ns, name=name, held_ns=held_ns))

    def transfer(self, name: str, ns: int, stream: int, *, label: str, peers: tuple[int, ...]) -> None:
        """Launch a transfer with other ranks, which have one of the same label."""
        with self.scope(f"{label} peers={','.join(map(str, peers))}"):
            self.program.append(Call("launch", stream, ns=ns, name=name, meet=label, peers=peers))

    def record(self, event: int, stream: int) -> None:
        """Record an event behind what is in a stream."""
        self.program.append(Call("record", stream, event))

    def wait(self, event: int, stream: int) -> None:
        """Make a stream wait for an event."""
        self.program.append(Call("wait", stream, event))

    def sync(self, *, stream: int = NONE, event: int = NONE) -> None:
        """Block until an event, a stream, or without either the device is done."""
        self.program.append(Call("sync", stream, event))

    def poll(self, event: int) -> None:
        """Ask for an event without waiting."""
        self.program.append(Call("poll", event=event))

    def pause(self, ns: int) -> None:
        """Do something else."""
        self.program.append(Call("pause", ns=ns))


def simulate(hosts: Sequence[Host]) -> list[Run]:
    """Return when everything happens: the programs are gone through until no meeting moves any more."""
    starts: dict[tuple[int, str, int], int] = {}
    while True:
        runs = [_go_through(host, starts) for host in hosts]
        found = {
            (host.rank, *key): start
            for host, run in zip(hosts, runs, strict=True)
            for key, start in run.meetings.items()
        }
        if found == starts:
            return runs
        starts = found


def _go_through(host: Host, starts: dict[tuple[int, str, int], int]) -> Run:
    run = Run()
    for call in host.program:
        begin = run.now
        run.now += {"push": _RANGE_NS, "pop": _RANGE_NS, "pause": call.ns}.get(call.what, CALL_NS)
        if call.what in ("push", "pop"):
            _mark(run, call, begin)
        elif call.what == "launch":
            _launch(run, call, starts)
        else:
            _order(run, call)
        run.calls.append((begin, run.now))
    return run


def _mark(run: Run, call: Call, begin: int) -> None:
    if call.what == "push":
        run.open_ranges.append((call.name, begin))
        return
    text, opened = run.open_ranges.pop()
    if text:
        run.ranges.append((text, opened, run.now))


def _launch(run: Run, call: Call, starts: dict[tuple[int, str, int], int]) -> None:
    begin = max(run.free[call.stream], run.now) + call.held_ns
    arrived = begin
    if call.peers:
        key = (call.meet, run.turns[call.meet])
        run.turns[call.meet] += 1
        run.meetings[key] = begin
        arrived = max(begin, *(starts.get((peer, *key), 0) for peer in call.peers))
    run.free[call.stream] = arrived + call.ns
    run.ops.append((begin, arrived + call.ns))


def _order(run: Run, call: Call) -> None:
    if call.what == "record":
        run.events[call.event] = run.free[call.stream]
    elif call.what == "wait":
        run.free[call.stream] = max(run.free[call.stream], run.events[call.event])
    elif call.what == "sync":
        done = run.events[call.event] if call.event != NONE else run.free[call.stream]
        if call.event == call.stream == NONE:
            done = max(run.free.values())
        run.now = max(run.now, done + CALL_NS)


def step_ns(hosts: Sequence[Host]) -> int:
    """Return the time of the longest rank from the start of its first op to the end of its last: one step."""
    return max(max(end for _, end in run.ops) - min(start for start, _ in run.ops) for run in simulate(hosts))


_API = {
    "launch": "cudaLaunchKernel_v7000",
    "record": "cudaEventRecord_v3020",
    "wait": "cudaStreamWaitEvent_v3020",
    "poll": "cudaEventQuery_v3020",
}


def write(
    hosts: Sequence[Host], path: Path, *, has_records: bool = True, has_ranges: bool = True, **run: object
) -> Path:
    """Write the export of a run and return its path.

    Args:
        hosts: Programs of the ranks.
        path: File to write.
        has_records: Whether the profiler saw the recording of events.
        has_ranges: Whether it saw ranges other than the step's.
        **run: What the run says of itself; nothing for a run that is not one of ours.
    """
    pids = [_FIRST_PID + host.rank for host in hosts]
    export = _export(hosts, simulate(hosts), pids, has_records, has_ranges)
    if run:
        ranks = [
            {"rank": host.rank, "pid": pid, "device": host.rank}
            for host, pid in zip(hosts, pids, strict=True)
        ]
        export.run(ranks=ranks, **run)
    return export.write(path)


@dataclass(frozen=True)
class Clock:
    """The clock of one file of a job.

    Attributes:
        ahead_ns: By how much its times are later than those of the simulation.
        wall_error_ns: By how much its wall clock is ahead; None where the file does not say when recording began.
    """

    ahead_ns: int = 0
    wall_error_ns: int | None = 0


_EPOCH_NS = 1_790_000_000_000_000_000


def write_each(hosts: Sequence[Host], folder: Path, clocks: Sequence[Clock], **run: object) -> list[Path]:
    """Write the export of each rank of a run by itself, and return their paths; process ids are the same in all.

    Args:
        hosts: Programs of the ranks.
        folder: Folder for the files.
        clocks: Clock of each file.
        **run: What the run says of itself; nothing for a run that is not one of ours.
    """
    paths = []
    for host, times, clock in zip(hosts, simulate(hosts), clocks, strict=True):
        export = _export([host], [_later(times, clock.ahead_ns)], [_FIRST_PID])
        if clock.wall_error_ns is not None:
            began = _EPOCH_NS - clock.ahead_ns + clock.wall_error_ns
            export.add("TARGET_INFO_SESSION_START_TIME", utcEpochNs=began)
        if run:
            export.run(ranks=[{"rank": host.rank, "pid": _FIRST_PID, "device": host.rank}], **run)
        paths.append(export.write(folder / f"rank{host.rank}.sqlite"))
    return paths


def _later(times: Run, ns: int) -> Run:
    return replace(
        times,
        ops=[(start + ns, end + ns) for start, end in times.ops],
        calls=[(start + ns, end + ns) for start, end in times.calls],
        ranges=[(text, start + ns, end + ns) for text, start, end in times.ranges],
    )


def _export(
    hosts: Sequence[Host],
    runs: Sequence[Run],
    pids: Sequence[int],
    has_records: bool = True,
    has_ranges: bool = True,
) -> TinyExport:
    export = TinyExport()
    for host, times, pid in zip(hosts, runs, pids, strict=True):
        export.domain(1, "cptrace", pid=pid)
        for text, start, end in times.ranges:
            if has_ranges or text.startswith("step"):
                export.range(text, start, end, pid=pid, domain=1)
        _write_calls(export, host, times, pid, has_records)
    return export


def _write_calls(export: TinyExport, host: Host, times: Run, pid: int, has_records: bool) -> None:
    ops, named = iter(times.ops), dict[int, int]()
    for number, (call, (start, end)) in enumerate(zip(host.program, times.calls, strict=True), start=1):
        name = _API.get(call.what, "")
        where = {
            "contextId": 1,
            "streamId": call.stream,
            "globalPid": global_pid(pid),
            "correlationId": number,
        }
        if call.what == "launch":
            where_on = {"stream": call.stream, "pid": pid, "device": host.rank, "correlation": number}
            export.kernel(call.name, *next(ops), **where_on)
        elif call.what == "record":
            named[call.event] = number
            if has_records:
                export.add(CUDA_EVENT, **where, eventId=call.event, eventSyncId=number)
        elif call.what in ("wait", "sync", "poll"):
            sync_id = named.get(call.event, NONE)
            export.add(
                SYNCHRONIZATION, start=start, end=end, **where, eventId=call.event, eventSyncId=sync_id, syncType=0
            )  # fmt: skip
            name = name or _sync_name(call)
        if name:
            export.call(name, start, end, pid=pid, correlation=number)


def _sync_name(call: Call) -> str:
    if call.event != NONE:
        return "cudaEventSynchronize_v3020"
    return "cudaDeviceSynchronize_v3020" if call.stream == NONE else "cudaStreamSynchronize_v3020"
