"""Device work of a PyTorch profiler trace: kernels, copies and memsets, and whose ranks they are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd

from cptrace import schema
from cptrace.intervals import BoolArray, Int64Array
from cptrace.launches import Key, lookup
from cptrace.process_groups import group_text
from cptrace.sources.columns import category, nullable
from cptrace.sources.kineto_file import FileInfo
from cptrace.sources.kineto_raw import RawEvents
from cptrace.trace import Note
from cptrace.units import joined

KERNEL: Final = "kernel"
_OP_KINDS: Final = {
    "kernel": KERNEL,
    "gpu_memcpy": "memcpy",
    "memcpy": "memcpy",
    "gpu_memset": "memset",
    "memset": "memset",
    "gpu_graph": "graph",  # only our own export has it: Kineto shows no graph as a whole
}
_PEER: Final = "memcpy PtoP"
_COPY: Final = re.compile(r"(?i)(memcpy)(?: (\w+)to(\w+))?|(memset)")

# Sizes in bytes of what c10d calls its element types.
_ELEMENT_BYTES: Final = {
    1: "Byte Char Bool QInt8 QUInt8 Float8_e5m2 Float8_e4m3fn Float8_e5m2fnuz Float8_e4m3fnuz Float8_e8m0fnu",
    2: "Short Half BFloat16 UInt16",
    4: "Int Float UInt32 ComplexHalf QInt32",
    8: "Long Double UInt64 ComplexFloat",
    16: "ComplexDouble",
}
_BYTES_OF: Final = {name.lower(): size for size, names in _ELEMENT_BYTES.items() for name in names.split()}
_MAX_ELEMENTS: Final = 2**58
_END_OF_IDS: Final = 2**32
_MAX_NAMED: Final = 4
_MAX_SHOWN: Final = 40


def make_ops(
    raw: RawEvents, calls: RawEvents, main_pid: int, info: FileInfo, notes: list[Note]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the tables of device work and of ranks.

    Args:
        raw: Device work with possible times.
        calls: Host calls; they tell processes apart where the file is of several.
        main_pid: Process of most host events.
        info: What the file says about itself.
        notes: Where to say which ranks are made up.
    """
    if not raw.n_rows:
        return schema.empty_frame(schema.OPS), schema.empty_frame(schema.RANKS)
    codes, categories = raw.coded("category")
    device = _small(raw.first_of("device", "in_device", "pid"))
    said = {ordinal: pid for pid, ordinal in info.recorded_ranks}
    process = _told_processes(device, said) if said else _processes(raw, device, calls, main_pid)
    rank, ranks = _assign_ranks(process, device, info, notes)
    names, is_peer = _names(raw)
    columns: dict[str, Any] = {
        "start_ns": raw.ints("start_ns"),
        "end_ns": raw.ints("end_ns"),
        "rank": rank,
        "process": process,
        "device": device,
        "context": _small(raw.ints("context")),  # AMD has none: 0 for all
        "stream": _small(raw.first_of("stream", "tid")),
        "correlation_id": raw.optional("correlation"),
        "kind": category(codes, [_OP_KINDS[name] for name in categories]),
        "name": names,
        "bytes": _bytes(raw),
        "is_peer_copy": is_peer,
        "group": _groups(raw),
    }
    return schema.make_frame(schema.OPS, columns), ranks


def owners(works: pd.DataFrame, device: Int64Array, main_pid: int) -> Int64Array:
    """Return the process that each device belongs to, that of most host events for a device without work.

    Args:
        works: Device work, as `schema.OPS`.
        device: Devices, int64 of shape (N,).
        main_pid: Process of most host events.
    """
    pairs = works[["device", "process"]].drop_duplicates("device")
    known = dict(zip(pairs["device"].tolist(), pairs["process"].tolist(), strict=True))
    slot, devices = pd.factorize(device)
    return np.array([known.get(ordinal, main_pid) for ordinal in devices.tolist()], np.int64)[slot]


def _small(ids: Int64Array) -> Int64Array:
    """Return ids of 32 bits as they are; where some are addresses, as other makers' are, numbers in their place."""
    if not len(ids) or 0 <= ids.min() <= ids.max() < _END_OF_IDS:
        return ids
    return pd.factorize(ids, sort=True)[0].astype(np.int64)


