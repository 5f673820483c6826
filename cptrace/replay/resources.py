"""Order that no edge of the trace tells, but that its times show: ops that take turns at one resource."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from cptrace.classify import COMM, is_attention
from cptrace.intervals import BoolArray, Int64Array

DEVICE: Final = "device"
COMMUNICATOR: Final = "communicator"
RESOURCES: Final = (DEVICE, COMMUNICATOR)

# "Starts when the other ends", as exactly as one device's clock and its launch of the next kernel allow.
TURN_NS: Final = 2_000


class ResourceEdges(NamedTuple):
    """R inferred edges from an op to the op that used the same resource next.

    Attributes:
        producer: Row of the op that has to end first, int64 of shape (R,).
        consumer: Row of the op that waits, int64 of shape (R,).
        kind: Code into `RESOURCES`, of shape (R,).
    """

    producer: Int64Array
    consumer: Int64Array
    kind: npt.NDArray[np.int8]


def find_resource_edges(ops: pd.DataFrame, queue: Int64Array, residual_ns: Int64Array) -> ResourceEdges:
    """Return the edges that turns at the device's arithmetic units and at communicators make.

    One attention kernel fills a device: those of different streams that did not overlap keep their order. Transfers
    of one communicator run one by one: where one starts just when that of another stream ends, and nothing else
    explains when it starts, they take turns.

    Args:
        ops: Classified device work of N rows, ordered by start.
        queue: Number of each op's stream, int64 of shape (N,).
        residual_ns: Start of each op after all that it is known to have waited for, in ns, int64 of shape (N,).
    """
    attention = _attention_turns(ops, queue)
    transfers = _transfer_turns(ops, queue, residual_ns)
    kind = np.repeat(np.arange(len(RESOURCES), dtype=np.int8), (len(attention[0]), len(transfers[0])))
    producer, consumer = (np.concatenate(pair) for pair in zip(attention, transfers, strict=True))
    return ResourceEdges(producer, consumer, kind)


def _attention_turns(ops: pd.DataFrame, queue: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return neighbours among the attention kernels of a device, in different streams and one after the other."""
    rows = np.flatnonzero(is_attention(ops))
    rank = ops["rank"].to_numpy()
    rows = rows[np.argsort(rank[rows], kind="stable")]
    first, second = rows[:-1], rows[1:]
    is_free = ops["end_ns"].to_numpy()[first] <= ops["start_ns"].to_numpy()[second]
    takes_turn = (rank[first] == rank[second]) & (queue[first] != queue[second]) & is_free
    return first[takes_turn], second[takes_turn]


def _transfer_turns(
    ops: pd.DataFrame, queue: Int64Array, residual_ns: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Return pairs of transfers of a rank, where the second's start is explained by the first's end alone."""
    is_comm: BoolArray = (ops["role"] == COMM).to_numpy()
    late = np.flatnonzero(is_comm & (residual_ns > TURN_NS))
    rows = np.flatnonzero(is_comm)
    if not len(late):
        return late, late
    start, end, rank = (ops[name].to_numpy().astype(np.int64) for name in ("start_ns", "end_ns", "rank"))
    low = int(start.min())
    span = int(end.max()) - low + 1
    rows = rows[np.lexsort((end[rows], rank[rows]))]
    # One sorted key for rank and time: the last transfer of the rank that had ended.
    last = (
        np.searchsorted(
            rank[rows] * span + end[rows] - low, rank[late] * span + start[late] - low, side="right"
        )
        - 1
    )
    before = rows[np.maximum(last, 0)]
    is_turn = (last >= 0) & (rank[before] == rank[late]) & (queue[before] != queue[late]) & (before < late)
    is_turn &= start[late] - end[before] <= TURN_NS
    return before[is_turn], late[is_turn]
