"""The context-parallel schemes that can be run, and what each one sends.

The formulas count what one rank sends for one layer, batch 1. `instrumented/schemes` binds the same names
to code.

Source: counting the transfers of each algorithm; the ring's are those of Liu et al., "Ring Attention with
Blockwise Transformers for Near-Infinite Context", section 3, with gradients of K and V travelling with
their chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cptrace.errors import UsageError


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes on which a scheme's traffic depends.

    Attributes:
        seq_len: Tokens of the whole sequence, S.
        cp_size: Ranks that share the sequence, P.
        heads: Query heads, Hq.
        kv_heads: Key and value heads, Hkv.
        head_dim: Elements per head, D.
        element_bytes: Bytes of one element of q, k and v.
    """

    seq_len: int
    cp_size: int
    heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int

    @property
    def chunk_elements(self) -> int:
        """Elements of one rank's K (or V)."""
        return self.seq_len // self.cp_size * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class SchemeInfo:
    """One scheme: what it is called, how it communicates, and how much.

    Attributes:
        name: Its name on the command line.
        summary: One line for lists.
        pattern: The collective kinds it uses.
        layout: How it places the sequence on the ranks.
        limits: What it cannot do, for people.
        min_cp_size: Fewest ranks it makes sense with.
        forward_bytes: Bytes that one rank sends in one layer's forward pass.
        backward_bytes: The same for the backward pass.
        forward_messages: Communication ops of one rank in one layer's forward pass.
        backward_messages: The same for the backward pass.
    """

    name: str
    summary: str
    pattern: str
    layout: str
    limits: str
    min_cp_size: int
    forward_bytes: Callable[[AttentionShape], int]
    backward_bytes: Callable[[AttentionShape], int]
    forward_messages: Callable[[AttentionShape], int]
    backward_messages: Callable[[AttentionShape], int]


def _ring_forward_bytes(shape: AttentionShape) -> int:
    return 2 * (shape.cp_size - 1) * shape.chunk_elements * shape.element_bytes


def _ring_backward_bytes(shape: AttentionShape) -> int:
    gradient_bytes = max(4, shape.element_bytes)  # gradients travel in the accumulator's type: fp32, or fp64
    return _ring_forward_bytes(shape) + 2 * shape.cp_size * shape.chunk_elements * gradient_bytes


SCHEMES: tuple[SchemeInfo, ...] = (
    SchemeInfo(
        name="ring",
        summary="K and V travel round a ring while each rank attends to the chunk it holds; double-buffered",
        pattern="send_recv",
        layout="contiguous",
        limits="sequence divisible by the ranks; with --causal rank r works on r+1 of P hops: unbalanced",
        min_cp_size=2,
        forward_bytes=_ring_forward_bytes,
        backward_bytes=_ring_backward_bytes,
        forward_messages=lambda shape: shape.cp_size - 1,
        backward_messages=lambda shape: 2 * shape.cp_size - 1,
    ),
)


def find_scheme(name: str) -> SchemeInfo:
    """Return the scheme called `name`.

    Raises:
        UsageError: There is none.
    """
    for scheme in SCHEMES:
        if scheme.name == name:
            return scheme
    names = ", ".join(scheme.name for scheme in SCHEMES)
    raise UsageError(f"--scheme {name}: no such scheme; choose one of {names}")
