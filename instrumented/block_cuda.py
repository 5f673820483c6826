"""Attention kernels on CUDA behind one form: out [B, L, H, D], natural-log lse [B, H, L] in fp32, exact gradients.

`KERNELS` is tried in order; the first that is there and takes the tensors' type and head dim runs.

    flash-attn             fp16, bf16; its low-level functions (2.6 or newer), causal masks aligned with the last key
    aten-flash             the same kernel as built into torch; used for squares alone
    aten-efficient         fp32 too; wants as many KV heads as query heads, pads its lse to multiples of 32
    dense                  plain matrix products, for fp64 and whatever no kernel takes; keeps L x S scores

Here a causal block has a key for every query, so no row is without keys and none of the kernels' ways to say that
(+inf, -inf, 0) can appear.

Shapes: B batch, L query tokens, S key tokens, H query heads, G key/value heads, D head dim.
Source: flash_attn/flash_attn_interface.py of Dao-AILab/flash-attention; torch's native_functions.yaml.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from instrumented.softmax import accumulator_dtype

try:
    from flash_attn import flash_attn_interface
except ImportError:  # optional: torch has the same kernel, and others
    flash_attn_interface = None

_aten = torch.ops.aten
_HALF_TYPES: Final = (torch.float16, torch.bfloat16)
_MAX_HEAD_DIM: Final = 256
_LSE_ALIGNMENT: Final = 32  # of the efficient kernel, in queries
_WHOLE_WINDOW: Final = (-1, -1)

Forward = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
"""(q_BLHD, k_BSGD, v_BSGD, is_causal, softmax_scale) -> (out_BLHD, lse_BHL)"""

Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""(dout_BLHD, q_BLHD, k_BSGD, v_BSGD, out_BLHD, lse_BHL), the last two of the whole rows"""

