"""The sizes on which a scheme's traffic depends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ELEMENT_BYTES: Final = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
"""Bytes of one element, by name of the data type."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes on which a scheme's traffic, padding and limits depend; batch 1.

    Attributes:
        seq_len: Tokens of the whole sequence, padding included, S.
        cp_size: Ranks that share the sequence, P.
        heads: Query heads, Hq.
        kv_heads: Key and value heads, Hkv.
        head_dim: Elements per head, D.
        element_bytes: Bytes of one element of q, k and v, e.
        is_causal: Whether a token sees only itself and earlier tokens.
        ulysses_size: Ranks that split the heads, u, for schemes that split both ways.
        has_fp8_messages: Whether keys and values travel as fp8.
    """

    seq_len: int
    cp_size: int
    heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int
    is_causal: bool = False
    ulysses_size: int = 1
    has_fp8_messages: bool = False

    @property
    def local_len(self) -> int:
        """Tokens of one rank where the sequence is split, S/P."""
        return self.seq_len // self.cp_size

    @property
    def query_bytes(self) -> int:
        """Bytes of one rank's Q (or output), q."""
        return self.local_len * self.heads * self.head_dim * self.element_bytes

    @property
    def chunk_elements(self) -> int:
        """Elements of one rank's K (or V)."""
        return self.local_len * self.kv_heads * self.head_dim

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one rank's K (or V), c."""
        return self.chunk_elements * self.element_bytes
