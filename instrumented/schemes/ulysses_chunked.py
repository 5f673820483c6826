"""Ulysses by groups of heads: one group's all-to-alls run while attention works on another group.

Heads are independent, so nothing but the shape of the exchange ties them together. The loop is that of
`ulysses`, with a rank's heads cut into up to four chunks: whole KV groups where a rank has several, else query
heads, which then share their K and V and bring them with the first chunk. Inputs and results go through
communicators of their own, since a result waits for attention and the next inputs must not wait with it. What
stays exposed is the first chunk's way in and the last chunk's way out.

Source: counting dependencies; Fang and Zhao, "USP", 2024, section 3.1, describes the exchange by head.
"""

from __future__ import annotations

from collections.abc import Sequence

from cptrace.schemes.shape import AttentionShape
from cptrace.schemes.traffic import head_chunks
from instrumented.problem import LayerState, Problem
from instrumented.runtime.api import Device
from instrumented.schemes.ulysses import UlyssesAttention, layout, make_single

__all__ = ["layout", "make"]


def make(device: Device, problem: Problem, layers: Sequence[LayerState]) -> UlyssesAttention:
    """Return Ulysses over all ranks, in as many chunks of heads as the traffic formula counts."""
    shape = AttentionShape(
        problem.seq_len,
        problem.cp_size,
        problem.heads,
        problem.kv_heads,
        problem.head_dim,
        problem.data_type.itemsize,
    )
    return UlyssesAttention(device, problem, layers, make_single(device), chunks=head_chunks(shape))
