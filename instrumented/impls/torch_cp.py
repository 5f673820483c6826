"""PyTorch's own experimental context parallelism: it replaces `scaled_dot_product_attention` inside a context.

Its ring moves K and V by all-to-all and its other form gathers them. Tokens lie in two chunks per rank under a causal
mask, and without one its balancing must be off. It takes fp16 and bf16.

Source: PyTorch tutorial "Introduction to Context Parallel"; torch/distributed/tensor/experimental/_attention.py.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from typing import Final

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cptrace.errors import UsageError
from instrumented.impls.base import Around, Attend, Library, dual_chunks
from instrumented.problem import Problem

_DEVICE: Final = "cuda"
_ROTATION: Final = {"te": "alltoall", "all_gather": "allgather"}


def make(scheme: str, problem: Problem) -> Attend:
    """Return torch's attention, to be called inside the context, on one rank's part of the sequence.

    Raises:
        UsageError: The data type is one that its kernel does not take.
    """
    if problem.data_type not in (torch.float16, torch.bfloat16):
        raise UsageError("--impl torch runs on flash attention alone; use --dtype bf16")
    internals = importlib.import_module("torch.distributed.tensor.experimental._attention")
    internals.set_rotate_method(_ROTATION[scheme])
    internals._cp_options.enable_load_balance = problem.is_causal

    def attend(q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor) -> Tensor:
        qkv = (tensor.transpose(1, 2) for tensor in (q_BLHD, k_BLGD, v_BLGD))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out_BHLD = torch.nn.functional.scaled_dot_product_attention(
                *qkv,
                is_causal=problem.is_causal,
                scale=problem.softmax_scale,
                enable_gqa=problem.kv_heads != problem.heads,
            )
        return out_BHLD.transpose(1, 2)

    return attend


def around(problem: Problem) -> Around:
    """Return torch's context on a mesh of all ranks.

    It would cut whole tensors into the ranks' parts, and asks for at least one: ours are cut, so it gets an empty one
    of the sequence's length, which only tells it that.
    """
    experimental = importlib.import_module("torch.distributed.tensor.experimental")
    mesh = importlib.import_module("torch.distributed.device_mesh").init_device_mesh(
        _DEVICE, (problem.cp_size,)
    )
    length_S = torch.empty(problem.seq_len, device=_DEVICE)

    def context() -> AbstractContextManager[object]:
        copy_S = length_S.clone()  # it is cut in place
        made: AbstractContextManager[object] = experimental.context_parallel(
            mesh, buffers=[copy_S], buffer_seq_dims=[0], no_restore_buffers={copy_S}
        )
        return made

    return context


LIBRARY: Final = Library("torch", ("te", "all_gather"), make, dual_chunks, around)
