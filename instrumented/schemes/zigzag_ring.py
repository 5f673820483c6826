"""Zigzag ring: the ring over chunks r and 2P-1-r, so that causal attention is the same work on every rank.

With contiguous chunks rank r works on r + 1 of P hops and the last rank sets the pace. Here every hop but the
first is half a block on every rank: of an earlier owner, all queries with its first chunk; of a later one, the
second half of the queries with both its chunks. The first hop is the diagonal, which is also half.

Source: the layout of ring-flash-attention and of Transformer Engine's load-balanced causal ring; Meta's
"The Llama 3 Herd of Models", 2024, section 3.3.2, uses it with an all-gather.
"""

from __future__ import annotations

from collections.abc import Sequence

from instrumented.blocks import visible_blocks
from instrumented.layout import Layout, contiguous, zigzag
from instrumented.problem import LayerState, Problem
from instrumented.runtime.api import Device
from instrumented.schemes.ring import RingAttention


def layout(problem: Problem) -> Layout:
    """Return the zigzag layout."""
    cut = contiguous if problem.is_unbalanced else zigzag
    return cut(problem.seq_len, problem.cp_size, problem.padded_len)


def make(device: Device, problem: Problem, layers: Sequence[LayerState]) -> RingAttention:
    """Return the ring over pairs of chunks."""
    visible = visible_blocks(layout(problem), is_causal=problem.is_causal)
    return RingAttention(device, problem, layers, visible)
