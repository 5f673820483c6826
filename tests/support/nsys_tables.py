"""Tables of an Nsight Systems SQLite export (schema 3.25), and a fast way to fill them.

Source: the CREATE TABLE statements in exports of Nsight Systems 2025.5 and 2026.2.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

# Columns are written `name`, `name:TYPE` where the type is not INTEGER, and end with `!` where NOT NULL.
SCHEMA: Final[Mapping[str, str]] = {
    "StringIds": "id:INTEGER_PRIMARY_KEY! value:TEXT!",
    "CUPTI_ACTIVITY_KIND_KERNEL": """
        start! end! deviceId! contextId! greenContextId streamId! correlationId globalPid
        demangledName! shortName! mangledName launchType cacheConfig registersPerThread! gridX!
        gridY! gridZ! blockX! blockY! blockZ! staticSharedMemory! dynamicSharedMemory!
        localMemoryPerThread! localMemoryTotal! gridId! sharedMemoryExecuted graphNodeId
        sharedMemoryLimitConfig qmdBulkReleaseDone qmdPreexitDone qmdLastCtaDone graphId clusterX
        clusterY clusterZ clusterSchedulingPolicy maxPotentialClusterSize maxActiveClusters
        sharedMemoryRequestedPercentage tensorSizeMinusOneElements:TEXT!""",
    "CUPTI_ACTIVITY_KIND_MEMCPY": """
        start! end! deviceId! contextId! greenContextId streamId! correlationId globalPid bytes!
        copyKind! deprecatedSrcId srcKind dstKind srcDeviceId srcContextId dstDeviceId
        dstContextId migrationCause graphNodeId virtualAddress copyCount""",
    "CUPTI_ACTIVITY_KIND_RUNTIME": """
        start! end! eventClass! globalTid correlationId nameId! returnValue! callchainId""",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": """
        start! end! deviceId! contextId! greenContextId streamId! correlationId globalPid
        deprecatedSyncType syncType! eventId! eventSyncId""",
    "CUPTI_ACTIVITY_KIND_CUDA_EVENT": """
        timestamp deviceId! contextId! greenContextId streamId! correlationId globalPid eventId!
        eventSyncId""",
    "NVTX_EVENTS": """
        start! end eventType! rangeId category color text:TEXT globalTid endGlobalTid textId
        domainId uint64Value int64Value doubleValue:REAL uint32Value int32Value floatValue:REAL
        jsonTextId jsonText:TEXT binaryData:TEXT""",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs utcTime:TEXT localTime:TEXT systemClockNs",
    "TARGET_INFO_GPU": """
        vmId! id! name:TEXT busLocation:TEXT isDiscrete l2CacheSize totalMemory memoryBandwidth
        clockRate smCount pwGpuId uuid:TEXT luid chipName:TEXT cuDevice ctxswDevPath:TEXT
        ctrlDevPath:TEXT revision nodeMask constantMemory maxIPC maxRegistersPerBlock
        maxShmemPerBlock maxShmemPerBlockOptin maxShmemPerSm maxRegistersPerSm threadsPerWarp
        asyncEngines maxWarpsPerSm maxBlocksPerSm maxThreadsPerBlock maxBlockDimX maxBlockDimY
        maxBlockDimZ maxGridDimX maxGridDimY maxGridDimZ computeMajor computeMinor smMajor smMinor""",
    "TARGET_INFO_CUDA_DEVICE": "gpuId cudaId! pid!",
    "TARGET_INFO_CUDA_CONTEXT_INFO": """
        nullStreamId! hwId! vmId! processId! deviceId! contextId! parentContextId isGreenContext""",
    "TARGET_INFO_CUDA_STREAM": "streamId! hwId! vmId! processId! contextId! priority! flag!",
    "ENUM_CUDA_MEMCPY_OPER": "id:INTEGER_PRIMARY_KEY! name:TEXT label:TEXT",
    "META_DATA_CAPTURE": "name:TEXT! value:TEXT",
    "META_DATA_EXPORT": "name:TEXT! value:TEXT",
}

NONE: Final = 4_294_967_295
"""How Nsight Systems writes that a row has no stream or no event."""

CHUNK_ROWS: Final = 100_000
"""Rows that are held as Python objects at a time."""


def create_table(table: str) -> str:
    columns = []
    for word in SCHEMA[table].split():
        name, _, kind = word.rstrip("!").partition(":")
        kind = (kind or "INTEGER").replace("_", " ")
        columns.append(f'"{name}" {kind}{" NOT NULL" if word.endswith("!") else ""}')
    return f"CREATE TABLE {table} ({', '.join(columns)})"


def insert_rows(
    connection: sqlite3.Connection, table: str, constants: str, columns: Mapping[str, object]
) -> None:
    """Insert rows.

    Args:
        connection: An open database.
        table: The table.
        constants: Columns that are the same in all rows, as `name=literal` words. SQLite repeats them, so
            that Python need not bind them row by row.
        columns: Columns that vary: arrays, lists, or pairs (values, index of each row's value).
    """
    fixed = dict(word.split("=") for word in constants.split())
    names = ", ".join(f'"{name}"' for name in [*columns, *fixed])
    values = ", ".join(["?"] * len(columns) + list(fixed.values()))
    statement = f"INSERT INTO {table} ({names}) VALUES ({values})"
    for rows in _chunks(list(columns.values())):
        connection.executemany(statement, rows)


def _chunks(columns: Sequence[object]) -> Iterator[Iterator[tuple[object, ...]]]:
    first = columns[0]
    n_rows = len(first[1] if isinstance(first, tuple) else first)
    for low in range(0, n_rows, CHUNK_ROWS):
        part = slice(low, low + CHUNK_ROWS)
        yield zip(*(_plain(column, part) for column in columns), strict=True)


def _plain(column: object, part: slice) -> list[object]:
    if isinstance(column, tuple):
        values, index = column
        return np.asarray(values)[index[part]].tolist()
    return column[part].tolist() if isinstance(column, np.ndarray) else column[part]
