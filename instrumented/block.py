"""Attention of one block of queries over one block of keys: the only place that calls an attention kernel.

Whatever kernel is behind it, a caller gets: tensors in BLHD layout, an lse that is the contiguous natural-log
denominator in fp32 (fp64 for fp64 inputs), -inf for a query that saw no key, and gradients that are exact
parts of the whole when `out` and `lse` are those of the whole row.

Shapes: B batch, L query tokens, S key tokens, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from instrumented.block_cuda import find_kernel, fold
from instrumented.softmax import accumulator_dtype, merge_into

_aten = torch.ops.aten
_forward = _aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def block_attention_forward(
    q_BLHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, *, is_causal: bool, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Return the block's output [B, L, H, D] and lse [B, H, L].

    Args:
        q_BLHD: Queries.
        k_BSGD: Keys; G divides H.
        v_BSGD: Values.
        is_causal: Mask keys after the query. The last query is aligned with the last key, so that L may be
            less than S.
        softmax_scale: Factor of the scores before the softmax.

    Raises:
        ValueError: A causal block has more queries than keys.
    """
    if k_BSGD.shape[1] == 0:
        return _empty_result(q_BLHD)
    before, kernel = _keys_before(q_BLHD, k_BSGD) if is_causal else 0, find_kernel(q_BLHD)
    if before and not (kernel and kernel.aligns_last):
        return _forward_of_two(q_BLHD, k_BSGD, v_BSGD, before, softmax_scale)
    if kernel:
        out_BLHD, lse_BHL = kernel.forward(q_BLHD, k_BSGD, v_BSGD, is_causal, softmax_scale)
        return out_BLHD, lse_BHL.contiguous()
    out_BHLD, lse_BHL = _forward(
        q_BLHD.transpose(1, 2),
        k_BSGD.transpose(1, 2),
        v_BSGD.transpose(1, 2),
        0.0,
        is_causal,
        scale=softmax_scale,
    )
    return out_BHLD.transpose(1, 2), lse_BHL.to(accumulator_dtype(q_BLHD.dtype)).contiguous()


def block_attention_backward(
    dout_BLHD: Tensor,
    q_BLHD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    out_BLHD: Tensor,
    lse_BHL: Tensor,
    *,
    is_causal: bool,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the block's part of dq [B, L, H, D], dk and dv [B, S, G, D].

    Args:
        dout_BLHD: Gradient of the whole row's output.
        q_BLHD: Queries.
        k_BSGD: Keys.
        v_BSGD: Values.
        out_BLHD: Output of the whole row, over all keys, not of this block.
        lse_BHL: Its lse, natural logarithm.
        is_causal: As in the forward pass.
        softmax_scale: As in the forward pass.

    Raises:
        ValueError: A causal block has more queries than keys.
    """
    if k_BSGD.shape[1] == 0:
        return torch.zeros_like(q_BLHD), torch.zeros_like(k_BSGD), torch.zeros_like(v_BSGD)
    saved = (dout_BLHD, q_BLHD, k_BSGD, v_BSGD, out_BLHD, lse_BHL)
    before, kernel = _keys_before(q_BLHD, k_BSGD) if is_causal else 0, find_kernel(q_BLHD)
    if before and not (kernel and kernel.aligns_last):
        return _backward_of_two(*saved, before, softmax_scale)
    if kernel:
        return kernel.backward(saved, is_causal, softmax_scale)
    dq_BHLD, dk_BHSD, dv_BHSD = _backward(
        dout_BLHD.transpose(1, 2),
        q_BLHD.transpose(1, 2),
        k_BSGD.transpose(1, 2),
        v_BSGD.transpose(1, 2),
        out_BLHD.transpose(1, 2),
        lse_BHL,
        0.0,
        is_causal,
        scale=softmax_scale,
    )
    n_kv_heads = k_BSGD.shape[2]
    return dq_BHLD.transpose(1, 2), fold(dk_BHSD, n_kv_heads), fold(dv_BHSD, n_kv_heads)


def _keys_before(q_BLHD: Tensor, k_BSGD: Tensor) -> int:
    """Return how many keys of a causal block come before its first query's own."""
    n_before = k_BSGD.shape[1] - q_BLHD.shape[1]
    if n_before < 0:
        raise ValueError(
            f"a causal block needs a key for every query, not {q_BLHD.shape[1]} queries and {k_BSGD.shape[1]} keys"
        )
    return n_before


def _forward_of_two(
    q_BLHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, n_before: int, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Return the forward pass of a rectangle and the square after it.

    For kernels that align a causal mask with the first key; those that align it with the last need one call.
    """
    sum_type = accumulator_dtype(q_BLHD.dtype)
    out_BLHD, lse_BHL = block_attention_forward(
        q_BLHD, k_BSGD[:, :n_before], v_BSGD[:, :n_before], is_causal=False, softmax_scale=softmax_scale
    )
    square = block_attention_forward(
        q_BLHD, k_BSGD[:, n_before:], v_BSGD[:, n_before:], is_causal=True, softmax_scale=softmax_scale
    )
    total_BLHD = out_BLHD.to(sum_type)
    merge_into(total_BLHD, lse_BHL, *square)
    return total_BLHD.to(q_BLHD.dtype), lse_BHL


def _backward_of_two(
    dout_BLHD: Tensor,
    q_BLHD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    out_BLHD: Tensor,
    lse_BHL: Tensor,
    n_before: int,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the backward pass of a rectangle and the square after it."""
    parts = [
        block_attention_backward(
            dout_BLHD,
            q_BLHD,
            k_BSGD[:, keys],
            v_BSGD[:, keys],
            out_BLHD,
            lse_BHL,
            is_causal=is_causal,
            softmax_scale=softmax_scale,
        )
        for keys, is_causal in ((slice(0, n_before), False), (slice(n_before, None), True))
    ]
    (dq_BLHD, *before), (dq_square_BLHD, *square) = parts
    sum_type = accumulator_dtype(q_BLHD.dtype)
    dq_BLHD = (dq_BLHD.to(sum_type) + dq_square_BLHD).to(q_BLHD.dtype)
    dk_BSGD, dv_BSGD = (torch.cat(pair, dim=1) for pair in zip(before, square, strict=True))
    return dq_BLHD, dk_BSGD, dv_BSGD


def _empty_result(q_BLHD: Tensor) -> tuple[Tensor, Tensor]:
    batch, n_queries, heads, _ = q_BLHD.shape
    lse_BHL = q_BLHD.new_full((batch, heads, n_queries), -torch.inf, dtype=accumulator_dtype(q_BLHD.dtype))
    return torch.zeros_like(q_BLHD), lse_BHL
