"""Attention of one block of queries over one block of keys: the only place that calls an attention kernel.

Whatever kernel is behind it, a caller gets: tensors in BLHD layout, an lse that is the contiguous natural-log
denominator in fp32 (fp64 for fp64 inputs), -inf for a query that saw no key, and gradients that are exact
parts of the whole when `out` and `lse` are those of the whole row.

Shapes: B batch, L query tokens, S key tokens, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from instrumented.softmax import accumulator_dtype

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
        is_causal: Mask keys after the query; the block must lie on the diagonal, so L equals S.
        softmax_scale: Factor of the scores before the softmax.

    Raises:
        ValueError: A causal block is not square: kernels disagree on which corner its diagonal starts in.
    """
    _require_square(q_BLHD, k_BSGD, is_causal)
    if k_BSGD.shape[1] == 0:
        return _empty_result(q_BLHD)
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
        ValueError: A causal block is not square.
    """
    _require_square(q_BLHD, k_BSGD, is_causal)
    if k_BSGD.shape[1] == 0:
        return torch.zeros_like(q_BLHD), torch.zeros_like(k_BSGD), torch.zeros_like(v_BSGD)
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
    return dq_BHLD.transpose(1, 2), _fold(dk_BHSD, n_kv_heads), _fold(dv_BHSD, n_kv_heads)


def _require_square(q_BLHD: Tensor, k_BSGD: Tensor, is_causal: bool) -> None:
    if is_causal and q_BLHD.shape[1] != k_BSGD.shape[1]:
        raise ValueError(
            f"a causal block must be square, not {q_BLHD.shape[1]} queries by {k_BSGD.shape[1]} keys"
        )


def _empty_result(q_BLHD: Tensor) -> tuple[Tensor, Tensor]:
    batch, n_queries, heads, _ = q_BLHD.shape
    lse_BHL = q_BLHD.new_full((batch, heads, n_queries), -torch.inf, dtype=accumulator_dtype(q_BLHD.dtype))
    return torch.zeros_like(q_BLHD), lse_BHL


def _fold(gradient_BHSD: Tensor, n_kv_heads: int) -> Tensor:
    """Return a gradient per key/value head, also from a kernel that gives one per query head."""
    if gradient_BHSD.shape[1] == n_kv_heads:
        return gradient_BHSD.transpose(1, 2)
    return gradient_BHSD.unflatten(1, (n_kv_heads, -1)).sum(dim=2).transpose(1, 2)
