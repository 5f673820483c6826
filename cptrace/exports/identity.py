"""Which process, thread and device a trace's rows belong to, in the numbers that people know them by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from cptrace.intervals import Int64Array
from cptrace.trace import Trace

# Exporters put a thread's own number into the lower bits of its global id: 24 of them, or 32.
_THREAD_MASKS: Final = ((1 << 24) - 1, (1 << 32) - 1)


@dataclass(frozen=True, slots=True)
class Identity:
    """Numbers of one trace's processes, threads and devices; each stands for one only.

    Attributes:
        pids: Process id of each process of the trace.
        devices: Device ordinal of each rank; the rank itself where two ranks have the same ordinal.
        contexts: Device ordinal of each (process, context).
        process_devices: Device ordinal of each process, that of its lowest rank.
        thread_mask: Bits of a thread's id that tell it from the others of its process.
    """

    pids: dict[int, int]
    devices: dict[int, int]
    contexts: dict[tuple[int, int], int]
    process_devices: dict[int, int]
    thread_mask: int

    @classmethod
    def of(cls, trace: Trace) -> Identity:
        """Return the numbers of a trace.

        Args:
            trace: Any trace.
        """
        ranks, processes, ordinals, pids = (
            trace.ranks[name].tolist() for name in ("rank", "process", "device", "pid")
        )
        if len(set(ordinals)) < len(ordinals):
            ordinals = ranks
        devices = dict(zip(ranks, ordinals, strict=True))
        places = trace.ops[["process", "context", "rank"]].drop_duplicates(["process", "context"])
        contexts = {
            (process, context): devices[rank]
            for process, context, rank in zip(*(places[name].tolist() for name in places), strict=True)
        }
        by_process = dict(zip(reversed(processes), reversed(ordinals), strict=True))
        return cls(_pids(trace, processes, pids), devices, contexts, by_process, _thread_mask(trace))

    def pid(self, process: pd.Series) -> Int64Array:
        """Return process ids.

        Args:
            process: Processes of the trace, of shape (N,).
        """
        return _translate(process, self.pids, {})

    def device(self, rank: pd.Series) -> Int64Array:
        """Return device ordinals.

        Args:
            rank: Ranks, of shape (N,).
        """
        return _translate(rank, self.devices, {})

    def device_of_context(self, rows: pd.DataFrame) -> Int64Array:
        """Return the device of each row's context; without work in it, that of its process.

        Args:
            rows: Rows with process and context.
        """
        keys = list(zip(rows["process"].tolist(), rows["context"].tolist(), strict=True))
        devices = {key: self.contexts.get(key, self.process_devices.get(key[0], 0)) for key in set(keys)}
        return np.array([devices[key] for key in keys], np.int64)

    def tid(self, thread: pd.Series) -> Int64Array:
        """Return thread ids.

        Args:
            thread: Threads of the trace, of shape (N,).
        """
        return np.asarray(thread.to_numpy() & self.thread_mask, np.int64)


def _translate(values: pd.Series, known: dict[int, int], fallback: dict[int, int]) -> Int64Array:
    slot, distinct = pd.factorize(values.to_numpy())
    return np.array([known.get(v, fallback.get(v, v)) for v in distinct.tolist()], np.int64)[slot]


def _pids(trace: Trace, processes: list[int], pids: list[int]) -> dict[int, int]:
    known = dict(zip(processes, pids, strict=True))
    everyone = {
        *known,
        *trace.api_calls["process"].unique().tolist(),
        *trace.ranges["process"].unique().tolist(),
    }
    numbers = {process: known.get(process, process) for process in everyone}
    return (
        numbers if len(set(numbers.values())) == len(numbers) else {process: process for process in everyone}
    )


def _thread_mask(trace: Trace) -> int:
    threads = pd.concat([trace.api_calls[["process", "thread"]], trace.ranges[["process", "thread"]]])
    threads = threads.drop_duplicates()
    for mask in _THREAD_MASKS:
        if not pd.DataFrame({"p": threads["process"], "t": threads["thread"] & mask}).duplicated().any():
            return mask
    return -1


def shift_ns(trace: Trace) -> int:
    """Return what to add to all times of a trace: nothing, unless some are negative, which the formats cannot have.

    Args:
        trace: Any trace.
    """
    tables = (trace.ops, trace.api_calls, trace.syncs, trace.ranges)
    return -min(0, *(int(table["start_ns"].min()) for table in tables if not table.empty), 0)
