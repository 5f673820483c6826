"""The attention adapter against autograd in float64, in every type, mask and head grouping."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from instrumented.block import block_attention_backward, block_attention_forward

SCALE = 0.3
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 6e-2, torch.float16: 8e-3}


def dense(q_BLHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Return (out, lse) by definition, differentiable."""
    n = q_BLHD.shape[2] // k_BSGD.shape[2]
    k_BSHD, v_BSHD = k_BSGD.repeat_interleave(n, dim=2), v_BSGD.repeat_interleave(n, dim=2)
    scores_BHLS = torch.einsum("blhd,bshd->bhls", q_BLHD, k_BSHD) * SCALE
    if is_causal:
        mask_LS = torch.ones(scores_BHLS.shape[-2:], dtype=torch.bool).triu(1)
        scores_BHLS = scores_BHLS.masked_fill(mask_LS, -torch.inf)
    return torch.einsum("bhls,bshd->blhd", scores_BHLS.softmax(-1), v_BSHD), scores_BHLS.logsumexp(-1)


def make(data_type: torch.dtype, n_queries: int, n_keys: int, kv_heads: int) -> list[Tensor]:
    """Return q, k, v and dout."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(1, n_queries, 4, 8), (1, n_keys, kv_heads, 8), (1, n_keys, kv_heads, 8), (1, n_queries, 4, 8)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(data_type) for shape in shapes]


@pytest.mark.parametrize("data_type", TOLERANCE, ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("n_queries", "n_keys", "is_causal"), [(7, 7, True), (7, 7, False), (6, 33, False)])
def test_forward_and_backward(
    data_type: torch.dtype, kv_heads: int, n_queries: int, n_keys: int, is_causal: bool
) -> None:
    q, k, v, dout = make(data_type, n_queries, n_keys, kv_heads)
    leaves = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    expected_out, expected_lse = dense(*leaves, is_causal)
    expected = torch.autograd.grad(expected_out, leaves, dout.double())
    out, lse = block_attention_forward(q, k, v, is_causal=is_causal, softmax_scale=SCALE)
    gradients = block_attention_backward(dout, q, k, v, out, lse, is_causal=is_causal, softmax_scale=SCALE)
    tolerance = TOLERANCE[data_type]
    assert lse.dtype == (torch.float64 if data_type == torch.float64 else torch.float32)
    assert lse.is_contiguous()
    torch.testing.assert_close(lse.double(), expected_lse.detach(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(out.double(), expected_out.detach(), rtol=tolerance, atol=tolerance)
    for actual, wanted in zip(gradients, expected, strict=True):
        assert actual.shape == wanted.shape
        torch.testing.assert_close(actual.double(), wanted, rtol=tolerance, atol=tolerance)


def test_gradients_of_parts_add_up_to_the_whole() -> None:
    """With the whole row's out and lse, each block of keys gives its exact share of dq, and its own dk and dv."""
    q, k, v, dout = make(torch.float64, 6, 9, 2)
    options = {"is_causal": False, "softmax_scale": SCALE}
    out, lse = block_attention_forward(q, k, v, **options)
    whole = block_attention_backward(dout, q, k, v, out, lse, **options)
    parts = [
        block_attention_backward(dout, q, k[:, cut], v[:, cut], out, lse, **options)
        for cut in (slice(0, 2), slice(2, 9))
    ]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0])
    torch.testing.assert_close(torch.cat([parts[0][1], parts[1][1]], dim=1), whole[1])
    torch.testing.assert_close(torch.cat([parts[0][2], parts[1][2]], dim=1), whole[2])


def test_no_keys_give_nothing() -> None:
    q, k, v, dout = make(torch.float32, 3, 0, 2)
    out, lse = block_attention_forward(q, k, v, is_causal=False, softmax_scale=SCALE)
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.isneginf(lse).all()
    gradients = block_attention_backward(dout, q, k, v, out, lse, is_causal=False, softmax_scale=SCALE)
    assert [tuple(gradient.shape) for gradient in gradients] == [q.shape, k.shape, v.shape]
    assert not gradients[0].any()


@pytest.mark.parametrize("data_type", TOLERANCE, ids=str)
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_a_causal_block_is_aligned_with_its_last_key(data_type: torch.dtype, kv_heads: int) -> None:
    """Five queries and eight keys: the first query sees four keys, the last one all."""
    q, k, v, dout = make(data_type, 5, 8, kv_heads)
    whole_q = torch.cat([torch.zeros_like(q[:, :3]), q], dim=1)
    leaves = [tensor.double().requires_grad_() for tensor in (whole_q, k, v)]
    whole_out, whole_lse = dense(*leaves, is_causal=True)
    expected = torch.autograd.grad(whole_out[:, 3:], leaves, dout.double())
    options = {"is_causal": True, "softmax_scale": SCALE}
    out, lse = block_attention_forward(q, k, v, **options)
    gradients = block_attention_backward(dout, q, k, v, out, lse, **options)
    tolerance = {"rtol": TOLERANCE[data_type], "atol": TOLERANCE[data_type]}
    torch.testing.assert_close(out.double(), whole_out[:, 3:].detach(), **tolerance)
    torch.testing.assert_close(lse.double(), whole_lse[:, :, 3:].detach(), **tolerance)
    wanted = (expected[0][:, 3:], *expected[1:])
    for actual, gradient, like in zip(gradients, wanted, (q, k, v), strict=True):
        assert actual.dtype == like.dtype
        torch.testing.assert_close(actual.double(), gradient, **tolerance)


def test_a_causal_block_with_too_few_keys_is_refused() -> None:
    q, k, v, _ = make(torch.float32, 5, 3, 2)
    with pytest.raises(ValueError, match="a key for every query, not 5 queries and 3 keys"):
        block_attention_forward(q, k, v, is_causal=True, softmax_scale=SCALE)
