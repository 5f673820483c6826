"""Which part of the whole tensors each rank holds.

Most schemes split the sequence. Their layout is a permutation of the token positions, cut into equal pieces:
rank r holds the positions in piece r. Everything else (shard, unshard, position ids) follows from it. A
sequence that does not divide is padded with zeros at its end; since every rank holds its positions in rising
order, padding is always the tail of a rank's tokens.

Shapes: B batch, S sequence, L local sequence, P ranks, H heads. `X` stands for any dimensions after the
sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cptrace.schemes import CONTIGUOUS, HEADS, STRIPED, ZIGZAG


class Placement(Protocol):
    """A way to cut whole tensors into the ranks' parts, and to put them together again."""

    @property
    def name(self) -> str:
        """What the placement is called."""

    def n_tokens(self, rank: int) -> int:
        """Return how many of a rank's tokens are not padding; they come first."""

    def shard(self, whole: Tensor, rank: int) -> Tensor:
        """Return a rank's part of a whole tensor, contiguous, with padding."""

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor, without padding, from all ranks' parts in rank order."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A split of the sequence.

    Attributes:
        name: What the layout is called.
        seq_len: Tokens of the sequence without padding.
        positions_PL: Token positions, int64, row r for rank r, rising in each row; every position of the padded
            sequence exactly once.
    """

    name: str
    seq_len: int
    positions_PL: Tensor

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.positions_PL.shape[0]

    @property
    def local_len(self) -> int:
        """Tokens of a rank, padding included."""
        return self.positions_PL.shape[1]

    def position_ids(self, rank: int) -> Tensor:
        """Return the positions of a rank's tokens, int64 of shape [L]."""
        return self.positions_PL[rank]

    def n_tokens(self, rank: int) -> int:
        """Return how many of a rank's tokens are not padding; they come first."""
        return int((self.position_ids(rank) < self.seq_len).sum())

    def pieces(self, rank: int, n_pieces: int) -> list[slice]:
        """Return where `n_pieces` equal parts of a rank's tokens lie in the whole; each must be contiguous."""
        starts = self.position_ids(rank).reshape(n_pieces, -1)[:, 0].tolist()
        return [slice(start, start + self.local_len // n_pieces) for start in starts]

    def divided(self, n_parts: int) -> Layout:
        """Return the layout in which each rank's tokens are split, in order, over `n_parts` ranks."""
        return Layout(self.name, self.seq_len, self.positions_PL.reshape(self.size * n_parts, -1))

    def shard(self, whole: Tensor, rank: int) -> Tensor:
        """Return a rank's part of a whole tensor BSX, contiguous, shape [B, L, X]."""
        padding = whole.new_zeros(
            whole.shape[0], self.positions_PL.numel() - whole.shape[1], *whole.shape[2:]
        )
        return torch.cat([whole, padding], dim=1).index_select(1, self.position_ids(rank)).contiguous()

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor from all ranks' parts in rank order, shape [B, S, X]."""
        permuted_BSX = torch.cat(list(shards), dim=1)
        whole_BSX = torch.empty_like(permuted_BSX)
        whole_BSX[:, self.positions_PL.reshape(-1)] = permuted_BSX
        return whole_BSX[:, : self.seq_len]


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """A split of the heads: every rank holds all tokens of its heads.

    Attributes:
        seq_len: Tokens of the sequence.
        size: Number of ranks, which divides the heads of every tensor.
    """

    seq_len: int
    size: int

    @property
    def name(self) -> str:
        """What the placement is called."""
        return HEADS

    def n_tokens(self, rank: int) -> int:
        """Return the length of the sequence, which is never padded."""
        return self.seq_len

    def shard(self, whole: Tensor, rank: int) -> Tensor:
        """Return a rank's heads of a whole tensor BSHD, contiguous."""
        return whole.chunk(self.size, dim=2)[rank].contiguous()

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor BSHD from all ranks' heads in rank order."""
        return torch.cat(list(shards), dim=2)


def contiguous(seq_len: int, cp_size: int, multiple: int | None = None) -> Layout:
    """Return the layout in which rank r holds tokens r*L to (r+1)*L - 1.

    Args:
        seq_len: Tokens of the sequence.
        cp_size: Ranks.
        multiple: What to pad to a multiple of, itself a multiple of `cp_size`, which is the default.
    """
    positions_S = torch.arange(padded_length(seq_len, multiple or cp_size))
    return Layout(CONTIGUOUS, seq_len, positions_S.reshape(cp_size, -1))


def zigzag(seq_len: int, cp_size: int, multiple: int | None = None) -> Layout:
    """Return the layout in which rank r holds chunks r and 2P-1-r of 2P equal chunks.

    Under a causal mask the work of a query grows with its position; an early and a late chunk together make
    every rank's work the same, and also the work of every pair of ranks.

    Args:
        seq_len: Tokens of the sequence.
        cp_size: Ranks, P.
        multiple: What to pad to a multiple of, itself a multiple of 2P, which is the default.
    """
    positions_S = torch.arange(padded_length(seq_len, multiple or 2 * cp_size))
    chunks_2PC = positions_S.reshape(2 * cp_size, -1)
    early_PC, late_PC = chunks_2PC[:cp_size], chunks_2PC[cp_size:].flip(0)
    return Layout(ZIGZAG, seq_len, torch.cat([early_PC, late_PC], dim=1))


def striped(seq_len: int, cp_size: int) -> Layout:
    """Return the layout in which rank r holds tokens r, r + P, r + 2P and so on."""
    positions_S = torch.arange(padded_length(seq_len, cp_size))
    return Layout(STRIPED, seq_len, positions_S.reshape(-1, cp_size).T.contiguous())


def padded_length(seq_len: int, multiple: int) -> int:
    """Return the shortest length that is at least `seq_len` and divisible by `multiple`.

    Example:
        >>> padded_length(2999, 4)
        3000
    """
    return -(-seq_len // multiple) * multiple
