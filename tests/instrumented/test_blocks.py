"""Blocks against the mask that token positions define, entry by entry."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from instrumented.blocks import (
    Block,
    CausalBlock,
    striped_block,
    visible_blocks,
    zigzag_block,
)
from instrumented.layout import Layout, contiguous, striped, zigzag

EACH = pytest.mark.parametrize("make", [contiguous, zigzag, striped])


def mask_of(block: Block | None, local_len: int) -> Tensor:
    """Return which of a rank's queries (rows) see which of another's keys."""
    mask_LL = torch.zeros(local_len, local_len, dtype=torch.bool)
    if block is not None:
        part = mask_LL[block.queries, block.keys]
        part[:] = True
        if block.is_causal:
            assert part.shape[0] == part.shape[1]
            part &= torch.ones_like(part).tril()
    return mask_LL


@EACH
@settings(deadline=None)  # the first call warms torch up
@given(cp_size=st.integers(1, 6), seq_len=st.integers(1, 30))
def test_causal_blocks_are_the_mask_of_the_positions(
    make: Callable[[int, int], Layout], cp_size: int, seq_len: int
) -> None:
    layout = make(seq_len, cp_size)
    visible = visible_blocks(layout, is_causal=True)
    for reader in range(cp_size):
        for owner in range(cp_size):
            queries_L1 = layout.position_ids(reader).unsqueeze(1)
            expected_LL = layout.position_ids(owner) <= queries_L1
            assert torch.equal(mask_of(visible(reader, owner), layout.local_len), expected_LL)


@EACH
@given(cp_size=st.integers(1, 6), seq_len=st.integers(1, 30))
def test_without_a_mask_all_keys_but_padding_are_seen(
    make: Callable[[int, int], Layout], cp_size: int, seq_len: int
) -> None:
    layout = make(seq_len, cp_size)
    visible = visible_blocks(layout, is_causal=False)
    for owner in range(cp_size):
        expected_LL = (layout.position_ids(owner) < seq_len).expand(layout.local_len, -1)
        assert torch.equal(mask_of(visible(0, owner), layout.local_len), expected_LL)


@pytest.mark.parametrize("rule", [zigzag_block, striped_block])
def test_balanced_layouts_give_every_rank_the_same_work(rule: CausalBlock) -> None:
    """Up to the diagonals, a token's row per hop of thousands."""
    size, local_len = 4, 64
    work = [
        sum(int(mask_of(rule(reader, owner, local_len), local_len).sum()) for owner in range(size))
        for reader in range(size)
    ]
    assert max(work) - min(work) <= size * local_len
    assert min(work) > 0.9 * size * local_len * local_len / 2


def test_a_block_cuts_tensors_and_results() -> None:
    block = Block(slice(1, 3), slice(0, 2), False)
    tensor_BLX, lse_BHL = torch.arange(4.0).reshape(1, 4, 1), torch.arange(8.0).reshape(1, 2, 4)
    assert block.of_queries(tensor_BLX).flatten().tolist() == [1, 2]
    assert block.of_keys(tensor_BLX).flatten().tolist() == [0, 1]
    out, lse = block.of_result((tensor_BLX, lse_BHL))
    assert (out.flatten().tolist(), lse.flatten().tolist()) == ([1, 2], [1, 2, 5, 6])
    assert [t.flatten().tolist() for t in block.of_gradients((tensor_BLX,) * 3)] == [[1, 2], [0, 1], [0, 1]]
    assert not block.is_whole(4)
    assert Block(slice(0, 4), slice(0, 4), True).is_whole(4)
