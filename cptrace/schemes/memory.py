"""What each scheme keeps on a rank besides a layer's inputs, results and gradients, in bytes.

An estimate for refusing runs that cannot fit; a run reports what it really allocated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

from cptrace.schemes.shape import AttentionShape
from cptrace.schemes.traffic import heads_per_rank, te_message_bytes

_SUM_BYTES: Final = 4


class Memory(NamedTuple):
    """Bytes of one rank.

    Attributes:
        per_layer: Kept of every layer until its backward pass.
        once: Buffers that all layers share.
    """

    per_layer: int
    once: int


def single(shape: AttentionShape) -> Memory:
    """Return the lse alone."""
    return Memory(_lse(shape), 0)


def all_gather(shape: AttentionShape) -> Memory:
    """Return all K and V and their gradients, with a mask twice the gradients."""
    n_whole = 6 if shape.is_causal else 4
    return Memory(_lse(shape), n_whole * shape.cp_size * shape.chunk_bytes)


def all_gather_sliced(shape: AttentionShape) -> Memory:
    """Return the same of two KV heads, and their packed pieces."""
    head = shape.chunk_bytes // shape.kv_heads
    return Memory(_lse(shape), (10 * shape.cp_size + 8) * head)


def ring(shape: AttentionShape) -> Memory:
    """Return sums and parts of one chunk, and double buffers of K, V and their gradients."""
    wide = max(_SUM_BYTES, shape.element_bytes) / shape.element_bytes
    queries = (2 * wide + 1) * shape.query_bytes
    return Memory(_lse(shape), int(queries + (4 * wide + 6) * shape.chunk_bytes) + _lse(shape))


def te(shape: AttentionShape) -> Memory:
    """Return a message per layer, a part per hop, and double buffers of K, V and their gradients."""
    wide = max(_SUM_BYTES, shape.element_bytes) / shape.element_bytes
    message = max(te_message_bytes(shape), 2 * shape.chunk_bytes)
    queries = (2 * wide + 1 + shape.cp_size) * shape.query_bytes
    once = int(queries) + 2 * message + 10 * shape.chunk_bytes + shape.cp_size * _lse(shape)
    return Memory(message + _lse(shape), once)


def ulysses(shape: AttentionShape) -> Memory:
    """Return the exchanged q, k, v and out per layer, gradients and packed heads once."""
    keys = shape.chunk_bytes // shape.kv_heads * heads_per_rank(shape.kv_heads, shape.cp_size) * shape.cp_size
    queries = shape.query_bytes
    return Memory(2 * queries + 2 * keys + _lse(shape), 3 * queries + 4 * keys)


def ulysses_chunked(shape: AttentionShape) -> Memory:
    """Return the same, with gradients of K and V for each chunk of queries."""
    whole = ulysses(shape)
    return Memory(whole.per_layer, whole.once + 6 * shape.chunk_bytes)


def usp(shape: AttentionShape) -> Memory:
    """Return what Ulysses keeps of its group and the ring of the exchanged tensors."""
    u = shape.ulysses_size
    if u in (1, shape.cp_size):
        return ring(shape) if u == 1 else ulysses(shape)
    group = replace(shape, seq_len=shape.local_len * u, cp_size=u)
    kv_heads = heads_per_rank(shape.kv_heads, u)
    inner = replace(group, cp_size=1, heads=shape.heads // u, kv_heads=kv_heads)
    pair = (ulysses(group), ring(inner))
    return Memory(sum(part.per_layer for part in pair), sum(part.once for part in pair))


def tensor_parallel(shape: AttentionShape) -> Memory:
    """Return the activations of the whole sequence."""
    return Memory(_lse(shape), shape.cp_size * shape.query_bytes)


def _lse(shape: AttentionShape) -> int:
    return shape.local_len * shape.heads * max(_SUM_BYTES, shape.element_bytes)
