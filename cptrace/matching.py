"""Which communication ops of different ranks are parts of one transfer.

They are matched by our labels, which name the transfer and its peers, so that for a ring hop only the neighbours
count. Without labels they are matched by order: the k-th op of a name and process group on one rank with the k-th on
the others of the group, if each has as many; where the trace tells no group, all ranks are taken for one. Times play
no part in it: `cptrace.clocks` finds from matched ops how far clocks differ, and `cptrace.peers` whether the match can
be believed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from cptrace import labels
from cptrace.groups import number_groups
from cptrace.intervals import BoolArray, Int64Array
from cptrace.launches import Launches, closed_ranges, distinct_names, innermost_ranges, names_match
from cptrace.process_groups import ProcessGroup, parse_group
from cptrace.trace import Trace

BY_LABEL: Final = "label"
BY_ORDER: Final = "order"

_COMM_LABEL: Final = rf"^({'|'.join(labels.COMMUNICATION)})( |$)"


class Matched(NamedTuple):
    """Which of C communication ops meet.

    Attributes:
        op: Place of an op among them, once for each other one in its transfer, int64 of shape (M,).
        partner: Place of that other one, int64 of shape (M,); -1 where it was not found.
        transfer: Number of the transfer of each op, the same on all ranks, int64 of shape (C,).
        is_ring: Whether each op may be one hop of a ring, bool of shape (C,): it needs what it receives, but what it
            sends may lie in a buffer until the receiver comes.
        basis: `label` or `order`.
        absent_ranks: Ranks that labels or process groups name and that did no device work in this trace, ascending.
    """

    op: Int64Array
    partner: npt.NDArray[np.integer]
    transfer: Int64Array
    is_ring: BoolArray
    basis: str
    absent_ranks: tuple[int, ...] = ()


def match_transfers(trace: Trace, launches: Launches, rows: Int64Array) -> Matched:
    """Return which communication ops meet.

    Args:
        trace: Classified trace.
        launches: The launching call of each op.
        rows: Rows of its communication in the table of ops, at least one, int64 of shape (C,).
    """
    texts, has_label = comm_labels(trace, launches, rows)
    return _match_labels(trace, rows, texts) if has_label.all() else _match_by_order(trace, rows)


def comm_labels(trace: Trace, launches: Launches, rows: Int64Array) -> tuple[pd.Categorical, BoolArray]:
    """Return the text of our communication label around the launch of each op, and whether there is one.

    Args:
        trace: Classified trace.
        launches: The launching call of each op.
        rows: Rows in the table of ops.
    """
    codes = np.full(len(rows), -1, np.int64)
    if labels.DOMAIN not in trace.ranges["domain"].cat.categories:
        return pd.Categorical.from_codes(codes, categories=pd.Index([], dtype="str")), codes >= 0
    ranges = closed_ranges(trace.ranges[(trace.ranges["domain"] == labels.DOMAIN).to_numpy()])
    ranges = ranges[names_match(ranges["name"], _COMM_LABEL)]
    texts, slot = distinct_names(ranges["name"])
    launched = np.flatnonzero(launches.is_known[rows])
    if len(ranges) and len(launched):
        calls = launches.call[rows[launched]]
        thread, instant = (trace.api_calls[name].to_numpy()[calls] for name in ("thread", "start_ns"))
        found, is_found = innermost_ranges(ranges, thread, instant)
        codes[launched] = np.where(is_found, slot[found], -1)
    return pd.Categorical.from_codes(codes, categories=pd.Index(texts, dtype="str")), codes >= 0


def _match_labels(trace: Trace, rows: Int64Array, texts: pd.Categorical) -> Matched:
    """Match by what labels say: the same transfer, counted on each rank, and its peers."""
    parsed = [_transfer_and_peers(text) for text in texts.categories]
    transfer = pd.factorize(np.array([key for key, _ in parsed], object))[0][texts.codes]
    rank = trace.ops["rank"].to_numpy()[rows].astype(np.int64)
    turn = (
        pd.DataFrame({"rank": rank, "transfer": transfer}).groupby(["rank", "transfer"]).cumcount().to_numpy()
    )
    n_peers = np.array([len(peers) for _, peers in parsed], np.int64)[texts.codes]
    op = np.repeat(np.arange(len(rows)), n_peers)
    all_peers = np.array([peer for _, peers in parsed for peer in peers], np.int64)
    first = np.cumsum([0] + [len(peers) for _, peers in parsed])[texts.codes]
    peer = all_peers[np.arange(len(op)) - np.repeat(np.cumsum(n_peers) - n_peers - first, n_peers)]
    key = pd.MultiIndex.from_arrays([rank, transfer, turn])
    partner = key.get_indexer(pd.MultiIndex.from_arrays([peer, transfer[op], turn[op]]))
    is_ring = np.array([key.partition(" ")[0] == labels.SEND_RECV for key, _ in parsed], bool)[texts.codes]
    absent = np.setdiff1d(peer[partner < 0], rank)
    number = number_groups(transfer, turn)[0]
    return Matched(op, partner, number, is_ring, BY_LABEL, tuple(absent.tolist()))


def _transfer_and_peers(text: str) -> tuple[str, tuple[int, ...]]:
    """Return a label without its peers, and the peers that it names."""
    label = labels.parse_label(text)
    peers = label.fields.get("peers", "") if label is not None else ""
    words = [word for word in text.split(" ") if not word.startswith("peers=")]
    return " ".join(words), tuple(int(peer) for peer in peers.split(",") if peer.isdecimal())


def _match_by_order(trace: Trace, rows: Int64Array) -> Matched:
    """Match the k-th op of each name and process group on every rank of the group; without a group, on every rank."""
    ops = trace.ops.iloc[rows]
    rank, name, group = (
        ops["rank"].to_numpy().astype(np.int64),
        *(ops[key].cat.codes.to_numpy().astype(np.int64) for key in ("name", "group")),
    )
    sort = number_groups(group + 1, name)[0]
    turn = pd.DataFrame({"rank": rank, "sort": sort}).groupby(["rank", "sort"]).cumcount().to_numpy()
    transfer = number_groups(sort, turn)[0]
    groups = [parse_group(str(text)) for text in ops["group"].cat.categories]
    n_all = max(trace.meta.n_job_ranks or 0, len(np.unique(rank)))
    n_wanted = np.array([*(one.n_ranks or n_all for one in groups), n_all], np.int64)[group]
    n_parts = np.bincount(transfer)[transfer]
    op, partner = _all_others(np.flatnonzero(_are_even(sort, n_parts)), transfer)
    lacking = np.setdiff1d(np.arange(len(rows)), op[(n_parts == n_wanted)[op]])
    return Matched(
        op=np.concatenate((op, lacking)),
        partner=np.concatenate((partner, np.full(len(lacking), -1))),
        transfer=transfer,
        is_ring=np.zeros(len(rows), bool),
        basis=BY_ORDER,
        absent_ranks=_absent(trace, [groups[code] for code in np.unique(group[group >= 0]).tolist()]),
    )


def _are_even(sort: Int64Array, n_parts: Int64Array) -> BoolArray:
    """Return which ops are of a sort of which each rank that has any has as many, bool of shape (C,)."""
    most = np.zeros(int(sort.max()) + 1, np.int64)
    np.maximum.at(most, sort, n_parts)
    is_odd = np.bincount(sort, weights=n_parts != most[sort])[sort] > 0
    return np.asarray(~is_odd, bool)


def _absent(trace: Trace, groups: Iterable[ProcessGroup]) -> tuple[int, ...]:
    """Return the ranks that groups name and the trace does not hold, where its numbers are those of the job."""
    if not trace.ranks["is_recorded"].all():
        return ()
    named = {rank for group in groups for rank in group.ranks or ()}
    return tuple(sorted(named.difference(trace.ranks["rank"].tolist())))


def _all_others(ops: Int64Array, transfer: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return each op with each other op of its transfer."""
    order = ops[np.argsort(transfer[ops], kind="stable")]
    _, first, n_parts = np.unique(transfer[order], return_index=True, return_counts=True)
    first, n_parts = (np.repeat(part, n_parts) for part in (first, n_parts))  # of the transfer of each op
    n_pairs = np.cumsum(n_parts) - n_parts
    one = np.repeat(np.arange(len(order)), n_parts)
    other = np.repeat(first, n_parts) + np.arange(len(one)) - np.repeat(n_pairs, n_parts)
    is_other = one != other
    return order[one[is_other]], order[other[is_other]]
