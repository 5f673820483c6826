"""Offsets between clocks, found from when the parts of transfers end."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cptrace.clocks import ends_together, find_offsets
from cptrace.intervals import Int64Array
from cptrace.matching import BY_LABEL, BY_ORDER, Matched


def met(transfer: list[int], basis: str = BY_ORDER, is_ring: bool = False) -> Matched:
    """Return that all ops of a transfer meet each other."""
    pairs = [
        (one, other)
        for one, of_one in enumerate(transfer)
        for other, of_other in enumerate(transfer)
        if of_one == of_other and one != other
    ]
    op, partner = (
        (np.array(part, np.int64) for part in zip(*pairs, strict=True)) if pairs else (_none(), _none())
    )
    return Matched(op, partner, np.array(transfer, np.int64), np.full(len(transfer), is_ring), basis)


def _none() -> Int64Array:
    return np.zeros(0, np.int64)


def everything(matched: Matched) -> np.ndarray:
    return np.ones(len(matched.transfer), bool)


@given(
    ahead_ns=st.lists(st.integers(-(10**10), 10**10), min_size=2, max_size=5),
    n_transfers=st.integers(1, 6),
    late_ns=st.integers(0, 1_000),
)
def test_clocks_are_put_on_the_first(ahead_ns: list[int], n_transfers: int, late_ns: int) -> None:
    """Parts end up to `late_ns` after the first of them, and so well the offsets are known."""
    n_clocks = len(ahead_ns)
    clock = np.tile(np.arange(n_clocks), n_transfers)
    transfer = np.repeat(np.arange(n_transfers), n_clocks)
    jitter = np.arange(len(clock)) * 7919 % (late_ns + 1)
    end = 1_000_000 * transfer + np.array(ahead_ns, np.int64)[clock] + jitter
    matched = met(transfer.tolist())
    found = find_offsets(end, clock, matched, everything(matched))
    assert found is not None
    wanted = ahead_ns[0] - np.array(ahead_ns, np.int64)
    assert found.shift_ns[0] == 0
    assert np.abs(found.shift_ns - wanted).max() <= 2 * late_ns + 1
    assert found.error_ns <= 2 * late_ns + 1


def test_neighbours_alone_tell_of_all_along_a_chain() -> None:
    """
    clock 0   [a ]
    clock 1      [a ]      [b ]
    clock 2          [b ]            5 ns ahead of clock 1, which is 3 ns ahead of clock 0
    """
    matched = met([0, 0, 1, 1])
    found = find_offsets(np.array([10, 13, 40, 45]), np.array([0, 1, 1, 2]), matched, everything(matched))
    assert found is not None
    assert found.shift_ns.tolist() == [0, -3, -8]
    assert found.error_ns == 0


@pytest.mark.parametrize("lack", ["no transfer of it", "none that counts", "no partner"])
def test_a_clock_that_has_nothing_in_common_cannot_be_told(lack: str) -> None:
    matched = met([0, 0, 1, 2 if lack == "no transfer of it" else 1])
    which = everything(matched)
    if lack == "none that counts":
        which[3] = False
    if lack == "no partner":
        matched = matched._replace(partner=np.where(matched.op >= 2, -1, matched.partner))
    assert find_offsets(np.array([10, 13, 40, 45]), np.array([0, 1, 1, 2]), matched, which) is None


def test_a_clock_that_runs_faster_shows_as_uncertainty() -> None:
    """One part in a thousand over ten transfers, 100 us apart: the first and the last are 900 ns off the mean."""
    transfer = np.repeat(np.arange(10), 2)
    clock = np.tile(np.arange(2), 10)
    end = 100_000 * transfer + 100 * transfer * clock
    matched = met(transfer.tolist())
    found = find_offsets(end, clock, matched, everything(matched))
    assert found is not None
    assert 200 <= found.error_ns <= 300


@pytest.mark.parametrize(
    ("n_ranks", "basis", "is_ring", "collective", "is_told"),
    [
        (4, BY_LABEL, True, "send_recv", False),
        (3, BY_LABEL, True, "send_recv", True),  # all are neighbours of all
        (4, BY_LABEL, False, "all_to_all", True),
        (4, BY_ORDER, False, "send_recv", False),
        (2, BY_ORDER, False, "send_recv", True),
        (4, BY_ORDER, False, "all_reduce", True),
        (4, BY_ORDER, False, "broadcast", False),  # its root is done before the others
    ],
)
def test_what_ends_together(n_ranks: int, basis: str, is_ring: bool, collective: str, is_told: bool) -> None:
    matched = met([0] * n_ranks, basis, is_ring)
    assert ends_together(matched, np.full(n_ranks, collective, object)).tolist() == [is_told] * n_ranks


def test_a_ring_of_which_a_part_is_missing_may_be_larger() -> None:
    matched = met([0, 0, 0], BY_LABEL, is_ring=True)
    partner = np.where(matched.op == 2, -1, matched.partner)
    assert not ends_together(matched._replace(partner=partner), np.full(3, "send_recv", object)).any()
