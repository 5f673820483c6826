"""Makes up runs of two ranks: host programs, and what a device with a mind of its own made of them.

Start times carry noise, sometimes before what they had to wait for; so do the ends of blocking calls. The ranks have
the same program and other noise, so their communication ops meet, mostly.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from hypothesis import strategies as st

from tests.support.tiny_export import CUDA_EVENT, NONE, SYNCHRONIZATION, TinyExport, global_pid

KERNELS = {
    "compute": "gemm",
    "attention": "flash_fwd_kernel",
    "comm": "ncclDevKernel_SendRecv()",
    "unlaunched": "gemm",
}
CALLS = ("record", "wait", "sync-event", "sync-stream", "sync-device")
FIRST_STREAM = 7


class Call(NamedTuple):
    """One host call: what it does, and where; a duration and a pause before it, in units of time."""

    what: str
    stream: int
    event: int
    thread: int
    duration: int
    pause: int


calls = st.builds(
    Call,
    st.sampled_from((*KERNELS, "compute", "attention", "comm", *CALLS)),
    st.integers(FIRST_STREAM, FIRST_STREAM + 2),
    st.integers(1, 2),
    st.sampled_from((0, 0, 0, 1)),
    st.integers(1, 20),
    st.integers(0, 12),
)


@dataclass
class RankRun:
    """The run of one rank, written into an export while it is made up."""

    export: TinyExport
    rank: int
    unit_ns: int
    noise: random.Random
    now: int = 0
    n_calls: int = 0
    tail: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    behind: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    records: dict[int, int] = field(default_factory=dict)

    def run(self, program: list[Call]) -> None:
        """Go through a program."""
        for call in program:
            self.now += call.pause
            if call.what in KERNELS:
                self._launch(call)
            elif call.what == "record":
                self.records[call.event] = max(self.tail[call.stream], self.behind[call.stream])
                correlation = self._host(call, "cudaEventRecord_v3020", 1)
                self.export.add(
                    CUDA_EVENT, **self._where(call.stream), eventId=call.event, correlationId=correlation
                )
            else:
                self._sync(call)

    def _launch(self, call: Call) -> None:
        correlation = None if call.what == "unlaunched" else self._host(call, "cudaLaunchKernel_v7000", 2)
        ready = max(self.tail[call.stream], self.behind[call.stream], self.now)
        # A stream never starts an op before the one ahead.
        start = max(ready + self.noise.choice((-1, 0, 0, 0, 1, 5)), self.tail[call.stream] - 1, 0)
        duration = call.duration * self.noise.choice((1, 1, 2)) + (15 if call.what == "comm" else 0)
        self.tail[call.stream], self.behind[call.stream] = start + duration, 0
        self.export.kernel(
            KERNELS[call.what],
            start * self.unit_ns,
            (start + duration) * self.unit_ns,
            pid=100 + self.rank,
            device=self.rank,
            stream=call.stream,
            correlation=correlation,
        )

    def _sync(self, call: Call) -> None:
        target = {
            "wait": self.records.get(call.event, 0),
            "sync-event": self.records.get(call.event, 0),
            "sync-stream": self.tail[call.stream],
            "sync-device": max(self.tail.values(), default=0),
        }[call.what]
        begin, until = self.now, 0
        if call.what == "wait":
            self.behind[call.stream] = max(self.behind[call.stream], target)
        else:
            until = target + self.noise.choice((-1, 0, 0, 1)) - self.now
        name = "cudaStreamWaitEvent_v3020" if call.what == "wait" else "cudaDeviceSynchronize_v3020"
        correlation = self._host(call, name, max(1, until))
        has_event, has_stream = call.what in ("wait", "sync-event"), call.what in ("wait", "sync-stream")
        columns = {
            **self._where(call.stream if has_stream else NONE),
            "eventId": call.event if has_event else NONE,
            "correlationId": correlation,
            "syncType": {"wait": 2, "sync-event": 1, "sync-stream": 3, "sync-device": 4}[call.what],
        }
        self.export.add(SYNCHRONIZATION, start=begin * self.unit_ns, end=self.now * self.unit_ns, **columns)

    def _where(self, stream: int) -> dict[str, int]:
        return {"contextId": 1, "streamId": stream, "globalPid": global_pid(100 + self.rank)}

    def _host(self, call: Call, name: str, duration: int) -> int:
        self.n_calls += 1
        begin, self.now = self.now, self.now + duration
        times = (begin * self.unit_ns, self.now * self.unit_ns)
        thread = None if call.thread == 0 else 7
        self.export.call(name, *times, pid=100 + self.rank, thread=thread, correlation=self.n_calls)
        return self.n_calls


def write_run(program: list[Call], unit_ns: int, seed: int, path: Path) -> Path:
    """Write the export of two ranks that run one program.

    Args:
        program: What the host calls.
        unit_ns: Length of a unit of time.
        seed: Of the noise.
        path: File to write.
    """
    export = TinyExport()
    for rank in range(2):
        RankRun(export, rank, unit_ns, random.Random(seed + rank)).run(program)
    return export.write(path)
