"""Sharding is a permutation, whatever the layout, and padding is the tail of a rank's tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from instrumented.layout import HeadLayout, Layout, contiguous, padded_length, striped, zigzag

LAYOUTS = (contiguous, zigzag, striped)
EACH = pytest.mark.parametrize("make", LAYOUTS, ids=lambda make: make.__name__)


@EACH
@settings(deadline=None)  # the first call warms torch up
@given(cp_size=st.integers(1, 8), seq_len=st.integers(1, 40))
def test_shard_then_unshard_gives_the_whole_back(
    make: Callable[[int, int], Layout], cp_size: int, seq_len: int
) -> None:
    layout = make(seq_len, cp_size)
    whole_BSX = torch.randn(2, seq_len, 3)
    shards = [layout.shard(whole_BSX, rank) for rank in range(cp_size)]
    assert all(shard.shape == (2, layout.local_len, 3) for shard in shards)
    assert torch.equal(layout.unshard(shards), whole_BSX)


@EACH
@given(cp_size=st.integers(1, 8), seq_len=st.integers(1, 40))
def test_padding_is_zeros_after_all_tokens_of_a_rank(
    make: Callable[[int, int], Layout], cp_size: int, seq_len: int
) -> None:
    layout = make(seq_len, cp_size)
    assert sum(layout.n_tokens(rank) for rank in range(cp_size)) == seq_len
    for rank in range(cp_size):
        shard_BLX = layout.shard(torch.ones(1, seq_len, 1), rank)
        n_tokens = layout.n_tokens(rank)
        assert shard_BLX.flatten().tolist() == [1.0] * n_tokens + [0.0] * (layout.local_len - n_tokens)
        assert layout.position_ids(rank).tolist() == sorted(layout.position_ids(rank).tolist())


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (contiguous, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (zigzag, [[0, 1, 6, 7], [2, 3, 4, 5]]),
        (striped, [[0, 2, 4, 6], [1, 3, 5, 7]]),
    ],
)
def test_positions(make: Callable[[int, int], Layout], expected: list[list[int]]) -> None:
    assert make(8, 2).positions_PL.tolist() == expected


def test_zigzag_of_four_ranks_pairs_early_with_late_chunks() -> None:
    assert zigzag(8, 4).positions_PL.tolist() == [[0, 7], [1, 6], [2, 5], [3, 4]]


@pytest.mark.parametrize(
    ("make", "seq_len", "cp_size", "padded"),
    [(contiguous, 2999, 4, 3000), (zigzag, 2999, 4, 3000), (zigzag, 3001, 4, 3008), (striped, 7, 2, 8)],
)
def test_an_uneven_split_is_padded_to_what_the_layout_needs(
    make: Callable[[int, int], Layout], seq_len: int, cp_size: int, padded: int
) -> None:
    layout = make(seq_len, cp_size)
    assert layout.local_len * cp_size == padded
    assert layout.seq_len == seq_len


def test_a_larger_multiple_can_be_asked_for() -> None:
    assert contiguous(7, 2, 6).local_len == 6
    assert zigzag(7, 2, 12).local_len == 6


def test_pieces_lie_where_the_positions_say() -> None:
    assert zigzag(16, 2).pieces(1, 2) == [slice(4, 8), slice(8, 12)]
    assert contiguous(16, 2).pieces(1, 1) == [slice(8, 16)]


def test_a_divided_layout_keeps_each_groups_order() -> None:
    """Two groups hold chunks 0, 3 and 1, 2 of four; each group's two ranks have half of its tokens."""
    divided = zigzag(8, 2).divided(2)
    assert divided.positions_PL.tolist() == [[0, 1], [6, 7], [2, 3], [4, 5]]
    assert (divided.name, divided.seq_len, divided.size) == ("zigzag", 8, 4)


def test_split_heads_come_back_together() -> None:
    layout = HeadLayout(seq_len=5, size=3)
    whole_BSHD = torch.randn(1, 5, 6, 2)
    shards = [layout.shard(whole_BSHD, rank) for rank in range(3)]
    assert torch.equal(shards[1], whole_BSHD[:, :, 2:4])
    assert all(shard.is_contiguous() for shard in shards)
    assert torch.equal(layout.unshard(shards), whole_BSHD)
    assert (layout.name, layout.n_tokens(2)) == ("heads", 5)


@given(seq_len=st.integers(1, 10**6), multiple=st.integers(1, 64))
def test_padding_is_the_least_that_divides(seq_len: int, multiple: int) -> None:
    padded = padded_length(seq_len, multiple)
    assert padded % multiple == 0
    assert 0 <= padded - seq_len < multiple
