"""Transformer Engine's ring without labels: its pattern, and what travels in each of its messages.

    forward     stream 7    [attention 0]     [attention 2]      attention alternates between two streams,
                stream 14        [attention 1]     [attention 3]
                stream 15   [kv 0]  [kv 1]  [kv 2]               P - 1 messages
    backward    stream 7    [attention 0][attention 1][attention 2][attention 3]
                stream 16   [kv]         [kv+dkv]     [kv+dkv]     [dkv]           P messages: no ring has that

Backward message h starts behind attention h - 1, whose gradients it carries, and beside attention h, but for what one
buffer holds up. The first one has keys alone, since no attention has ended yet; a ring whose messages carry gradients
of their own hop has none like it. Where attention does not alternate, as when all is in one stream, that tells
Transformer Engine's ring too: what starts before the last attention has ended is its last message, without keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import pandas as pd

from cptrace import labels
from cptrace.intervals import BoolArray, Int64Array
from cptrace.recognition.blocks import (
    ALTERNATES,
    IS_FORWARD,
    N_BEHIND,
    N_EARLY,
    N_FIRST_LATE,
    N_LATE,
    N_MESSAGES,
    message_hops,
)
from cptrace.recognition.places import Kinds, Places

KV: Final = "kv"
BOTH: Final = "kv+dkv"
GRADIENTS: Final = "dkv"

_MOST: Final = 0.8  # of the forward blocks have attention on two streams by turns


def fits_te(blocks: pd.DataFrame) -> pd.Series:
    """Return which blocks look like Transformer Engine's ring, bool of shape (B,).

    Without its two streams both passes are needed to tell it: forward it looks like any ring.

    Args:
        blocks: What each block holds, of the blocks that communicate.
    """
    forward, hops = blocks[IS_FORWARD], blocks[labels.ATTENTION] - 1
    has_streams = bool(forward.any()) and float(blocks[ALTERNATES][forward].mean()) >= _MOST
    if not has_streams and forward.nunique() < 2:
        return pd.Series(False, blocks.index)
    goes = forward & (blocks[N_MESSAGES] == hops) & (blocks[N_BEHIND] == 0)
    comes = ~forward & (blocks[N_MESSAGES] == hops + 1) & (blocks[N_EARLY] == 0)
    comes &= blocks[N_FIRST_LATE if has_streams else N_LATE] == 0
    return (hops >= 1) & (blocks[labels.ALL_TO_ALL] == 0) & (goes | comes)


def streams_text(blocks: pd.DataFrame) -> str:
    """Return on which streams attention runs, for people.

    Args:
        blocks: What each block holds.
    """
    forward = blocks[blocks[IS_FORWARD]]
    n_alternating, n_forward = int(forward[ALTERNATES].sum()), len(forward)
    return f"attention alternates between two streams in {n_alternating} of {n_forward} forward calls"


def te_places(places: Places, ops: pd.DataFrame, fitting: Int64Array) -> Places:
    """Return the places of Transformer Engine's ring: what each message carries, and what each merge is of.

    Blocks that do not look like it lose their places, and so do collectives that it has none of, such as those of
    sharded weights: of what is not known nothing can be told. Merges behind the loop are all taken to be of the last
    hop: what reads every part needs no less.

    Args:
        places: Places that its mix of ops gives.
        ops: Device work.
        fitting: Numbers of the blocks that look like it.
    """
    is_transfer, is_merge = places.is_what(labels.SEND_RECV), places.is_what(labels.MERGE)
    hop = places.hop.copy()
    stream = ops["stream"].to_numpy()[places.rows]
    hop[is_transfer] = message_hops(places.block[is_transfer], stream[is_transfer])
    hop[is_merge] = _newest_ended(places, ops, is_merge)
    tensor = np.array(places.kinds.tensor, object)[places.kind]
    tensor[is_transfer] = _carried(places, hop)[is_transfer]
    kept = np.isin(places.block, fitting) & (hop >= 0)
    kept &= is_transfer | is_merge | places.is_what(labels.ATTENTION)
    return _with(places, tensor, hop, kept)


def _carried(places: Places, hop: Int64Array) -> np.ndarray[tuple[int, ...], np.dtype[np.object_]]:
    """Return what a message at each place carries, object of shape (M,)."""
    n_attention = np.bincount(
        places.block[places.is_what(labels.ATTENTION)], minlength=places.block.max() + 1
    )
    is_last = hop == n_attention[places.block] - 1
    backward = np.where(hop == 0, KV, np.where(is_last, GRADIENTS, BOTH))
    return np.where(places.is_backward, backward, KV).astype(object)


def _newest_ended(places: Places, ops: pd.DataFrame, which: BoolArray) -> Int64Array:
    """Return the hop of the newest attention of its block that has ended when each op starts, -1 where none has.

    What still runs in the other stream is not what a merge reads.

    Args:
        places: Places of M ops.
        ops: Device work.
        which: Ops that are asked for, bool of shape (M,).
    """
    block, position = places.block, np.flatnonzero(which)
    start, end = (ops[name].to_numpy()[places.rows] for name in ("start_ns", "end_ns"))
    asked = pd.DataFrame({"block": block[which], "instant": start[which], "position": position})
    attention = places.is_what(labels.ATTENTION)
    ended = pd.DataFrame({"block": block[attention], "instant": end[attention], "hop": places.hop[attention]})
    ended = ended.sort_values("instant", kind="stable")
    ended["hop"] = ended.groupby("block")["hop"].cummax()
    found = pd.merge_asof(asked.sort_values("instant", kind="stable"), ended, on="instant", by="block")
    hop: Int64Array = found.sort_values("position")["hop"].fillna(-1).to_numpy(np.int64)
    return hop


def _with(
    places: Places,
    tensor: np.ndarray[tuple[int, ...], np.dtype[np.object_]],
    hop: Int64Array,
    kept: BoolArray,
) -> Places:
    """Return some of the places with another tensor and hop each; arrays of shape (M,)."""
    what = np.array(places.kinds.what, object)[places.kind]
    pairs = pd.Series(list(zip(what[kept], tensor[kept], strict=True)), dtype=object)
    kind, kinds = pd.factorize(pairs)
    return replace(
        places,
        rows=places.rows[kept],
        block=places.block[kept],
        kind=np.asarray(kind, np.int64),
        hop=hop[kept],
        layer=places.layer[kept],
        is_backward=places.is_backward[kept],
        n_bytes=places.n_bytes[kept],
        kinds=Kinds(tuple(name for name, _ in kinds), tuple(carried for _, carried in kinds)),
    )
