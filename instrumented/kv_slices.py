"""Which part of which tensor a slice of KV heads and a contiguous piece of tokens is.

Shapes: B batch, L local tokens, S all tokens, H query heads, G key/value heads, D head dim; h, g of one slice.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from instrumented.layout import Layout
from instrumented.ops import Tensors
from instrumented.problem import Problem


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous run of a rank's queries, and the keys that they see.

    Attributes:
        queries: Which of the rank's tokens.
        keys: Which of all tokens.
    """

    queries: slice
    keys: slice


@dataclass(frozen=True, slots=True)
class KvSlices:
    """Cuts tensors by slices of heads and by the ranks' contiguous pieces of tokens.

    Attributes:
        problem: Sizes.
        layout: Which tokens each rank holds.
        n_slices: Into how many slices the KV heads are cut, and the query heads with them.
    """

    problem: Problem
    layout: Layout
    n_slices: int

    @property
    def n_pieces(self) -> int:
        """Contiguous runs of a rank's tokens: two in the zigzag of a causal mask."""
        return 2 if self.problem.is_causal else 1

    def pieces(self, rank: int) -> list[Piece]:
        """Return a rank's runs; without a mask their queries see all keys that are not padding."""
        length, is_causal = self.problem.local_len // self.n_pieces, self.problem.is_causal
        return [
            Piece(
                slice(number * length, (number + 1) * length),
                slice(0, whole.stop if is_causal else self.problem.seq_len),
            )
            for number, whole in enumerate(self.layout.pieces(rank, self.n_pieces))
        ]

    def by_piece(self, own: Tensors) -> list[Tensor]:
        """Return the contiguous runs of this rank's tokens of each tensor BLgD."""
        return [piece for tensor in own for piece in tensor.chunk(self.n_pieces, dim=1)]

    def by_owner(self, whole: Tensors) -> list[list[Tensor]]:
        """Return, for each of the runs, where every rank's one lies in a tensor BSgD."""
        runs = [self.layout.pieces(rank, self.n_pieces) for rank in range(self.layout.size)]
        return [[tensor[:, run] for run in run_of] for tensor in whole for run_of in zip(*runs, strict=True)]

    def heads(self, index: int, *tensors: Tensor) -> Tensors:
        """Return a slice's heads of tensors BLGD, or of BLHD those that share them."""
        return tuple(tensor.chunk(self.n_slices, dim=2)[index] for tensor in tensors)

    def queries(self, index: int, piece: Piece, *tensors_BLHD: Tensor) -> Tensors:
        """Return a slice's heads of a piece's queries."""
        return tuple(tensor[:, piece.queries] for tensor in self.heads(index, *tensors_BLHD))

    def result(self, index: int, piece: Piece, out_BLHD: Tensor, lse_BHL: Tensor) -> tuple[Tensor, Tensor]:
        """Return a slice's heads of a piece's (out, lse)."""
        (out_BLhD,) = self.queries(index, piece, out_BLHD)
        return out_BLhD, lse_BHL.chunk(self.n_slices, dim=1)[index][:, :, piece.queries]
