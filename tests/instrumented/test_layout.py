"""Sharding is a permutation, whatever the layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cptrace.errors import UsageError
from instrumented.layout import Layout, contiguous, padded_length


@settings(deadline=None)  # the first call warms torch up
@given(cp_size=st.integers(1, 8), local_len=st.integers(1, 9))
def test_shard_then_unshard_gives_the_whole_back(cp_size: int, local_len: int) -> None:
    layout = contiguous(cp_size * local_len, cp_size)
    whole_BSX = torch.randn(2, cp_size * local_len, 3)
    shards = [layout.shard(whole_BSX, rank) for rank in range(cp_size)]
    assert all(shard.shape == (2, local_len, 3) for shard in shards)
    assert torch.equal(layout.unshard(shards), whole_BSX)


def test_contiguous_positions() -> None:
    assert contiguous(8, 4).position_ids(2).tolist() == [4, 5]


def test_any_permutation_is_a_layout() -> None:
    """Zigzag over two ranks: rank 0 holds pieces 0 and 3, rank 1 pieces 1 and 2."""
    zigzag = Layout("zigzag", torch.tensor([[0, 1, 6, 7], [2, 3, 4, 5]]))
    whole_BSX = torch.arange(8.0).reshape(1, 8, 1)
    shards = [zigzag.shard(whole_BSX, rank) for rank in (0, 1)]
    assert shards[0].flatten().tolist() == [0, 1, 6, 7]
    assert torch.equal(zigzag.unshard(shards), whole_BSX)


def test_an_uneven_split_is_refused() -> None:
    with pytest.raises(UsageError, match="2999 tokens cannot be split evenly over 4 ranks; pad it to 3000"):
        contiguous(2999, 4)


@given(seq_len=st.integers(1, 10**6), multiple=st.integers(1, 64))
def test_padding_is_the_least_that_divides(seq_len: int, multiple: int) -> None:
    padded = padded_length(seq_len, multiple)
    assert padded % multiple == 0
    assert 0 <= padded - seq_len < multiple
