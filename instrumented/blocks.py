"""Which queries of one rank see which keys of another: the block that attention works on.

A kernel knows two masks, none and the diagonal of a square. Every layout here leaves, between any two ranks,
one rectangle with one of these masks, or nothing.

Shapes: B batch, L local sequence, H heads, D head dim. `X` stands for any dimensions after the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from torch import Tensor

from cptrace.schemes import CONTIGUOUS, STRIPED, ZIGZAG
from instrumented.layout import Layout


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangle of queries and keys.

    Attributes:
        queries: Which of the reader's tokens ask.
        keys: Which of the owner's tokens answer.
        is_causal: Whether query i of the block sees its keys up to i only; it is square then.
    """

    queries: slice
    keys: slice
    is_causal: bool

    def is_whole(self, local_len: int) -> bool:
        """Whether all tokens take part on both sides."""
        everything = slice(0, local_len)
        return self.queries == everything and self.keys == everything

    def of_queries(self, tensor_BLX: Tensor) -> Tensor:
        """Return the block's part of a tensor with a row per query."""
        return tensor_BLX[:, self.queries]

    def of_keys(self, tensor_BLX: Tensor) -> Tensor:
        """Return the block's part of a tensor with a row per key."""
        return tensor_BLX[:, self.keys]

    def of_result(self, result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the block's part of (out_BLHD, lse_BHL)."""
        out_BLHD, lse_BHL = result
        return out_BLHD[:, self.queries], lse_BHL[:, :, self.queries]

    def of_gradients(self, gradients: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the block's part of (dq_BLHD, dk_BLGD, dv_BLGD)."""
        dq_BLHD, dk_BLGD, dv_BLGD = gradients
        return self.of_queries(dq_BLHD), self.of_keys(dk_BLGD), self.of_keys(dv_BLGD)


Visible = Callable[[int, int], Block | None]
"""Returns the block of a reader's queries and an owner's keys, None where the mask hides all of it."""

CausalBlock = Callable[[int, int, int], Block | None]
"""The same under a causal mask, for (reader, owner, local_len) of one layout."""


def visible_blocks(layout: Layout, *, is_causal: bool) -> Visible:
    """Return the rule of a layout with or without a causal mask.

    Under a causal mask padding needs no care: it lies after all tokens, so none sees it. Without a mask keys
    that are padding are left out.

    Args:
        layout: Which tokens each rank holds.
        is_causal: Whether a token sees only itself and earlier tokens.
    """
    local_len, causal_block = layout.local_len, _CAUSAL_BLOCKS[layout.name]
    n_tokens = [layout.n_tokens(owner) for owner in range(layout.size)]

    def visible(reader: int, owner: int) -> Block | None:
        if is_causal:
            return causal_block(reader, owner, local_len)
        keys = slice(0, n_tokens[owner])
        return Block(slice(0, local_len), keys, False) if keys.stop else None

    return visible


def contiguous_block(reader: int, owner: int, local_len: int) -> Block | None:
    """Return the causal block of contiguous chunks: all of earlier ones, the diagonal, nothing of later ones."""
    if owner > reader:
        return None
    return Block(slice(0, local_len), slice(0, local_len), owner == reader)


def zigzag_block(reader: int, owner: int, local_len: int) -> Block | None:
    """Return the causal block of chunks r and 2P-1-r, each half of a rank's tokens.

    An earlier owner's first chunk precedes both of the reader's, its second follows both. A later owner's
    chunks both lie between the reader's. So half of a rectangle remains, as much work as the diagonal.
    """
    half = local_len // 2
    if owner == reader:
        return Block(slice(0, local_len), slice(0, local_len), True)
    if owner < reader:
        return Block(slice(0, local_len), slice(0, half), False)
    return Block(slice(half, local_len), slice(0, local_len), False)


def striped_block(reader: int, owner: int, local_len: int) -> Block | None:
    """Return the causal block of token-cyclic stripes: query i sees keys up to i, of later ranks up to i - 1."""
    if owner <= reader:
        return Block(slice(0, local_len), slice(0, local_len), True)
    if local_len == 1:
        return None
    return Block(slice(1, local_len), slice(0, local_len - 1), True)


_CAUSAL_BLOCKS: Final[Mapping[str, CausalBlock]] = MappingProxyType(
    {CONTIGUOUS: contiguous_block, ZIGZAG: zigzag_block, STRIPED: striped_block}
)
