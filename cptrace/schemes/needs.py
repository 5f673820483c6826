"""What a scheme asks of the heads and of the sequence's length; the errors name the values that would do."""

from __future__ import annotations

import math

from cptrace.errors import UsageError
from cptrace.schemes.shape import AttentionShape
from cptrace.schemes.traffic import head_chunks

_MOST_LISTED = 64


def nothing(shape: AttentionShape) -> None:
    """Accept everything."""


def per_rank(shape: AttentionShape) -> int:
    """Return the multiple that the sequence is padded to so that every rank has as many tokens."""
    return shape.cp_size


def per_half_chunk(shape: AttentionShape) -> int:
    """Return the multiple for layouts that give each rank two chunks when attention is causal."""
    return 2 * shape.cp_size if shape.is_causal else shape.cp_size


def per_half_chunk_always(shape: AttentionShape) -> int:
    """Return the multiple for layouts that always give each rank two chunks."""
    return 2 * shape.cp_size


def per_rank_and_half_chunk(shape: AttentionShape) -> int:
    """Return the multiple for a zigzag over the P/u groups whose tokens u ranks share."""
    n_chunks = 2 * shape.cp_size // shape.ulysses_size if shape.is_causal else 1
    return math.lcm(shape.cp_size, n_chunks)


def one_token(shape: AttentionShape) -> int:
    """Return 1: the sequence is not split."""
    return 1


def split_heads(shape: AttentionShape) -> None:
    """Check that query heads, and key/value heads after replication, can be split over all ranks.

    Raises:
        UsageError: They cannot.
    """
    _require_split(shape, shape.cp_size, "--cp-size", _fitting_sizes(shape, 2))


def chunk_heads(shape: AttentionShape) -> None:
    """Check that heads can be split and that each rank then has several to pipeline.

    Raises:
        UsageError: They cannot.
    """
    split_heads(shape)
    if head_chunks(shape).queries == 1:
        per_rank_heads = shape.heads // shape.cp_size
        raise UsageError(
            f"--heads {shape.heads}: scheme ulysses_chunked needs heads to pipeline, and {per_rank_heads} per rank "
            f"cannot be cut into 2 to 4 parts; use --heads {2 * shape.cp_size}, or --scheme ulysses"
        )


def split_some_heads(shape: AttentionShape) -> None:
    """Check that the Ulysses group divides the ranks and that the heads can be split over it.

    Raises:
        UsageError: They cannot.
    """
    u = shape.ulysses_size
    fitting = [n for n in _fitting_sizes(shape, 1) if shape.cp_size % n == 0]
    if shape.cp_size % u:
        raise UsageError(
            f"--ulysses-size {u} does not divide --cp-size {shape.cp_size}; use --ulysses-size {_listed(fitting)}"
        )
    _require_split(shape, u, "--ulysses-size", fitting)


def whole_kv_heads(shape: AttentionShape) -> None:
    """Check that all heads can be split over all ranks without replication.

    Raises:
        UsageError: They cannot.
    """
    if shape.kv_heads % shape.cp_size:
        fitting = [n for n in range(2, _MOST_LISTED + 1) if shape.kv_heads % n == 0]
        raise UsageError(
            f"--kv-heads {shape.kv_heads} cannot be split over --cp-size {shape.cp_size}; "
            + _advice("--cp-size", fitting, f"--kv-heads {shape.cp_size}")
        )


def _require_split(shape: AttentionShape, n_ranks: int, option: str, fitting: list[int]) -> None:
    if shape.heads % n_ranks:
        other = f"--heads {-(-shape.heads // n_ranks) * n_ranks}"
        raise UsageError(
            f"--heads {shape.heads} cannot be split over {option} {n_ranks}; {_advice(option, fitting, other)}"
        )
    if shape.kv_heads % n_ranks and n_ranks % shape.kv_heads:
        raise UsageError(
            f"--kv-heads {shape.kv_heads} can neither be split over nor replicated to {option} {n_ranks}; "
            + _advice(option, fitting, f"--kv-heads {n_ranks}")
        )


def _fitting_sizes(shape: AttentionShape, least: int) -> list[int]:
    return [
        n
        for n in range(least, min(shape.heads, _MOST_LISTED) + 1)
        if shape.heads % n == 0 and (shape.kv_heads % n == 0 or n % shape.kv_heads == 0)
    ]


def _advice(option: str, fitting: list[int], other: str) -> str:
    return f"use {option} {_listed(fitting)}, or {other}" if fitting else f"use {other}"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