def _names(raw: RawEvents) -> tuple[pd.Categorical, BoolArray]:
    """Return the names of ops, copies by their direction as in other sources, and which copy to another device."""
    kinds, categories = raw.coded("category")
    is_kernel = np.array([_OP_KINDS[name] == KERNEL for name in categories], bool)[kinds]
    codes, texts = raw.coded("name")
    directions = [_direction(text) for text in texts]
    unnamed = 2 * len(texts) + 1 - is_kernel  # a name for kernels without one, and one for copies
    slot = np.where(codes < 0, unnamed, codes + np.where(is_kernel, 0, len(texts)))
    names = category(slot, [*texts, *directions, "(unnamed kernel)", "(unnamed copy)"])
    is_peer = np.array([direction == _PEER for direction in (*directions, "")], bool)[codes] & ~is_kernel
    is_known = raw.is_there("from_device") & raw.is_there("to_device")
    return names, is_peer | (is_known & (raw.ints("from_device") != raw.ints("to_device")) & ~is_kernel)


def _direction(text: str) -> str:
    """Return `memcpy HtoD` for `Memcpy HtoD (Pageable -> Device)`, `memset` for `Memset (Device)`."""
    match = _COPY.match(text)
    if match is None:
        return text
    if match[4]:
        return "memset"
    return f"memcpy {match[2]}to{match[3]}" if match[2] else "memcpy"


def _bytes(raw: RawEvents) -> pd.arrays.IntegerArray:
    """Return what a copy or memset moves, and what a rank hands to a collective."""
    codes, texts = raw.coded("dtype")
    size = np.array([*(_BYTES_OF.get(text.lower(), 0) for text in texts), 0], np.int64)[codes]
    n_elements = raw.ints("n_elements")
    is_message = raw.is_there("n_elements") & (size > 0) & (n_elements >= 0) & (n_elements <= _MAX_ELEMENTS)
    message = np.where(is_message, n_elements, 0) * size
    is_copied = raw.is_there("bytes") & (raw.ints("bytes") >= 0)
    return nullable(np.where(is_copied, raw.ints("bytes"), message), ~(is_copied | is_message))


def _groups(raw: RawEvents) -> pd.Categorical:
    """Return the process group of each collective: its name, size and ranks, as far as the file tells them."""
    codes, names = raw.coded("group_name")
    of_ranks, ranks = raw.coded("group_ranks")
    size = np.where(raw.is_there("group_size"), raw.ints("group_size"), 0)
    told = np.flatnonzero((codes >= 0) | (of_ranks >= 0))
    keys = pd.MultiIndex.from_arrays([codes[told], of_ranks[told], size[told]])
    slot, groups = pd.factorize(keys)
    texts = [
        group_text(names[name] if name >= 0 else "", n_ranks, ranks[number] if number >= 0 else "")
        for name, number, n_ranks in groups.tolist()
    ]
    found = np.full(raw.n_rows, -1, np.int64)
    found[told] = slot
    return category(found, texts)


def _told_processes(device: Int64Array, owner: Mapping[int, int]) -> Int64Array:
    """Return the process of each op as the file says it, 0 for devices that it does not name."""
    slot, ordinals = pd.factorize(device)
    return np.array([owner.get(ordinal, 0) for ordinal in ordinals.tolist()], np.int64)[slot]


def _processes(raw: RawEvents, device: Int64Array, calls: RawEvents, main_pid: int) -> Int64Array:
    """Return the host process of each op. The events of a device do not name it: a trace is usually of one process.

    Where traces of several were merged into one file, a device belongs to the process that launched most of its work.
    """
    process = np.full(raw.n_rows, main_pid, np.int64)
    pids = np.unique(calls.ints("pid")[calls.is_there("pid")])
    if len(pids) < 2:
        return process
    n_launched = np.stack([_is_launched_by(pid, raw, calls) for pid in pids.tolist()])
    for ordinal in np.unique(device).tolist():
        mine = device == ordinal
        process[mine] = pids[np.argmax(n_launched[:, mine].sum(axis=1))]
    return process


