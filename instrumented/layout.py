"""Which tokens each rank holds, and in which order.

A layout is a permutation of the token positions, cut into `cp_size` equal pieces: rank r holds the
positions in piece r. Everything else (shard, unshard, position ids) follows from it, for contiguous layouts
and others alike.

Shapes: B batch, S sequence, L local sequence, P cp_size. `X` stands for any dimensions after the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cptrace.errors import UsageError


@dataclass(frozen=True, slots=True)
class Layout:
    """The positions that each rank holds.

    Attributes:
        name: What the layout is called.
        positions_PL: Token positions, int64, row r for rank r; every position of the sequence exactly once.
    """

    name: str
    positions_PL: torch.Tensor

    def position_ids(self, rank: int) -> torch.Tensor:
        """Return the positions of a rank's tokens, int64 of shape [L]."""
        return self.positions_PL[rank]

    def shard(self, whole_BSX: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a rank's part of a whole tensor, contiguous, shape [B, L, X]."""
        return whole_BSX.index_select(1, self.position_ids(rank)).contiguous()

    def unshard(self, shards_BLX: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole tensor from all ranks' parts in rank order, shape [B, S, X]."""
        permuted_BSX = torch.cat(list(shards_BLX), dim=1)
        whole_BSX = torch.empty_like(permuted_BSX)
        whole_BSX[:, self.positions_PL.reshape(-1)] = permuted_BSX
        return whole_BSX


def contiguous(seq_len: int, cp_size: int) -> Layout:
    """Return the layout in which rank r holds tokens r*L to (r+1)*L - 1.

    Raises:
        UsageError: The sequence cannot be split evenly.
    """
    if seq_len % cp_size:
        raise UsageError(
            f"a sequence of {seq_len} tokens cannot be split evenly over {cp_size} ranks; pad it to "
            f"{padded_length(seq_len, cp_size)} tokens"
        )
    return Layout("contiguous", torch.arange(seq_len).reshape(cp_size, -1))


def padded_length(seq_len: int, multiple: int) -> int:
    """Return the shortest length that is at least `seq_len` and divisible by `multiple`.

    Example:
        >>> padded_length(2999, 4)
        3000
    """
    return -(-seq_len // multiple) * multiple
