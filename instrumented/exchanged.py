"""The tensors around an all-to-all of heads: what is sent in rank order, and what attention then works on.

Shapes: B batch, L local tokens, N ranks of the group, h heads of one rank and chunk, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from cptrace.schemes.traffic import HeadChunks
from instrumented.heads import HeadPart
from instrumented.problem import BATCH, LayerState, Problem
from instrumented.runtime.api import Device


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one tensor's all-to-all needs: which heads go where, and a buffer NBLhD of them in rank order."""

    part: HeadPart
    buffer_NBLhD: Tensor

    @property
    def pieces(self) -> Sequence[Tensor]:
        """Each rank's piece of the buffer, BLhD."""
        return self.buffer_NBLhD.unbind(0)

    @property
    def heads(self) -> int:
        """Heads of one piece, h."""
        return self.buffer_NBLhD.shape[3]


def make_exchanges(
    device: Device, problem: Problem, n_ranks: int, heads: int, n_chunks: int
) -> list[Exchange]:
    """Return an exchange for each chunk of a tensor with so many heads."""
    exchanges = []
    for chunk in range(n_chunks):
        part = HeadPart(n_ranks, max(1, n_ranks // heads), n_chunks, chunk)
        shape = (n_ranks, BATCH, problem.local_len, part.piece_heads(heads), problem.head_dim)
        exchanges.append(Exchange(part, device.empty(shape, problem.data_type)))
    return exchanges


def make_states(device: Device, sizes: Problem, n_layers: int, chunks: HeadChunks) -> list[list[LayerState]]:
    """Return the exchanged tensors by chunk and layer.

    Inputs and output are kept per layer for the backward pass, whose own tensors all layers share. Chunks share
    k and v where the keys are not cut.
    """

    def pair(shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        return device.empty(shape, sizes.data_type), device.empty(shape, sizes.data_type)

    kv = [[pair(sizes.kv_shape) for _ in range(n_layers)] for _ in range(chunks.keys)]
    states = []
    for chunk in range(chunks.queries):
        (dout, dq), (dk, dv) = pair(sizes.q_shape), pair(sizes.kv_shape)
        q_out = [pair(sizes.q_shape) for _ in range(n_layers)]
        pairs = zip(q_out, kv[min(chunk, chunks.keys - 1)], strict=True)
        states.append([LayerState(q, k, v, dout, out, dq, dk, dv) for (q, out), (k, v) in pairs])
    return states
