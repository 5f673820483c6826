"""The weights of one block of the model: their shapes, how they are drawn, and how ranks split them.

Column-parallel weights (qkv, gate and up) are cut by what they put out, row-parallel ones (out, down) by what they
take in, so that between the two each rank works on its own heads and columns alone. The weights of the two norms
are on every rank. A rank keeps a block's weights in one flat tensor, and their gradients in another, so that one
all-reduce carries them all.

Shapes: E hidden, H query heads, G key/value heads, D head dim, F ffn, X = H D, Y = (H + 2G) D, Z = 2F; of the
whole model, or of one rank.
Source: Shoeybi et al., "Megatron-LM", 2019, section 3, for the split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Final, NamedTuple

import torch
from torch import Tensor

from cptrace.capture.run_spec import RunSpec
from instrumented.problem import make_generator

WEIGHT_NAMES: Final = ("norms", "qkv", "proj", "gate_up", "down")

_NORM_SPREAD: Final = 0.1  # around one, so that a norm's weight is not left out of what is checked


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """The sizes of one block.

    Attributes:
        hidden: Elements of a token between blocks, E.
        heads: Query heads, H.
        kv_heads: Key and value heads, G.
        head_dim: Elements per head, D.
        ffn: Columns of the feed-forward layer, F.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int

    @classmethod
    def of(cls, spec: RunSpec) -> BlockSizes:
        """Return the sizes of the whole model of a run."""
        return cls(spec.hidden, spec.heads, spec.kv_heads, spec.head_dim, spec.ffn)

    def of_rank(self, tp_size: int) -> BlockSizes:
        """Return the sizes of one of `tp_size` ranks that split the weights."""
        heads, kv_heads, ffn = (n // tp_size for n in (self.heads, self.kv_heads, self.ffn))
        return replace(self, heads=heads, kv_heads=kv_heads, ffn=ffn)

    @property
    def qkv_columns(self) -> tuple[int, int, int]:
        """Columns of q, of k and of v."""
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """The shape of each weight, in the order of `WEIGHT_NAMES`."""
        qkv, hidden, ffn = sum(self.qkv_columns), self.hidden, self.ffn
        return (2, hidden), (hidden, qkv), (self.qkv_columns[0], hidden), (hidden, 2 * ffn), (ffn, hidden)

    @property
    def n_weights(self) -> int:
        """Elements of all weights."""
        return sum(map(prod, self.shapes))


class BlockWeights(NamedTuple):
    """The weights of one block, or their gradients.

    Attributes:
        norms_2E: Of the norm before attention, and of the one before the feed-forward layer.
        qkv_EY: Projections to q, k and v, side by side.
        out_XE: Projection of the heads' output.
        gate_up_EZ: Projections to gate and up, side by side.
        down_FE: Projection back.
    """

    norms_2E: Tensor
    qkv_EY: Tensor
    out_XE: Tensor
    gate_up_EZ: Tensor
    down_FE: Tensor

    @classmethod
    def views(cls, flat: Tensor, sizes: BlockSizes) -> BlockWeights:
        """Return views of a flat tensor, which may be longer."""
        counts = list(map(prod, sizes.shapes))
        ends = list(accumulate(counts))
        pieces = (flat[end - count : end] for count, end in zip(counts, ends, strict=True))
        return cls(*(piece.view(shape) for piece, shape in zip(pieces, sizes.shapes, strict=True)))

    def of_rank(self, sizes: BlockSizes, tp_size: int, tp_rank: int) -> BlockWeights:
        """Return a rank's part of the whole weights, of `sizes`."""
        named = zip(WEIGHT_NAMES, self, strict=True)
        return BlockWeights(*(part_of(name, whole, sizes, tp_size, tp_rank) for name, whole in named))


def part_of(name: str, whole: Tensor, sizes: BlockSizes, tp_size: int, tp_rank: int) -> Tensor:
    """Return a rank's part of one whole weight.

    Args:
        name: One of `WEIGHT_NAMES`.
        whole: The weight, or its gradient.
        sizes: Sizes of the whole block.
        tp_size: Ranks that share the weights.
        tp_rank: The rank's number among them.
    """
    if name == "norms":
        return whole
    columns = {"qkv": sizes.qkv_columns, "gate_up": (sizes.ffn, sizes.ffn)}.get(name)
    if columns is None:
        return whole.chunk(tp_size, dim=0)[tp_rank]
    parts = whole.split(list(columns), dim=1)
    return torch.cat([part.chunk(tp_size, dim=1)[tp_rank] for part in parts], dim=1)


def make_weights(sizes: BlockSizes, seed: int, layer: int, data_type: torch.dtype) -> BlockWeights:
    """Return a block's whole weights, the same on every rank: normal, drawn in fp64, scaled to keep variances."""
    generator = make_generator(seed, layer)
    norms, *products = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in sizes.shapes
    )
    drawn = [1 + _NORM_SPREAD * norms, *(product * product.shape[0] ** -0.5 for product in products)]
    return BlockWeights(*(weight.to(data_type) for weight in drawn))


def make_tokens(
    shape: Sequence[int], seed: int, n_layers: int, data_type: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return what the first block gets and what the last one should put out: whole, standard normal, BSE each."""
    generator = make_generator(seed, n_layers)
    x_BSE, target_BSE = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return x_BSE.to(data_type), target_BSE.to(data_type)
