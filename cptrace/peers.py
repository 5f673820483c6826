"""When all participants of a transfer had arrived: what of a communication op is transfer, and what is waiting.

    rank 0   [ waiting for rank 1 | transfer ]
    rank 1                        [ transfer ]

A communication kernel starts when its own rank gets there and spins until its peers do. Ops of different ranks are
matched by our labels, which name the transfer and its peers, so that for a ring hop only the neighbours count. Without
labels they are matched by order: the k-th op of a name on one rank with the k-th on the others. That is believed only
if each rank has as many, and if matched ops end together, as the parts of one collective do. The spread of those ends
is the uncertainty of the split.

Only ranks of one file are matched: they share a clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from cptrace import labels
from cptrace.classify import COMM
from cptrace.intervals import BoolArray, Int64Array
from cptrace.launches import Launches, closed_ranges, distinct_names, innermost_ranges, names_match
from cptrace.outcome import NotApplicable
from cptrace.trace import Trace

BY_LABEL: Final = "label"
BY_ORDER: Final = "order"

_COMM_LABEL: Final = rf"^({'|'.join(labels.COMMUNICATION)})( |$)"
_MAX_END_SPREAD_NS: Final = 100_000
_ANALYSIS: Final = "peer_wait"
_TAKEN_AS_RECORDED: Final = "predictions take the other ranks as recorded and are less sure"


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When the last participant of each communication op arrived.

    Attributes:
        rows: Rows in the table of ops of all communication, ascending, int64 of shape (C,).
        last_ns: Start of the participant that started last, int64 of shape (C,).
        is_matched: Whether the participants were found, bool of shape (C,); without that, `last_ns` is the own start.
        basis: `label` or `order`.
        end_spread_ns: Median spread of the ends of matched ops: the uncertainty of the split.
        partner_op: Row of a matched op, once for each other op that takes part in its transfer, int64 of shape (M,).
        partner: Row of that other op, int64 of shape (M,).
        absent_ranks: Ranks that labels name as peers and that did no device work in this trace, ascending.
    """

    rows: Int64Array
    last_ns: Int64Array
    is_matched: BoolArray
    basis: str
    end_spread_ns: int
    partner_op: Int64Array
    partner: Int64Array
    absent_ranks: tuple[int, ...] = ()


def peers_missing(arrivals: Arrivals | NotApplicable) -> NotApplicable | None:
    """Return why some communication is not split into transfer and waiting; None where all of it is.

    Args:
        arrivals: What was found.
    """
    if isinstance(arrivals, NotApplicable):
        return arrivals
    n_unmatched = int(np.count_nonzero(~arrivals.is_matched))
    if not n_unmatched:
        return None
    where, record = "within this file", "record whole steps on all ranks"
    if absent := arrivals.absent_ranks:
        where = (
            f"on rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}, which this file has no work of"
        )
        record = "a report of all ranks has it (nsys profile around the launcher, not around each rank)"
    return NotApplicable(
        _ANALYSIS,
        f"{n_unmatched} of {len(arrivals.rows)} communication ops have peers that were not found {where}, so"
        f" {_TAKEN_AS_RECORDED}; {record}",
    )


def find_arrivals(trace: Trace, launches: Launches) -> Arrivals | NotApplicable:
    """Return when the last participant of each communication op arrived, or why that cannot be told.

    Args:
        trace: Classified trace.
        launches: The launching call of each op.
    """
    rows = np.flatnonzero((trace.ops["role"] == COMM).to_numpy())
    if not len(rows):
        return Arrivals(rows, rows, rows.astype(bool), BY_ORDER, 0, rows, rows)
    if trace.ops["rank"].iloc[rows].nunique() < 2:
        return NotApplicable(
            _ANALYSIS,
            "it needs the communication of at least two ranks on one clock, and this file has that of one, so"
            f" {_TAKEN_AS_RECORDED}; a report of a whole node has it (nsys profile around the launcher, not around each"
            " rank)",
        )
    texts, has_label = comm_labels(trace, launches, rows)
    if has_label.all():
        return _match_labels(trace, rows, texts)
    return _match_by_order(trace, rows)


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


