"""What each scheme sends: bytes and communication ops of one rank in one layer's pass.

Source: counting the transfers of each algorithm; DeepSpeed-Ulysses (Jacobs et al., 2023, section 3.2) and Ring
Attention (Liu et al., 2023, section 3) give the same leading terms.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

from cptrace.schemes.shape import AttentionShape

FP8_BYTES: Final = 1
FP8_SCALE_BYTES: Final = 4
"""A scale in fp32 travels with every fp8 block: one token of one head."""

FP8_ALIGNMENT_BYTES: Final = 8
"""An fp8 message is filled up to a multiple of this, so that gradients of any type can follow it."""

SCORE_BYTES: Final = 4
"""The largest score of a rank, in fp32, which all ranks tell each other when messages are fp8."""

MAX_HEAD_CHUNKS: Final = 4
"""More hide more of an all-to-all, and each one pays the link's latency again."""

TENSORS: Final = frozenset(("kv", "dkv", "kv+dkv", "score", "q", "k", "v", "out", "dout", "dq", "dk", "dv"))
"""What attention exchanges, as labels name it: only this is counted against the formulas below."""

_MIN_SUM_BYTES: Final = 4  # sums are kept in fp32, or fp64 for fp64


class Traffic(NamedTuple):
    """What one rank sends.

    Attributes:
        n_bytes: Bytes sent.
        n_messages: Communication ops, each of which may carry several tensors.
    """

    n_bytes: int
    n_messages: int


class HeadChunks(NamedTuple):
    """Into how many parts one rank's heads are cut after the all-to-all.

    Attributes:
        queries: Parts of the query heads.
        keys: Parts of the key/value heads: as many, or one.
    """

    queries: int
    keys: int


def none(shape: AttentionShape) -> Traffic:
    """Return no traffic."""
    return Traffic(0, 0)


def gather_forward(shape: AttentionShape) -> Traffic:
    """Return K and V to every other rank, in one op."""
    return Traffic(2 * (shape.cp_size - 1) * shape.chunk_bytes, 1)


def gather_backward(shape: AttentionShape) -> Traffic:
    """Return the gather once more, and the reduce-scatter of dK and dV, its inverse."""
    gather = gather_forward(shape)
    return Traffic(2 * gather.n_bytes, 2)


def sliced_forward(shape: AttentionShape) -> Traffic:
    """Return the bytes of the gather, in an op for each key/value head."""
    return Traffic(gather_forward(shape).n_bytes, shape.kv_heads)


def sliced_backward(shape: AttentionShape) -> Traffic:
    """Return the bytes of the gather's backward pass, in two ops for each key/value head."""
    return Traffic(gather_backward(shape).n_bytes, 2 * shape.kv_heads)


def ring_forward(shape: AttentionShape) -> Traffic:
    """Return P - 1 hops of K and V."""
    hops = shape.cp_size - 1
    return Traffic(2 * hops * shape.chunk_bytes, hops)


def ring_backward(shape: AttentionShape) -> Traffic:
    """Return the hops of K and V, and P hops of their gradients in the accumulator's type."""
    keys = ring_forward(shape)
    sum_bytes = max(_MIN_SUM_BYTES, shape.element_bytes)
    gradients = 2 * shape.cp_size * shape.chunk_elements * sum_bytes
    return Traffic(keys.n_bytes + gradients, keys.n_messages + shape.cp_size)


def te_forward(shape: AttentionShape) -> Traffic:
    """Return P - 1 hops of K and V, and with fp8 the exchange of the largest score."""
    hops = shape.cp_size - 1
    if not shape.has_fp8_messages:
        return Traffic(hops * te_message_bytes(shape), hops)
    return Traffic(hops * (te_message_bytes(shape) + SCORE_BYTES), hops + 1)


def te_backward(shape: AttentionShape) -> Traffic:
    """Return P messages: K and V in all but the last, dK and dV (never fp8) in all but the first."""
    hops = shape.cp_size - 1
    return Traffic(hops * (te_message_bytes(shape) + 2 * shape.chunk_bytes), shape.cp_size)


