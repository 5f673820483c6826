"""Ulysses, and Ulysses around a ring, of feifeibear/long-context-attention (USP).

Source: https://github.com/feifeibear/long-context-attention; Fang and Zhao, "USP", 2024.
"""

from __future__ import annotations

import importlib
from typing import Final

import torch.distributed as dist
from torch import Tensor

from instrumented.impls.base import Attend, Library
from instrumented.layout import Placement
from instrumented.problem import Problem
from instrumented.schemes import find

_BALANCED: Final = "zigzag"
_PLAIN: Final = "basic"


def make(scheme: str, problem: Problem) -> Attend:
    """Return the library's attention over its two groups; Ulysses alone is the one with a ring of one."""
    library = importlib.import_module("yunchang")
    ulysses = problem.ulysses_size if scheme == "usp" else problem.cp_size
    ring = problem.cp_size // ulysses
    library.set_seq_parallel_pg(ulysses, ring, dist.get_rank(), problem.cp_size)
    kind = _BALANCED if problem.is_causal and ring > 1 else _PLAIN
    attention = library.LongContextAttention(scatter_idx=2, gather_idx=1, ring_impl_type=kind)

    def attend(q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor) -> Tensor:
        out_BLHD: Tensor = attention(
            q_BLHD, k_BLGD, v_BLGD, softmax_scale=problem.softmax_scale, causal=problem.is_causal
        )
        return out_BLHD

    return attend


def placement(scheme: str, problem: Problem) -> Placement:
    """Return our layout of the same scheme, which is the library's: Ulysses groups are neighbours."""
    return find(scheme).placement(problem)


LIBRARY: Final = Library("yunchang", ("ulysses", "usp"), make, placement)
