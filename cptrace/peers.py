"""When all participants of a transfer had arrived: what of a communication op is transfer, and what is waiting.

    rank 0   [ waiting for rank 1 | transfer ]
    rank 1                        [ transfer ]

A communication kernel starts when its own rank gets there and spins until its peers do. `cptrace.matching` tells which
ops of different ranks meet. What was matched by order alone is believed only if matched ops end together, as the parts
of one collective do. The spread of those ends is the uncertainty of the split.

Ranks of one file share a clock, and those of several are put on one by `cptrace.clocks`. Where they still differ,
causality tells: an op that meets others cannot end before they have started.

    rank 0   [ transfer ]
    rank 1                  [ transfer ]     one and the same, on clocks that differ
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from cptrace import labels
from cptrace.classify import COMM
from cptrace.intervals import BoolArray, Int64Array
from cptrace.launches import Launches
from cptrace.matching import BY_ORDER, Matched, match_transfers
from cptrace.outcome import NotApplicable
from cptrace.trace import Trace
from cptrace.units import format_ns

_TIMES: Final = ("start_ns", "end_ns", "rank")
MAX_END_SPREAD_NS: Final = 100_000
"""Parts of one collective end together; further apart than this (median) they are not what they are taken for."""
# Parts of one collective end within 1 to 7 us of each other in reports of one node: so well GPUs are put on one clock.
# Clocks of different nodes, and of profilers that started apart, differ by milliseconds.
_MAX_CLOCK_ERROR_NS: Final = 10_000
_MAX_IMPOSSIBLE: Final = 0.05
_KINETO: Final = "kineto_json"
_ANALYSIS: Final = "peer_wait"
_TAKEN_AS_RECORDED: Final = "predictions take the other ranks as recorded and are less sure"
_ALL_TOGETHER: Final = "or analyze the reports of all ranks together"
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
    where, record = "in the trace", "record whole steps on all ranks"
    if absent := arrivals.absent_ranks:
        where = (
            f"on rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}, which the trace has no work of"
        )
        record = f"a report of all ranks has it ({_AROUND_THE_LAUNCHER}), {_ALL_TOGETHER}"
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
    matched = match_transfers(trace, launches, rows)
    found = _arrivals(trace, rows, matched)
    if matched.basis == BY_ORDER and not found.is_matched.any():
        return _none_by_order(trace)
    if matched.basis == BY_ORDER and found.end_spread_ns > MAX_END_SPREAD_NS:
        return NotApplicable(
            _ANALYSIS,
            f"ops matched by their order end {found.end_spread_ns} ns apart (median), where the parts of one"
            " collective end together; the clocks of the ranks differ, or they belong to different process groups",
        )
    return _clocks_differ(trace, rows, matched) or found


def _none_by_order(trace: Trace) -> NotApplicable:
    """Return why no op was matched by its order.

    Labels name their peers; without them only the size of the job or of a process group tells that some are missing.
    """
    n_here, n_ranks = len(trace.ranks), trace.meta.n_job_ranks
    if n_ranks is not None and n_here < n_ranks:
        return NotApplicable(
            _ANALYSIS,
            f"the job has {n_ranks} ranks, and {n_here} of them are here: whether one of the others was the last to"
            f" come is not known, so {_TAKEN_AS_RECORDED}; analyze the files of all ranks together",
        )
    return NotApplicable(
        _ANALYSIS,
        "ranks do not have the same number of each communication op, so which belong together cannot be told; record"
        " whole steps on all ranks",
    )


def _how_to_record_all(trace: Trace) -> str:
    """Return how to record all ranks on one clock, for one who has recorded this trace."""
    if trace.meta.format == _KINETO:
        return "the PyTorch profiler writes one file per rank; analyze those of all ranks together"
    return f"a report of a whole node has it ({_AROUND_THE_LAUNCHER}), {_ALL_TOGETHER}"


def _clocks_differ(trace: Trace, rows: Int64Array, matched: Matched) -> NotApplicable | None:
    """Return that ops of one transfer cannot have happened at the times that they have; None where they can.

    Args:
        trace: Classified trace.
        rows: Rows of communication ops, int64 of shape (C,).
        matched: Which of them meet.
    """
    is_found = matched.partner >= 0
    met = matched._replace(op=matched.op[is_found], partner=matched.partner[is_found])
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
    if met.basis == BY_ORDER:
        why = "the clocks of the ranks differ, or these ops belong to different process groups"
    return NotApplicable(
        _ANALYSIS,
        f"{n_wrong.sum()} of {n_met.sum()} communication ops end before one that they meet has started on another"
        f" rank, {format_ns(float(np.median(by_ns[by_ns > 0])))} before it (median), which cannot be: {why}; so"
        f" {_TAKEN_AS_RECORDED}; record all ranks of a node in one report, whole steps of each"
        f" ({_AROUND_THE_LAUNCHER}); the clocks of two nodes always differ",
    )


def _may_be_buffered(met: Matched, rank: Int64Array, pair: Int64Array) -> BoolArray:
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


def _arrivals(trace: Trace, rows: Int64Array, matched: Matched) -> Arrivals:
    """Return the arrivals of communication ops, of which some meet."""
    op, partner = matched.op, matched.partner
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
    return Arrivals(
        rows=rows,
        last_ns=last,
        is_matched=is_matched,
        basis=matched.basis,
        end_spread_ns=median,
        partner_op=rows[op[is_told]],
        partner=rows[partner[is_told]],
        absent_ranks=matched.absent_ranks,
    )
