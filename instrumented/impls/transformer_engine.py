"""Context parallelism of NVIDIA Transformer Engine: its p2p ring, all-gather, all-to-all, and a2a+p2p.

With a causal mask it wants tokens in two chunks per rank (zigzag), whatever the kind of communication.

Source: NVIDIA's documentation of Transformer Engine, `DotProductAttention.set_context_parallel_group`.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from instrumented.impls.base import Attend, Library, dual_chunks, new_group
from instrumented.problem import Problem

_COMM_TYPES: Final = {"te": "p2p", "all_gather": "all_gather", "ulysses": "a2a", "usp": "a2a+p2p"}


def make(scheme: str, problem: Problem) -> Attend:
    """Return a module of Transformer Engine on one rank's part of the sequence."""
    library = importlib.import_module("transformer_engine.pytorch")
    attention = library.DotProductAttention(
        problem.heads,
        problem.head_dim,
        num_gqa_groups=problem.kv_heads,
        attention_dropout=0.0,
        qkv_format="bshd",
        attn_mask_type="causal" if problem.is_causal else "no_mask",
        softmax_scale=problem.softmax_scale,
    )
    ranks = list(range(problem.cp_size))
    attention.set_context_parallel_group(
        _groups(scheme, problem), ranks, torch.cuda.Stream(), _COMM_TYPES[scheme]
    )

    def attend(q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor) -> Tensor:
        out: Tensor = attention(q_BLHD, k_BLGD, v_BLGD)
        return out.view(q_BLHD.shape)

    return attend


def _groups(scheme: str, problem: Problem) -> Any:
    """Return the group of all ranks, or for a2a+p2p the rank's all-to-all group and its ring."""
    if scheme != "usp":
        return new_group()
    u, size = problem.ulysses_size, problem.cp_size
    partitions = (
        [range(start, start + u) for start in range(0, size, u)],
        [range(start, size, u) for start in range(u)],
    )
    made = [[(ranks, new_group(ranks)) for ranks in partition] for partition in partitions]
    return [next(group for ranks, group in groups if dist.get_rank() in ranks) for groups in made]


LIBRARY: Final = Library("transformer-engine", ("te", "all_gather", "ulysses", "usp"), make, dual_chunks)
