"""What each block of a trace without labels holds, in which order and on which streams: what patterns go by."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pandas as pd

from cptrace import intervals, labels
from cptrace.intervals import BoolArray, Int64Array, Intervals
from cptrace.recognition.pattern import find_gemms
from cptrace.recognition.places import Places

COUNTED: Final = (
    labels.ATTENTION,
    labels.SEND_RECV,
    labels.ALL_TO_ALL,
    labels.ALL_GATHER,
    labels.REDUCE_SCATTER,
)
RANK: Final = "rank"
IS_FORWARD: Final = "is_forward"
ALTERNATES: Final = "alternates"
STARTS_APART: Final = "starts_apart"
N_MESSAGES: Final = "n_messages"
N_EARLY: Final = "n_early"
N_LATE: Final = "n_late"
N_FIRST_LATE: Final = "n_first_late"
N_BEHIND: Final = "n_behind"
N_GATHERS_BESIDE_GEMMS: Final = "n_gathers_beside_gemms"
N_GATHERS_BESIDE_ATTENTION: Final = "n_gathers_beside_attention"

_MAX_STREAMS: Final = 2
_NOT_EVEN: Final = -1


def find_blocks(places: Places, ops: pd.DataFrame) -> pd.DataFrame:
    """Return what each block holds: a row for each, how many ops of each kind in `COUNTED`, and besides these

        rank              its rank
        is_forward        whether it is a forward pass
        alternates        whether its attention alternates between two streams
        starts_apart      whether its first attention is a kernel of its own, and all others share another one
        n_messages        transfers in each stream that has some: 2 streams at most, all equally many; else -1
        n_early           transfers of hop h that start before attention h - 1 has ended
        n_late            those that start when attention h has ended
        n_first_late      those of them that are of hop 0
        n_behind          those that start when all attention of the block has ended
        n_gathers_beside_gemms      all-gathers that run while a matrix product of their rank does
        n_gathers_beside_attention  those that start when attention of their block has started

    Args:
        places: Places of M ops, at least one.
        ops: Device work.
    """
    n_blocks = int(places.block.max()) + 1
    counts = {name: np.bincount(places.block[places.is_what(name)], minlength=n_blocks) for name in COUNTED}
    rank = np.zeros(n_blocks, np.int64)
    rank[places.block] = ops["rank"].to_numpy()[places.rows]
    is_forward = np.ones(n_blocks, bool)
    is_forward[places.block[places.is_backward]] = False
    attention = _in_order(places, ops, labels.ATTENTION)
    transfers = _in_order(places, ops, labels.SEND_RECV)
    return pd.DataFrame(
        {
            **counts,
            RANK: rank,
            IS_FORWARD: is_forward,
            **_of_attention(attention, n_blocks),
            N_MESSAGES: _messages(transfers, n_blocks),
            **_beside_attention(transfers, attention, n_blocks),
            **_of_gathers(places, ops, attention, n_blocks),
        }
    )


def message_hops(block: Int64Array, stream: Int64Array) -> Int64Array:
    """Return the hop of each transfer: its number in its block and stream, int64 of shape (T,).

    Transformer Engine sends and receives in two streams where more than two ranks take part: a hop is one of each.

    Args:
        block: Block of each transfer, in the order of their starts, int64 of shape (T,).
        stream: Stream of each transfer, of shape (T,).
    """
    messages = pd.DataFrame({"block": block, "stream": stream}).groupby(["block", "stream"])
    hop: Int64Array = messages.cumcount().to_numpy().astype(np.int64)
    return hop


def _in_order(places: Places, ops: pd.DataFrame, what: str) -> pd.DataFrame:
    """Return block, hop, stream, times and number of the kernel of the ops of one kind, by block and start."""
    position = np.flatnonzero(places.is_what(what))
    position = position[np.argsort(places.block[position], kind="stable")]
    rows, block = places.rows[position], places.block[position]
    stream = ops["stream"].to_numpy()[rows]
    return pd.DataFrame(
        {
            "block": block,
            "hop": places.hop[position] if what == labels.ATTENTION else message_hops(block, stream),
            "stream": stream,
            "start_ns": ops["start_ns"].to_numpy()[rows],
            "end_ns": ops["end_ns"].to_numpy()[rows],
            "kernel": ops["name"].cat.codes.to_numpy()[rows],
        }
    )


def _of_attention(attention: pd.DataFrame, n_blocks: int) -> dict[str, Any]:
    """Return the columns that speak of attention alone, each of shape (B,)."""
    block, hop = (attention[name].to_numpy() for name in ("block", "hop"))
    is_next = np.diff(block, prepend=-1) == 0
    switches, changes = (
        is_next & (np.diff(attention[name].to_numpy(), prepend=0) != 0) for name in ("stream", "kernel")
    )
    n_next, n_switches, n_changes = (_count(block, which, n_blocks) for which in (is_next, switches, changes))
    n_streams = attention.groupby("block")["stream"].nunique().reindex(range(n_blocks), fill_value=0)
    return {
        ALTERNATES: (n_streams == 2).to_numpy() & (n_switches == n_next),
        STARTS_APART: (n_changes == 1) & (_count(block, changes & (hop == 1), n_blocks) == 1),
    }


def _messages(transfers: pd.DataFrame, n_blocks: int) -> Int64Array:
    """Return how many messages each block has, int64 of shape (B,); -1 where its streams have not equally many."""
    sizes = transfers.groupby(["block", "stream"]).size().groupby("block").agg(["min", "max", "size"])
    sizes = sizes.reindex(range(n_blocks), fill_value=0)
    is_even = (sizes["min"] == sizes["max"]) & (sizes["size"] <= _MAX_STREAMS)
    return np.asarray(sizes["max"].where(is_even, _NOT_EVEN).to_numpy(), np.int64)


def _beside_attention(
    transfers: pd.DataFrame, attention: pd.DataFrame, n_blocks: int
) -> dict[str, Int64Array]:
    """Return the columns that compare the starts of transfers with the ends of attention, each of shape (B,)."""
    block, start = (transfers[name].to_numpy() for name in ("block", "start_ns"))
    ends = attention.set_index(["block", "hop"])["end_ns"]
    of_hop, of_hop_before = (
        ends.reindex(pd.MultiIndex.from_arrays([block, transfers["hop"] + shift])).to_numpy()
        for shift in (0, -1)
    )
    of_all = attention.groupby("block")["end_ns"].max().reindex(block).to_numpy()
    # A comparison with the end of attention that is not there is False.
    is_late = start >= of_hop
    found = {
        N_EARLY: start < of_hop_before,
        N_LATE: is_late,
        N_FIRST_LATE: is_late & (transfers["hop"].to_numpy() == 0),
        N_BEHIND: start >= of_all,
    }
    return {name: _count(block, which, n_blocks) for name, which in found.items()}


def _of_gathers(
    places: Places, ops: pd.DataFrame, attention: pd.DataFrame, n_blocks: int
) -> dict[str, Int64Array]:
    """Return the columns that speak of all-gathers, each of shape (B,)."""
    position = np.flatnonzero(places.is_what(labels.ALL_GATHER))
    rows, block = places.rows[position], places.block[position]
    start, end, rank = (ops[name].to_numpy()[rows] for name in ("start_ns", "end_ns", "rank"))
    is_beside = np.zeros(len(rows), bool)
    gemms = np.flatnonzero(find_gemms(ops)) if len(rows) else rows
    for number in np.unique(rank).tolist():
        of_rank = ops.iloc[gemms[ops["rank"].to_numpy()[gemms] == number]]
        busy = intervals.union(Intervals(of_rank["start_ns"].to_numpy(), of_rank["end_ns"].to_numpy()))
        mine = np.flatnonzero(rank == number)
        is_beside[mine] = intervals.covered_ns(busy, start[mine], end[mine]) > 0
    first = attention.groupby("block")["start_ns"].min().reindex(block).to_numpy()
    return {
        N_GATHERS_BESIDE_GEMMS: _count(block, is_beside, n_blocks),
        N_GATHERS_BESIDE_ATTENTION: _count(block, start >= first, n_blocks),
    }


def _count(block: Int64Array, which: BoolArray, n_blocks: int) -> Int64Array:
    return np.bincount(block[which], minlength=n_blocks)
