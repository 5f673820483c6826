"""A host program as a list of calls, what a plain simulation says of it, and the export that a profiler would write.

The simulation keeps, for every stream and every event, the set of ops that what comes next has to wait for: of those
that a record stands for, the last of each stream. It shares no code and no method with the analyzer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.support.tiny_export import CUDA_EVENT, NONE, SYNCHRONIZATION, TinyExport, global_pid

FIRST_STREAM = 7


class Call(NamedTuple):
    """One host call: what, in which stream, with which event."""

    what: str
    stream: int
    event: int = 0


@dataclass
class Program:
    """Calls of one process; op i starts at 1000 * i in launch order, so streams are in order."""

    calls: list[Call]
    pid: int = 100
    is_named: bool = True
    edges: set[tuple[int, int]] = field(default_factory=set)
    n_paired: int = 0

    def simulate(self) -> Program:
        """Find the edges from ops to the ops that waits make depend on them, both by launch order."""
        last_op: dict[int, int] = {}
        behind: dict[int, set[int]] = {}
        pending: dict[int, set[int]] = {}
        records: dict[int, set[int]] = {}
        streams = [call.stream for call in self.calls if call.what == "launch"]
        n_ops = 0
        for call in self.calls:
            if call.what == "launch":
                self.edges |= {(producer, n_ops) for producer in pending.pop(call.stream, set())}
                last_op[call.stream], behind[call.stream] = n_ops, set()
                n_ops += 1
            elif call.what == "record":
                own = {last_op[call.stream]} if call.stream in last_op else set()
                ops = own | behind.get(call.stream, set())
                records[call.event] = set({streams[op]: op for op in sorted(ops)}.values())
            elif call.event in records:
                self.n_paired += 1
                pending.setdefault(call.stream, set()).update(records[call.event])
                behind.setdefault(call.stream, set()).update(records[call.event])
        return self

    def write(self, export: TinyExport) -> TinyExport:
        """Add what a profiler would record; correlation ids and event ids begin anew in every process."""
        named: dict[int, int] = {}
        n_ops = 0
        for number, call in enumerate(self.calls, start=1):
            host = 10 * number
            where = {"contextId": 1, "streamId": call.stream, "globalPid": global_pid(self.pid)}
            if call.what == "launch":
                times = (1000 * n_ops, 1000 * n_ops + 500)
                export.kernel(f"k{n_ops}", *times, stream=call.stream, pid=self.pid, correlation=number)
                n_ops += 1
            elif call.what == "record":
                named[call.event] = number
                sync_id = number if self.is_named else None
                export.add(CUDA_EVENT, **where, eventId=call.event, eventSyncId=sync_id, correlationId=number)
            else:
                sync_id = named.get(call.event, NONE) if self.is_named else None
                columns = {"eventId": call.event, "eventSyncId": sync_id, "correlationId": number}
                export.add(SYNCHRONIZATION, start=host, end=host + 1, **where, **columns, syncType=0)
            name = {"launch": "cudaLaunchKernel_v7000", "record": "cudaEventRecord_v3020"}.get(
                call.what, "cudaStreamWaitEvent_v3020"
            )
            export.call(name, host, host + 1, pid=self.pid, correlation=number)
        return export


def write_programs(programs: list[Program], path: Path) -> Path:
    """Write the export of several processes."""
    export = TinyExport()
    for program in programs:
        program.write(export)
    return export.write(path)
