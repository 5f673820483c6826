"""When all participants of a transfer had arrived: what of a communication op is transfer, and what is waiting.

    rank 0   [ waiting for rank 1 | transfer ]
    rank 1                        [ transfer ]

A communication kernel starts when its own rank gets there and spins until its peers do. Ops of different ranks are
matched by our labels, which name the transfer and its peers, so that for a ring hop only the neighbours count. Without
labels they are matched by order: the k-th op of a name on one rank with the k-th on the others. That is believed only
if each rank has as many, and if matched ops end together, as the parts of one collective do. The spread of those ends
is the uncertainty of the split.

Only ranks of one file are matched: they share a clock. Where they do not, causality tells: an op that meets others
cannot end before they have started.

    rank 0   [ transfer ]
    rank 1                  [ transfer ]     one and the same, on clocks that differ
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from cptrace import labels
from cptrace.classify import COMM
from cptrace.groups import number_groups
from cptrace.intervals import BoolArray, Int64Array
from cptrace.launches import Launches, closed_ranges, distinct_names, innermost_ranges, names_match
from cptrace.outcome import NotApplicable
from cptrace.trace import Trace
from cptrace.units import format_ns

BY_LABEL: Final = "label"
BY_ORDER: Final = "order"

_TIMES: Final = ("start_ns", "end_ns", "rank")
_COMM_LABEL: Final = rf"^({'|'.join(labels.COMMUNICATION)})( |$)"
_MAX_END_SPREAD_NS: Final = 100_000
# Parts of one collective end within 1 to 7 us of each other in reports of one node: so well GPUs are put on one clock.
# Clocks of different nodes, and of profilers that started apart, differ by milliseconds.
_MAX_CLOCK_ERROR_NS: Final = 10_000
_MAX_IMPOSSIBLE: Final = 0.05
_KINETO: Final = "kineto_json"
_ANALYSIS: Final = "peer_wait"
_TAKEN_AS_RECORDED: Final = "predictions take the other ranks as recorded and are less sure"
_AROUND_THE_LAUNCHER: Final = "nsys profile around the launcher, not around each rank"


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
        record = f"a report of all ranks has it ({_AROUND_THE_LAUNCHER})"
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
            f" {_TAKEN_AS_RECORDED}; {_how_to_record_all(trace)}",
        )
    texts, has_label = comm_labels(trace, launches, rows)
    if has_label.all():
        return _match_labels(trace, rows, texts)
    return _match_by_order(trace, rows)


def _how_to_record_all(trace: Trace) -> str:
    """Return how to record all ranks on one clock, for one who has recorded this trace."""
    if trace.meta.format == _KINETO:
        return (
            "the PyTorch profiler writes one file per rank, each on a clock of its own; an Nsight Systems report of a"
            f" whole node has all its ranks on one ({_AROUND_THE_LAUNCHER})"
        )
    return f"a report of a whole node has it ({_AROUND_THE_LAUNCHER})"


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


def _match_labels(trace: Trace, rows: Int64Array, texts: pd.Categorical) -> Arrivals | NotApplicable:
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
    met = _Met(op[partner >= 0], partner[partner >= 0], number_groups(transfer, turn)[0], is_ring)
    if trouble := _clocks_differ(trace, rows, met, BY_LABEL):
        return trouble
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
            " together; the clocks of the ranks differ, or they belong to different process groups",
        )
    last = _highest(ops["start_ns"].to_numpy(), group)[group]
    op, partner = _all_others(np.argsort(group, kind="stable").reshape(-1, len(ranks)))
    if trouble := _clocks_differ(trace, rows, _Met(op, partner, group, np.zeros(len(rows), bool)), BY_ORDER):
        return trouble
    return Arrivals(rows, last, np.ones(len(rows), bool), BY_ORDER, median, rows[op], rows[partner])


class _Met(NamedTuple):
    """Which of C communication ops meet.

    Attributes:
        op: Place of an op among them, once for each other one in its transfer, int64 of shape (M,).
        partner: Place of that other one, int64 of shape (M,).
        transfer: Number of the transfer of each op, the same on all ranks, int64 of shape (C,).
        is_ring: Whether each op may be one hop of a ring, bool of shape (C,): it needs what it receives, but what it
            sends may lie in a buffer until the receiver comes.
    """

    op: Int64Array
    partner: npt.NDArray[np.integer]
    transfer: Int64Array
    is_ring: BoolArray


def _clocks_differ(trace: Trace, rows: Int64Array, met: _Met, basis: str) -> NotApplicable | None:
    """Return that ops of one transfer cannot have happened at the times that they have; None where they can.

    Args:
        trace: Classified trace.
        rows: Rows of communication ops, int64 of shape (C,).
        met: Which of them meet.
        basis: What they were matched by.
    """
    # Copies within one GPU wait until the data are ready, not until the peer copies too; and it has one clock.
    if not len(met.op) or trace.meta.run.get("transport") == labels.LOCAL_D2D:
        return None
    start, end, rank = (trace.ops[name].to_numpy()[rows].astype(np.int64) for name in _TIMES)
    too_early_ns = start[met.partner] - end[met.op]
    pair = np.flatnonzero(too_early_ns > _MAX_CLOCK_ERROR_NS)
    pair = pair[~_may_be_buffered(met, rank, pair)]
    by_ns = np.zeros(len(rows), np.int64)
    np.maximum.at(by_ns, met.op[pair], too_early_ns[pair])
    # Of each rank: where one of many is off, few ops of all are wrong, but many of that one or of its neighbours.
    ranks, slot = np.unique(rank, return_inverse=True)
    n_met = np.bincount(slot[np.unique(met.op)], minlength=len(ranks))
    n_wrong = np.bincount(slot[by_ns > 0], minlength=len(ranks))
    if not np.any(n_wrong > _MAX_IMPOSSIBLE * n_met):
        return None
    why = "the clocks of the ranks differ, or the recording of some began later"
    if basis == BY_ORDER:
        why = "the clocks of the ranks differ, or these ops belong to different process groups"
    return NotApplicable(
        _ANALYSIS,
        f"{n_wrong.sum()} of {n_met.sum()} communication ops end before one that they meet has started on another"
        f" rank, {format_ns(float(np.median(by_ns[by_ns > 0])))} before it (median), which cannot be: {why}; so"
        f" {_TAKEN_AS_RECORDED}; record all ranks of a node in one report, whole steps of each"
        f" ({_AROUND_THE_LAUNCHER}); the clocks of two nodes always differ",
    )


def _may_be_buffered(met: _Met, rank: Int64Array, pair: Int64Array) -> BoolArray:
    """Return which pairs, in which one ends before the other starts, may be of a sender that was ahead of its receiver.

    A ring sends one way round. Who is ahead of the next, and of no rank before it, may have sent into a buffer; where
    in one transfer some are ahead of the rank on one side and some of that on the other, a receiver was early.

    Args:
        met: Which ops meet.
        rank: Rank of each of them, int64 of shape (C,).
        pair: Places in `met.op` of the pairs, int64 of shape (P,).
    """
    of, n_ranks = rank[met.op], int(rank.max()) + 1
    ahead = (
        rank[met.partner] - of
    ) % n_ranks  # how far round the ranks its peer is: the next one, or the one before
    nearest, furthest = np.full(n_ranks, n_ranks), np.zeros(n_ranks, np.int64)
    in_ring = met.is_ring[met.op]
    np.minimum.at(nearest, of[in_ring], ahead[in_ring])
    np.maximum.at(furthest, of[in_ring], ahead[in_ring])
    of, ahead, transfer = of[pair], ahead[pair], met.transfer[met.op[pair]]
    is_both = np.ones(len(pair), bool)
    for is_that_way in (ahead == nearest[of], ahead == furthest[of]):  # with one peer alone it is both
        is_both &= np.isin(transfer, transfer[is_that_way])
    return np.asarray(met.is_ring[met.op[pair]] & ~is_both)


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
