"""Where communication ops of different ranks meet: the data moves when the last of them has arrived."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from cptrace.intervals import BoolArray, Int64Array
from cptrace.outcome import NotApplicable
from cptrace.peers import Arrivals

_ANY_SEED: Final = 0


class Meetings(NamedTuple):
    """Which of N ops end a time after a meeting with others, and M meetings.

    Attributes:
        is_met: Whether the op's end hangs on others, bool of shape (N,).
        meeting: Number of its meeting, int64 of shape (N,); meaningless for other ops.
        arrival_ns: When the last participant started; for other ops their own start, int64 of shape (N,).
        member: Row of an op that takes part in a meeting, int64 of shape (K,).
        member_of: Number of that meeting, int64 of shape (K,).
        n_meetings: M.
    """

    is_met: BoolArray
    meeting: Int64Array
    arrival_ns: Int64Array
    member: Int64Array
    member_of: Int64Array
    n_meetings: int


def find_meetings(
    start_ns: Int64Array, end_ns: Int64Array, next_start_ns: Int64Array, arrivals: Arrivals | NotApplicable
) -> Meetings:
    """Return where communication ops meet; ops that were not matched, or cannot have met, run on their own.

    Args:
        start_ns: Start of each op in ns, int64 of shape (N,).
        end_ns: End of each op in ns, int64 of shape (N,).
        next_start_ns: Start of the op after each in its stream, int64 of shape (N,).
        arrivals: Which ops take part in one transfer.
    """
    none = np.zeros(0, np.int64)
    op, partner = (
        (none, none) if isinstance(arrivals, NotApplicable) else (arrivals.partner_op, arrivals.partner)
    )
    arrival = start_ns.copy()
    np.maximum.at(arrival, op, start_ns[partner])
    is_met = np.zeros(len(start_ns), bool)
    is_met[op] = True
    # Who ended, or made room for the next one, before another arrived did not wait for that one.
    is_met &= (arrival <= end_ns) & (arrival <= next_start_ns)
    op, partner = op[is_met[op]], partner[is_met[op]]
    first, meeting = _same_participants(op, partner, np.flatnonzero(is_met))
    number = np.zeros(len(start_ns), np.int64)
    number[is_met] = meeting
    is_first = np.zeros(len(start_ns), bool)
    is_first[first] = True
    return Meetings(
        is_met=is_met,
        meeting=number,
        arrival_ns=np.where(is_met, arrival, start_ns),
        member=np.concatenate((first, partner[is_first[op]])),
        member_of=number[np.concatenate((first, op[is_first[op]]))],
        n_meetings=len(first),
    )


def _same_participants(
    op: Int64Array, partner: Int64Array, rows: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Return one op of each distinct set of participants, and the number of each row's set.

    A set is known by the sum of 64-bit random numbers, one per op: the participants of an all-gather then share one
    meeting, where each would have needed an edge from each.
    """
    size = int(rows.max(initial=-1)) + 1
    size = max(size, int(partner.max(initial=-1)) + 1)
    token = np.random.default_rng(_ANY_SEED).integers(0, 2**63, size, np.uint64)
    total = token.copy()
    np.add.at(total, op, token[partner])
    _, first, number = np.unique(total[rows], return_index=True, return_inverse=True)
    return rows[first], number.astype(np.int64)