def _match_labels(trace: Trace, rows: Int64Array, texts: pd.Categorical) -> Arrivals:
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
    absent = np.setdiff1d(peer[partner < 0], rank)
    return replace(_arrivals(trace, rows, op, partner, BY_LABEL), absent_ranks=tuple(absent.tolist()))


def _transfer_and_peers(text: str) -> tuple[str, tuple[int, ...]]:
    """Return a label without its peers, and the peers that it names."""
    label = labels.parse_label(text)
    peers = label.fields.get("peers", "") if label is not None else ""
    words = [word for word in text.split(" ") if not word.startswith("peers=")]
    return " ".join(words), tuple(int(peer) for peer in peers.split(",") if peer.isdecimal())


def _match_by_order(trace: Trace, rows: Int64Array) -> Arrivals | NotApplicable:
    """Match the k-th op of each name on every rank, and believe it if they end together."""
    ops = trace.ops.iloc[rows]
    rank, name = ops["rank"].to_numpy().astype(np.int64), ops["name"].cat.codes.to_numpy().astype(np.int64)
    turn = pd.DataFrame({"rank": rank, "name": name}).groupby(["rank", "name"]).cumcount().to_numpy()
    group, _ = pd.factorize(name * (int(turn.max()) + 1) + turn)
    ranks = np.unique(rank)
    if np.any(np.bincount(group) != len(ranks)):
        return NotApplicable(
            _ANALYSIS,
            "ranks do not have the same number of each communication op, so which belong together cannot be told;"
            " record whole steps on all ranks",
        )
    end = ops["end_ns"].to_numpy()
    spread = _highest(end, group) - _lowest(end, group)
    median = int(np.median(spread))
    if median > _MAX_END_SPREAD_NS:
        return NotApplicable(
            _ANALYSIS,
            f"ops matched by their order end {median} ns apart (median), where the parts of one collective end"
            " together; they may belong to different process groups",
        )
    last = _highest(ops["start_ns"].to_numpy(), group)[group]
    op, partner = _all_others(rows[np.argsort(group, kind="stable")].reshape(-1, len(ranks)))
    return Arrivals(rows, last, np.ones(len(rows), bool), BY_ORDER, median, op, partner)


def _all_others(members: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return each member of each row of a table, with each other member of that row."""
    n_members = members.shape[1]
    one, other = np.nonzero(~np.eye(n_members, dtype=bool))
    return members[:, one].ravel(), members[:, other].ravel()


def _arrivals(
    trace: Trace, rows: Int64Array, op: Int64Array, partner: npt.NDArray[np.integer], basis: str
) -> Arrivals:
    """Return the arrivals of ops that have partners, as pairs of places in `rows`; -1 where a partner is missing."""
    start, end = (trace.ops[name].to_numpy()[rows] for name in ("start_ns", "end_ns"))
    is_matched = np.ones(len(rows), bool)
    is_matched[op[partner < 0]] = False
    op, partner = op[partner >= 0], partner[partner >= 0]
    last, latest_end, earliest_end = start.copy(), end.copy(), end.copy()
    np.maximum.at(last, op, start[partner])
    np.maximum.at(latest_end, op, end[partner])
    np.minimum.at(earliest_end, op, end[partner])
    spread = (latest_end - earliest_end)[is_matched]
    last = np.where(is_matched, last, start)
    median = int(np.median(spread)) if len(spread) else 0
    is_told = is_matched[op]
    return Arrivals(rows, last, is_matched, basis, median, rows[op[is_told]], rows[partner[is_told]])


def _highest(values: Int64Array, group: Int64Array) -> Int64Array:
    highest = np.full(int(group.max()) + 1, np.iinfo(np.int64).min)
    np.maximum.at(highest, group, values)
    return highest


def _lowest(values: Int64Array, group: Int64Array) -> Int64Array:
    return -_highest(-values, group)
