"""All-gather attention one KV head at a time: the gather of the next head hides behind attention on this one.

The loop is that of `all_gather`, with as many slices as there are KV heads. Each slice carries the query heads
that share its KV head, so slices are independent and their results need no merging. What stays exposed is the
gather of the first slice, and backward also the reduce-scatter of the last one.

Source: Meta, "The Llama 3 Herd of Models", 2024, section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Sequence

from instrumented.problem import LayerState, Problem
from instrumented.runtime.api import Device
from instrumented.schemes.all_gather import AllGatherAttention, layout

__all__ = ["layout", "make"]


def make(device: Device, problem: Problem, layers: Sequence[LayerState]) -> AllGatherAttention:
    """Return all-gather attention in one slice for each KV head."""
    return AllGatherAttention(device, problem, layers, n_slices=problem.kv_heads)