def te_message_bytes(shape: AttentionShape) -> int:
    """Return the bytes of one rank's K and V on the way."""
    if not shape.has_fp8_messages:
        return 2 * shape.chunk_bytes
    n_blocks = shape.local_len * shape.kv_heads
    n_bytes = 2 * (shape.chunk_elements * FP8_BYTES + n_blocks * FP8_SCALE_BYTES)
    return -(-n_bytes // FP8_ALIGNMENT_BYTES) * FP8_ALIGNMENT_BYTES


def ulysses(shape: AttentionShape) -> Traffic:
    """Return the all-to-alls of q, k, v and out (backward: of their gradients).

    Fewer KV heads than ranks are replicated to one per rank before they are sent.
    """
    others = shape.cp_size - 1
    query = shape.query_bytes // shape.cp_size
    keys = shape.chunk_bytes // shape.kv_heads * heads_per_rank(shape.kv_heads, shape.cp_size)
    return Traffic(others * 2 * (query + keys), 4)


def ulysses_chunked(shape: AttentionShape) -> Traffic:
    """Return the bytes of `ulysses`, in an all-to-all for each part of the heads."""
    chunks = head_chunks(shape)
    return Traffic(ulysses(shape).n_bytes, 2 * (chunks.queries + chunks.keys))


def usp_forward(shape: AttentionShape) -> Traffic:
    """Return the all-to-alls over u ranks and the ring over the P/u groups of them."""
    return _both(_usp_all_to_all(shape), ring_forward(_usp_ring(shape)))


def usp_backward(shape: AttentionShape) -> Traffic:
    """Return the same all-to-alls and the ring's backward pass."""
    ring = _usp_ring(shape)
    return _both(_usp_all_to_all(shape), ring_backward(ring) if ring.cp_size > 1 else none(ring))


def tensor_parallel(shape: AttentionShape) -> Traffic:
    """Return one all-reduce of the whole sequence's activations, S * Hq * D elements."""
    whole = shape.seq_len * shape.heads * shape.head_dim * shape.element_bytes
    return Traffic(2 * (shape.cp_size - 1) * whole // shape.cp_size, 1)


def heads_per_rank(kv_heads: int, n_ranks: int) -> int:
    """Return the key/value heads of one rank when heads are split, replicated where there are too few."""
    return max(kv_heads, n_ranks) // n_ranks


def head_chunks(shape: AttentionShape) -> HeadChunks:
    """Return into how many parts a rank's heads are cut: whole KV groups where it has several, else queries."""
    kv_heads = heads_per_rank(shape.kv_heads, shape.cp_size)
    if kv_heads > 1:
        n_chunks = _largest_divisor(kv_heads)
        return HeadChunks(n_chunks, n_chunks)
    return HeadChunks(_largest_divisor(shape.heads // shape.cp_size), 1)


def _largest_divisor(n_heads: int) -> int:
    fitting = range(1, min(n_heads, MAX_HEAD_CHUNKS) + 1)
    return max(n for n in fitting if n_heads % n == 0)


def _usp_all_to_all(shape: AttentionShape) -> Traffic:
    if shape.ulysses_size == 1:
        return none(shape)
    n_tokens = shape.local_len * shape.ulysses_size  # of one group
    return ulysses(replace(shape, seq_len=n_tokens, cp_size=shape.ulysses_size))


def _usp_ring(shape: AttentionShape) -> AttentionShape:
    """Return what one rank's ring sees: the whole sequence over P/u ranks, but only its own heads."""
    u = shape.ulysses_size
    kv_heads = heads_per_rank(shape.kv_heads, u)
    return replace(shape, cp_size=shape.cp_size // u, heads=shape.heads // u, kv_heads=kv_heads)


def _both(first: Traffic, second: Traffic) -> Traffic:
    return Traffic(first.n_bytes + second.n_bytes, first.n_messages + second.n_messages)
