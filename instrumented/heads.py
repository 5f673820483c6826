"""Cutting heads into the ranks' parts and putting them together: the copies around an all-to-all.

An all-to-all sends one contiguous piece to each rank, so heads must be brought into rank order first. Where
there are fewer heads than ranks, each is sent to several; what comes back for it is then summed.

Shapes: B batch, L local tokens, H heads, N ranks, h heads of one piece, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from instrumented.softmax import accumulator_dtype


@dataclass(frozen=True, slots=True)
class HeadPart:
    """Which heads each rank gets: part `chunk` of `n_chunks` of the rank's own heads.

    Attributes:
        n_ranks: Ranks, N.
        n_replicas: Ranks that get the same head; 1 where there are enough heads.
        n_chunks: Parts of a rank's heads.
        chunk: Which of the parts.
    """

    n_ranks: int
    n_replicas: int = 1
    n_chunks: int = 1
    chunk: int = 0

    def piece_heads(self, heads: int) -> int:
        """Return the heads of one piece, h."""
        return heads * self.n_replicas // self.n_ranks // self.n_chunks

    def view(self, tensor_BLHD: Tensor) -> Tensor:
        """Return the heads of each rank that is not a replica, as a view NBLhD."""
        n_owners = self.n_ranks // self.n_replicas
        parts = tensor_BLHD.unflatten(2, (n_owners, self.n_chunks, -1))
        return parts[:, :, :, self.chunk].permute(2, 0, 1, 3, 4)


def pack(part: HeadPart, target_NBLhD: Tensor, source_BLHD: Tensor) -> None:
    """Write the piece of each rank."""
    replicas = target_NBLhD.unflatten(0, (-1, part.n_replicas))
    replicas.copy_(part.view(source_BLHD).unsqueeze(1).expand_as(replicas))


def unpack(part: HeadPart, target_BLHD: Tensor, source_NBLhD: Tensor) -> None:
    """Write the pieces of all ranks where they belong, the sum of those that are replicas of one head."""
    replicas = source_NBLhD.unflatten(0, (-1, part.n_replicas))
    if part.n_replicas == 1:
        part.view(target_BLHD).copy_(replicas[:, 0])
        return
    part.view(target_BLHD).copy_(replicas.sum(dim=1, dtype=accumulator_dtype(source_NBLhD.dtype)))
