"""Unified sequence parallelism: Ulysses within groups of u ranks, a ring over the P/u groups.

Rank g u + i is member i of Ulysses group g; the all-to-alls of a group give each member all of the group's
tokens for a part of the heads. Members with the same i hold the same heads of different groups' tokens, and
these rings of P/u ranks attend as `ring` does, or under a causal mask as `zigzag_ring`. Ulysses groups are
neighbours, since they exchange the most and should be on one node.

With u = P only Ulysses is left and with u = 1 only the ring.

Source: Fang and Zhao, "USP: A Unified Sequence Parallelism Approach for Long Context Generative AI", 2024,
section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from instrumented.blocks import visible_blocks
from instrumented.comm import Group
from instrumented.layout import Layout, contiguous, zigzag
from instrumented.problem import LayerState, Problem
from instrumented.runtime.api import Device, Stream
from instrumented.schemes.base import Attention
from instrumented.schemes.ring import RingAttention
from instrumented.schemes.ulysses import MakeInner, UlyssesAttention, make_single


def layout(problem: Problem) -> Layout:
    """Return the ring's layout with each group's tokens split over its members."""
    return _ring_layout(problem).divided(problem.ulysses_size)


def make(device: Device, problem: Problem, layers: Sequence[LayerState]) -> Attention:
    """Return Ulysses around a ring; every rank is in one group of each kind."""
    u, size = problem.ulysses_size, problem.cp_size
    rings = Group(tuple(tuple(range(i, size, u)) for i in range(u)), device.rank)
    if u == size:
        return UlyssesAttention(device, problem, layers, make_single(device))
    make_inner = _make_ring(device, rings, _ring_layout(problem))
    if u == 1:
        return make_inner(problem, layers, device.stream(), 0)
    groups = Group(tuple(tuple(range(g, g + u)) for g in range(0, size, u)), device.rank)
    return UlyssesAttention(device, problem, layers, make_inner, group=groups)


def _ring_layout(problem: Problem) -> Layout:
    """Return which tokens each Ulysses group holds; they divide evenly over its members."""
    ring_size = problem.cp_size // problem.ulysses_size
    if not problem.is_balanced:
        return contiguous(problem.seq_len, ring_size, problem.padded_len)
    return zigzag(problem.seq_len, ring_size, problem.padded_len)


def _make_ring(device: Device, group: Group, ring_layout: Layout) -> MakeInner:
    def make_inner(
        problem: Problem, layers: Sequence[LayerState], compute: Stream, chunk: int
    ) -> RingAttention:
        visible = visible_blocks(ring_layout, is_causal=problem.is_causal)
        sizes = replace(problem, cp_size=group.size)
        return RingAttention(device, sizes, layers, visible, group=group, compute=compute)

    return make_inner