def _is_launched_by(pid: int, raw: RawEvents, calls: RawEvents) -> BoolArray:
    """Return which ops a call of the process may have launched: one of the same correlation id, and not later."""
    is_mine = calls.is_there("pid") & (calls.ints("pid") == pid) & calls.is_there("correlation")
    keys = Key(np.zeros(calls.n_rows, np.int64), calls.ints("correlation"), is_mine)
    wanted = Key(np.zeros(raw.n_rows, np.int64), raw.ints("correlation"), raw.is_there("correlation"))
    call, is_known = lookup(keys, wanted)
    return is_known & (calls.ints("start_ns")[call] <= raw.ints("start_ns"))


def _note_of_counted(counted: Sequence[tuple[int, int, int]], info: FileInfo, n_processes: int) -> Note:
    """Return which ranks the file does not tell, why, and by which order they got their numbers.

    Args:
        counted: Process, device and number of each rank that was counted, by device.
        info: What the file says about itself.
        n_processes: Number of processes that did device work.
    """
    if info.rank is not None and n_processes > 1:
        why = f"the file tells one rank, {info.rank}, but is of {n_processes} processes"
    elif info.rank is not None:
        why = f"the file tells rank {info.rank}, which its busiest device got, but has work of other devices"
    elif info.impossible_rank is not None:
        shown = info.impossible_rank[:_MAX_SHOWN]
        why = f"the file tells an impossible rank (distributedInfo.rank is {shown})"
    else:
        why = "the file does not tell its rank (it has no distributedInfo.rank)"
    names = [
        f"device {device}" + (f" of process {process}" if n_processes > 1 else "") + f" is rank {number}"
        for process, device, number in counted[:_MAX_NAMED]
    ]
    more = [f"{len(counted) - len(names)} more"] if len(names) < len(counted) else []
    behind = "behind the ranks of the job" if info.rank is not None and n_processes == 1 else "from 0"
    return Note(
        "counted-ranks",
        f"{why}: counted by device {behind}, {joined([*names, *more])}; of several files, behind the ranks of those"
        " that are named before it",
    )


def _assign_ranks(
    process: Int64Array, device: Int64Array, info: FileInfo, notes: list[Note]
) -> tuple[Int64Array, pd.DataFrame]:
    """Return the rank of each op and the table of ranks.

    The recorded rank is that of the process; of its devices the one with the most ops has it. Others, which a process
    may touch by accident, are counted on behind the ranks of the job.
    """
    (device_slot, devices), (process_slot, processes) = (
        pd.factorize(x, sort=True) for x in (device, process)
    )
    slot, pairs = pd.factorize(device_slot * len(processes) + process_slot, sort=True)
    is_recorded = np.zeros(len(pairs), bool)
    rank = np.arange(len(pairs))
    if info.rank is not None and len(processes) == 1:
        is_recorded[np.argmax(np.bincount(slot))] = True
        first = max(info.world_size, info.rank + 1)
        rank = np.where(is_recorded, info.rank, first + np.cumsum(~is_recorded) - 1)
    place = [processes[pairs % len(processes)].tolist(), devices[pairs // len(processes)].tolist()]
    known = [info.recorded_ranks.get(pair) for pair in zip(*place, strict=True)]
    if (said := [entry for entry in known if entry is not None]) and len({r for r, _ in said}) == len(pairs):
        rank = np.array([r for r, _ in said])
        is_recorded = np.array([is_so for _, is_so in said], bool)
    elif not is_recorded.all():
        counted = [(*pair, number) for *pair, number in zip(*place, rank.tolist(), strict=True)]
        counted = [row for row, is_so in zip(counted, is_recorded.tolist(), strict=True) if not is_so]
        notes.append(_note_of_counted(counted, info, len(processes)))
    names = [info.device_names.get(ordinal, "") for ordinal in devices[pairs // len(processes)].tolist()]
    columns: dict[str, Any] = {
        "rank": rank.astype(np.int32),
        "process": processes[pairs % len(processes)],
        "pid": processes[pairs % len(processes)],
        "device": devices[pairs // len(processes)],
        "device_name": category(np.array([i if name else -1 for i, name in enumerate(names)]), names),
        "is_recorded": is_recorded,
    }
    return columns["rank"][slot], schema.make_frame(schema.RANKS, columns)
