"""Packing heads for an all-to-all, against loops over ranks and heads."""

from __future__ import annotations

import pytest
import torch

from instrumented.heads import HeadPart, pack, unpack

CASES = pytest.mark.parametrize(
    ("heads", "part"),
    [
        (8, HeadPart(4)),
        (8, HeadPart(4, n_chunks=2, chunk=1)),
        (12, HeadPart(2, n_chunks=3, chunk=2)),
        (2, HeadPart(4, n_replicas=2)),
        (1, HeadPart(4, n_replicas=4)),
    ],
)


def heads_of(part: HeadPart, heads: int, rank: int) -> list[int]:
    """Return the numbers of the heads that go to a rank."""
    if part.n_replicas > 1:
        return [rank // part.n_replicas]
    own = list(range(rank * heads // part.n_ranks, (rank + 1) * heads // part.n_ranks))
    size = len(own) // part.n_chunks
    return own[part.chunk * size : (part.chunk + 1) * size]


@CASES
def test_each_rank_gets_its_heads(heads: int, part: HeadPart) -> None:
    source_BLHD = torch.randn(1, 3, heads, 2)
    target_NBLhD = torch.zeros(part.n_ranks, 1, 3, part.piece_heads(heads), 2)
    pack(part, target_NBLhD, source_BLHD)
    for rank in range(part.n_ranks):
        assert torch.equal(target_NBLhD[rank], source_BLHD[:, :, heads_of(part, heads, rank)])


@CASES
@pytest.mark.parametrize("data_type", [torch.float64, torch.bfloat16], ids=str)
def test_replicas_are_summed_and_other_heads_left_alone(
    heads: int, part: HeadPart, data_type: torch.dtype
) -> None:
    source_NBLhD = torch.randn(part.n_ranks, 1, 3, part.piece_heads(heads), 2).to(data_type)
    target_BLHD = torch.full((1, 3, heads, 2), 7.0, dtype=data_type)
    unpack(part, target_BLHD, source_NBLhD)
    expected = torch.full((1, 3, heads, 2), 7.0, dtype=torch.float64)
    for rank in range(part.n_ranks):
        expected[:, :, heads_of(part, heads, rank)] = 0.0
    for rank in range(part.n_ranks):
        expected[:, :, heads_of(part, heads, rank)] += source_NBLhD[rank].double()
    # The sum is rounded once, so it is off by half a unit in the last place.
    tolerance = torch.finfo(data_type).eps
    torch.testing.assert_close(target_BLHD.double(), expected, rtol=tolerance, atol=tolerance / 1000)
