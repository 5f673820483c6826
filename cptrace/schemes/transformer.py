"""A block of the model around attention: which sizes can be meant together, what it holds and what it sends.

Symbols: S/P tokens of a rank, E hidden, F ffn, Hq/Hkv heads, D head dim, T ranks that share the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cptrace.errors import UsageError
from cptrace.schemes.memory import Memory
from cptrace.schemes.shape import AttentionShape
from cptrace.schemes.traffic import Traffic

ATTENTION: Final = "attention"
LLAMA: Final = "llama"
MODELS: Final = (ATTENTION, LLAMA)
"""What a run computes: attention on random q, k and v, or a whole LLaMA-like block around it."""

FFN_MULTIPLE: Final = 16


def default_ffn(hidden: int) -> int:
    """Return 8/3 of the hidden size, rounded up to a multiple of 16.

    Three matrices of that width have as many weights as the two of 4 E that they stand in for.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020, section 3.
    """
    return -(-8 * hidden // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The sizes of one block.

    Attributes:
        attention: Of one rank: its heads, not those of all ranks that share the weights.
        hidden: Elements of a token between blocks, E.
        ffn: Columns of the whole feed-forward layer, F.
        tp_size: Ranks that share the weights, T.
    """

    attention: AttentionShape
    hidden: int
    ffn: int
    tp_size: int

    @property
    def n_weights(self) -> int:
        """Weights of one rank."""
        shape = self.attention
        columns = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim + 3 * self.ffn // self.tp_size
        return self.hidden * (columns + 2)

    @property
    def weight_bytes(self) -> int:
        """Bytes of one rank's weights, and of their gradients."""
        return self.n_weights * self.attention.element_bytes


def block_memory(shape: BlockShape) -> Memory:
    """Return what a rank holds of a block besides its attention: weights, gradients, and inputs of the backward pass.

    Per block: two norms' outputs, the middle and the output, gate, up and their product. Once: input, target,
    gradient and partial sum, the projection to q, k and v, and the gradients in the feed-forward layer.
    """
    tokens, ffn = shape.attention.local_len * shape.attention.element_bytes, shape.ffn // shape.tp_size
    qkv = (shape.attention.heads + 2 * shape.attention.kv_heads) * shape.attention.head_dim
    kept = tokens * (4 * shape.hidden + 3 * ffn)
    return Memory(2 * shape.weight_bytes + kept, tokens * (4 * shape.hidden + qkv + 3 * ffn))


def block_traffic(shape: BlockShape) -> tuple[Traffic, Traffic]:
    """Return what a rank sends for a block around its attention, forward and backward.

    Two sums of S/P tokens over the ranks that share the weights in each pass, and backward the gradients of the
    weights over the ranks that share the sequence; an all-reduce sends 2(N-1)/N of its tensor. Gradients are
    filled up to a multiple of P.
    """
    attention = shape.attention
    tokens = attention.local_len * shape.hidden * attention.element_bytes
    sums = Traffic(2 * _all_reduce(tokens, shape.tp_size), 2 if shape.tp_size > 1 else 0)
    filled = -(-shape.n_weights // attention.cp_size) * attention.cp_size * attention.element_bytes
    has_gradients = attention.cp_size > 1
    gradients = Traffic(_all_reduce(filled, attention.cp_size), int(has_gradients))
    return sums, Traffic(sums.n_bytes + gradients.n_bytes, sums.n_messages + gradients.n_messages)


def require_even_head_dim(head_dim: int) -> None:
    """Check that a head can be turned pair by pair.

    Raises:
        UsageError: It cannot.
    """
    if head_dim % 2:
        raise UsageError(
            f"--head-dim {head_dim}: --model {LLAMA} turns pairs of elements by their position; "
            f"use --head-dim {head_dim + 1}"
        )


def require_split(sizes: dict[str, int], tp_size: int, option: str) -> None:
    """Check that all of `sizes` divide over the ranks that share the weights.

    Args:
        sizes: Sizes by the option that sets them.
        tp_size: Ranks, T.
        option: The option that sets them.

    Raises:
        UsageError: One does not; the message lists the numbers of ranks over which all do.
    """
    uneven = [f"{name} {size}" for name, size in sizes.items() if size % tp_size]
    if uneven:
        fitting = [
            n for n in range(1, min(sizes.values()) + 1) if not any(size % n for size in sizes.values())
        ]
        raise UsageError(
            f"{option} {tp_size} does not divide {' and '.join(uneven)}; use {option} "
            + ", ".join(map(str, fitting))
        )


def _all_reduce(n_bytes: int, n_ranks: int) -> int:
    return 2 * (n_ranks - 1) * n_bytes // n_ranks
