"""Striped ring: the ring over token-cyclic stripes, so that causal attention is the same work on every rank.

Rank r holds tokens r, r + P, r + 2P and so on. Query i of rank r stands before key i of rank s if r < s, and at
or after it else; so every hop is a causal square, shifted by one token where the owner comes later. The shift
costs those ranks one token's row and column, and nothing else differs between ranks.

Source: Brandon et al., "Striped Attention: Faster Ring Attention for Causal Transformers", 2023, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

from instrumented.blocks import visible_blocks
from instrumented.layout import Layout, contiguous, striped
from instrumented.problem import LayerState, Problem
from instrumented.runtime.api import Device
from instrumented.schemes.ring import RingAttention


def layout(problem: Problem) -> Layout:
    """Return the striped layout."""
    return (contiguous if problem.is_unbalanced else striped)(problem.seq_len, problem.cp_size)


def make(device: Device, problem: Problem, layers: Sequence[LayerState]) -> RingAttention:
    """Return the ring over stripes."""
    visible = visible_blocks(layout(problem), is_causal=problem.is_causal)
    return RingAttention(device, problem, layers, visible)
