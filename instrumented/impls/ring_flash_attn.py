"""The rings of zhuzilin/ring-flash-attention: plain, zigzag and striped, by flash-attn kernels.

Source: https://github.com/zhuzilin/ring-flash-attention
"""

from __future__ import annotations

import importlib
from typing import Final

from torch import Tensor

from cptrace.errors import UsageError
from instrumented import layout
from instrumented.impls.base import Attend, Library, new_group
from instrumented.layout import Placement
from instrumented.problem import Problem

_FUNCTIONS: Final = {
    "ring": "ring_flash_attn_func",
    "zigzag_ring": "zigzag_ring_flash_attn_func",
    "striped_ring": "stripe_flash_attn_func",
}
_LAYOUTS: Final = {"ring": layout.contiguous, "zigzag_ring": layout.zigzag, "striped_ring": layout.striped}


def make(scheme: str, problem: Problem) -> Attend:
    """Return the library's function for a ring.

    Raises:
        UsageError: Attention is not causal, and the ring is one that only balances a causal mask.
    """
    if scheme != "ring" and not problem.is_causal:
        raise UsageError(
            f"--impl ring-flash-attn --scheme {scheme} is for causal attention alone; use --causal"
        )
    function = getattr(importlib.import_module("ring_flash_attn"), _FUNCTIONS[scheme])
    group = new_group()

    def attend(q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor) -> Tensor:
        out_BLHD: Tensor = function(
            q_BLHD,
            k_BLGD,
            v_BLGD,
            softmax_scale=problem.softmax_scale,
            causal=problem.is_causal,
            group=group,
        )
        return out_BLHD

    return attend


def placement(scheme: str, problem: Problem) -> Placement:
    """Return the layout of a ring, which is ours of the same name."""
    return _LAYOUTS[scheme](problem.seq_len, problem.cp_size)


LIBRARY: Final = Library("ring-flash-attn", ("ring", "zigzag_ring", "striped_ring"), make, placement)