Backward = Callable[[Saved, bool, float], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """One implementation.

    Attributes:
        name: What the run's description calls it.
        takes: Whether it is there and takes queries like these.
        forward: The forward pass.
        backward: The backward pass.
        aligns_last: Whether it aligns a causal mask with the last key, so that L < S needs one call.
    """

    name: str
    takes: Callable[[Tensor], bool]
    forward: Forward
    backward: Backward
    aligns_last: bool = False


def find_kernel(q_BLHD: Tensor) -> AttentionKernel | None:
    """Return the kernel for queries like these; None for those of the host, which need none of these."""
    if not q_BLHD.is_cuda:
        return None
    return next(kernel for kernel in KERNELS if kernel.takes(q_BLHD))


# ── flash-attn ─────────────────────────────────────────────────────────────────────────────────────


@cache
def _window_arguments(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments that say `no window`: a pair before flash-attn 2.7, two numbers since."""
    names = inspect.signature(getattr(function, "_init_fn", function)).parameters  # behind torch's custom op
    if "window_size" in names:
        return {"window_size": _WHOLE_WINDOW}
    return dict(zip(("window_size_left", "window_size_right"), _WHOLE_WINDOW, strict=True))


def _takes_flash_attn(q_BLHD: Tensor) -> bool:
    return flash_attn_interface is not None and _takes_aten_flash(q_BLHD)


def _flash_attn_forward(
    q_BLHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, is_causal: bool, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    function = flash_attn_interface._flash_attn_forward
    result = function(
        q_BLHD,
        k_BSGD,
        v_BSGD,
        dropout_p=0.0,
        softmax_scale=softmax_scale,
        causal=is_causal,
        softcap=0.0,
        alibi_slopes=None,
        return_softmax=False,
        **_window_arguments(function),
    )
    # (out, lse, mask, rng_state) since 2.7; before, q, k, v and the padded out stood between the first two.
    lse_BHL = result[1] if len(result) == 4 else result[5]
    return result[0], lse_BHL[:, :, : q_BLHD.shape[1]]


def _flash_attn_backward(
    saved: Saved, is_causal: bool, softmax_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    function = flash_attn_interface._flash_attn_backward
    _, q_BLHD, k_BSGD, v_BSGD, _, _ = saved
    gradients = tuple(
        torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q_BLHD, k_BSGD, v_BSGD)
    )
    function(
        *_contiguous(saved),
        *gradients,
        dropout_p=0.0,
        softmax_scale=softmax_scale,
        causal=is_causal,
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        **_window_arguments(function),
    )
    return gradients


# ── torch's own ────────────────────────────────────────────────────────────────────────────────────


def _takes_aten_flash(q_BLHD: Tensor) -> bool:
    head_dim = q_BLHD.shape[-1]
    return q_BLHD.dtype in _HALF_TYPES and head_dim % 8 == 0 and head_dim <= _MAX_HEAD_DIM


def _aten_flash_forward(
    q_BLHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, is_causal: bool, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    qkv = (t.transpose(1, 2) for t in (q_BLHD, k_BSGD, v_BSGD))
    out_BHLD, lse_BHL, *_ = _aten._scaled_dot_product_flash_attention.default(
        *qkv, 0.0, is_causal, False, scale=softmax_scale
    )
    return out_BHLD.transpose(1, 2), lse_BHL[:, :, : q_BLHD.shape[1]]


def _aten_flash_backward(
    saved: Saved, is_causal: bool, softmax_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    *tensors_BLHD, lse_BHL = _contiguous(saved)
    tensors = [t.transpose(1, 2) for t in tensors_BLHD]
    n_queries, n_keys = tensors[1].shape[2], tensors[2].shape[2]
    # Random state of a dropout that there is none of: a pair of numbers and one.
    seed, unused = (torch.empty(n, dtype=torch.uint64, device=lse_BHL.device) for n in ((2,), ()))
    lengths = (None, None, n_queries, n_keys)
    dq_BHLD, dk_BGSD, dv_BGSD = _aten._scaled_dot_product_flash_attention_backward.default(
        *tensors, lse_BHL, *lengths, 0.0, is_causal, seed, unused, scale=softmax_scale
    )
    n_kv_heads = saved[2].shape[2]
    return dq_BHLD.transpose(1, 2), fold(dk_BGSD, n_kv_heads), fold(dv_BGSD, n_kv_heads)


def _takes_aten_efficient(q_BLHD: Tensor) -> bool:
    return q_BLHD.dtype in (*_HALF_TYPES, torch.float32) and q_BLHD.shape[-1] % 8 == 0


def _aten_efficient_forward(
    q_BLHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, is_causal: bool, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    qkv = (q_BLHD.transpose(1, 2), *(_as_many_heads(t, q_BLHD).transpose(1, 2) for t in (k_BSGD, v_BSGD)))
    out_BHLD, lse_BHL, *_ = _aten._scaled_dot_product_efficient_attention.default(
        *qkv, None, True, 0.0, is_causal, scale=softmax_scale
    )
    return out_BHLD.transpose(1, 2), lse_BHL[:, :, : q_BLHD.shape[1]]


def _aten_efficient_backward(
    saved: Saved, is_causal: bool, softmax_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dout_BLHD, q_BLHD, k_BSGD, v_BSGD, out_BLHD, lse_BHL = saved
    k_BSHD, v_BSHD = (_as_many_heads(t, q_BLHD) for t in (k_BSGD, v_BSGD))
    dout, q, k, v, out = (
        t.transpose(1, 2) for t in (dout_BLHD.contiguous(), q_BLHD, k_BSHD, v_BSHD, out_BLHD)
    )
    padding = (0, -lse_BHL.shape[2] % _LSE_ALIGNMENT)
    lse = torch.nn.functional.pad(lse_BHL, padding, value=torch.inf).contiguous()
    seed, offset = (torch.zeros((), dtype=torch.int64, device=lse.device) for _ in range(2))
    wanted = [True, True, True, False]
    dq_BHLD, dk_BHSD, dv_BHSD, _ = _aten._scaled_dot_product_efficient_attention_backward.default(
        dout, q, k, v, None, out, lse, seed, offset, 0.0, wanted, is_causal, scale=softmax_scale
    )
    n_kv_heads = k_BSGD.shape[2]
    return dq_BHLD.transpose(1, 2), fold(dk_BHSD, n_kv_heads), fold(dv_BHSD, n_kv_heads)


# ── dense ──────────────────────────────────────────────────────────────────────────────────────────


def _takes_everything(q_BLHD: Tensor) -> bool:
    return True


def _dense_forward(
    q_BLHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, is_causal: bool, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    k_BSHD, v_BSHD = (_as_many_heads(t, q_BLHD) for t in (k_BSGD, v_BSGD))
    scores_BHLS = _scores(q_BLHD, k_BSHD, is_causal, softmax_scale)
    lse_BHL = torch.logsumexp(scores_BHLS, dim=-1)
    p_BHLS = torch.exp(scores_BHLS - lse_BHL.unsqueeze(-1))
    out_BLHD = torch.einsum("bhls,bshd->blhd", p_BHLS, v_BSHD.to(p_BHLS.dtype))
    return out_BLHD.to(q_BLHD.dtype), lse_BHL


def _dense_backward(saved: Saved, is_causal: bool, softmax_scale: float) -> tuple[Tensor, Tensor, Tensor]:
    sum_type = accumulator_dtype(saved[1].dtype)
    dout_BLHD, q_BLHD, k_BSGD, v_BSGD, out_BLHD, lse_BHL = (t.to(sum_type) for t in saved)
    k_BSHD, v_BSHD = (_as_many_heads(t, q_BLHD) for t in (k_BSGD, v_BSGD))
    p_BHLS = torch.exp(_scores(q_BLHD, k_BSHD, is_causal, softmax_scale) - lse_BHL.unsqueeze(-1))
    delta_BHL1 = (dout_BLHD * out_BLHD).sum(dim=-1).transpose(1, 2).unsqueeze(-1)
    dp_BHLS = torch.einsum("blhd,bshd->bhls", dout_BLHD, v_BSHD)
    dscores_BHLS = p_BHLS * (dp_BHLS - delta_BHL1) * softmax_scale
    dq_BLHD = torch.einsum("bhls,bshd->blhd", dscores_BHLS, k_BSHD)
    dk_BHSD = torch.einsum("bhls,blhd->bhsd", dscores_BHLS, q_BLHD)
    dv_BHSD = torch.einsum("bhls,blhd->bhsd", p_BHLS, dout_BLHD)
    n_kv_heads, data_type = k_BSGD.shape[2], saved[1].dtype
    parts = (dq_BLHD, fold(dk_BHSD, n_kv_heads), fold(dv_BHSD, n_kv_heads))
    dq, dk, dv = (part.to(data_type) for part in parts)
    return dq, dk, dv


def _scores(q_BLHD: Tensor, k_BSHD: Tensor, is_causal: bool, softmax_scale: float) -> Tensor:
    """Return scores in the accumulator's type, -inf where a causal mask, aligned with the last key, hides a key."""
    sum_type = accumulator_dtype(q_BLHD.dtype)
    scores_BHLS = torch.einsum("blhd,bshd->bhls", q_BLHD.to(sum_type), k_BSHD.to(sum_type)) * softmax_scale
    if is_causal:
        n_queries, n_keys = scores_BHLS.shape[-2:]
        hidden_LS = torch.ones(n_queries, n_keys, dtype=torch.bool, device=q_BLHD.device)
        scores_BHLS.masked_fill_(hidden_LS.triu(1 + n_keys - n_queries), -torch.inf)
    return scores_BHLS


# ── shared ─────────────────────────────────────────────────────────────────────────────────────────


def fold(gradient_BHSD: Tensor, n_kv_heads: int) -> Tensor:
    """Return a gradient BSGD per key/value head, also from a kernel that gives one per query head."""
    if gradient_BHSD.shape[1] == n_kv_heads:
        return gradient_BHSD.transpose(1, 2)
    return gradient_BHSD.unflatten(1, (n_kv_heads, -1)).sum(dim=2).transpose(1, 2)


def _as_many_heads(k_BSGD: Tensor, q_BLHD: Tensor) -> Tensor:
    n_queries_per_kv = q_BLHD.shape[2] // k_BSGD.shape[2]
    return k_BSGD if n_queries_per_kv == 1 else k_BSGD.repeat_interleave(n_queries_per_kv, dim=2)


def _contiguous(saved: Saved) -> tuple[Tensor, ...]:
    """Return the tensors as the flash kernels want them: the output's gradient dense, heads' elements together."""
    dout, *rest, lse = saved
    return (dout.contiguous(), *(t if t.stride(-1) == 1 else t.contiguous() for t in rest), lse.contiguous())


KERNELS: Final = (
    AttentionKernel(
        "flash-attn", _takes_flash_attn, _flash_attn_forward, _flash_attn_backward, aligns_last=True
    ),
    AttentionKernel("aten-flash", _takes_aten_flash, _aten_flash_forward, _aten_flash_backward),
    AttentionKernel(
        "aten-efficient", _takes_aten_efficient, _aten_efficient_forward, _aten_efficient_backward
    ),
    AttentionKernel("dense", _takes_everything, _dense_forward, _dense_backward, aligns_last=True),
)
