"""The adapter of CUDA's attention kernels: those that any machine can run by value, the others by shape and call."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from instrumented import block, block_cuda
from instrumented.block import block_attention_backward, block_attention_forward
from instrumented.block_cuda import KERNELS, AttentionKernel, find_kernel

SCALE = 0.3
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 6e-2, torch.float16: 8e-3}
DENSE = KERNELS[-1]
FLASH_ATTN = KERNELS[0]


def attend(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    return DENSE.forward(q, k, v, causal, softmax_scale)


def old_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size: Any,
    softcap: float, alibi_slopes: Any, return_softmax: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """The function of flash-attn 2.6: a window is a pair, and eight values come back."""
    assert (dropout_p, window_size, softcap, alibi_slopes, return_softmax) == (
        0.0,
        (-1, -1),
        0.0,
        None,
        False,
    )
    out, lse = attend(q, k, v, softmax_scale, causal)
    return out, q, k, v, out, lse, None, None


def new_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Any, return_softmax: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """The function of flash-attn 2.7: two numbers, and four values."""
    assert (dropout_p, window_size_left, window_size_right, softcap) == (0.0, -1, -1, 0.0)
    assert alibi_slopes is None
    assert return_softmax is False
    return *attend(q, k, v, softmax_scale, causal), None, None


def backward_of(*window: str) -> Callable[..., Tensor]:
    """Return flash-attn's backward function of a version, which fills the tensors that it is given."""

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
        dq: Tensor, dk: Tensor, dv: Tensor, dropout_p: float, softmax_scale: float, causal: bool, **rest: Any,
    ) -> Tensor:  # fmt: skip
        assert set(rest) == {*window, "softcap", "alibi_slopes", "deterministic"}
        assert all(tensor.is_contiguous() for tensor in (dout, dq, dk, dv, softmax_lse))
        saved = (dout, q, k, v, out, softmax_lse)
        for target, gradient in zip((dq, dk, dv), DENSE.backward(saved, causal, softmax_scale), strict=True):
            target.copy_(gradient)
        return softmax_lse

    return backward


def old_backward(*tensors: Tensor, window_size: Any, **rest: Any) -> Tensor:
    assert window_size == (-1, -1)
    return backward_of("window_size")(*tensors, window_size=window_size, **rest)


def new_backward(*tensors: Tensor, window_size_left: int, window_size_right: int, **rest: Any) -> Tensor:
    window = {"window_size_left": window_size_left, "window_size_right": window_size_right}
    assert set(window.values()) == {-1}
    return backward_of(*window)(*tensors, **window, **rest)


class CustomOp:
    """What torch makes of a function that is registered as an op: the function itself is behind `_init_fn`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._init_fn = function

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._init_fn(*arguments, **named)


VERSIONS = {
    "2.6": (old_forward, old_backward),
    "2.7": (new_forward, new_backward),
    "2.7 as torch op": (CustomOp(new_forward), CustomOp(new_backward)),
}


@pytest.fixture(params=["dense", *VERSIONS])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AttentionKernel:
    """Let the blocks of the host go to a kernel of CUDA's."""
    chosen = DENSE
    if request.param in VERSIONS:
        forward, backward = VERSIONS[request.param]
        package = SimpleNamespace(_flash_attn_forward=forward, _flash_attn_backward=backward)
        monkeypatch.setattr(block_cuda, "flash_attn_interface", package)
        block_cuda._window_arguments.cache_clear()
        chosen = FLASH_ATTN
    monkeypatch.setattr(block, "find_kernel", lambda _q: chosen)
    return chosen


def dense(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Return (out, lse) by definition, differentiable; the last query is aligned with the last key."""
    n = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(n, dim=2), v.repeat_interleave(n, dim=2)
    scores = torch.einsum("blhd,bshd->bhls", q, k) * SCALE
    if is_causal:
        n_before = k.shape[1] - q.shape[1]
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + n_before)
        scores = scores.masked_fill(mask, -torch.inf)
    return torch.einsum("bhls,bshd->blhd", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("data_type", TOLERANCE, ids=str)
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize(
    ("n_queries", "n_keys", "is_causal"), [(7, 7, True), (7, 7, False), (6, 33, False), (5, 8, True)]
)
def test_forward_and_backward(
    data_type: torch.dtype, kv_heads: int, n_queries: int, n_keys: int, is_causal: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = [(1, n_queries, 4, 8), (1, n_keys, kv_heads, 8), (1, n_keys, kv_heads, 8), (1, n_queries, 4, 8)]
    q, k, v, dout = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(data_type) for shape in shapes
    )
    leaves = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    expected_out, expected_lse = dense(*leaves, is_causal)
    expected = torch.autograd.grad(expected_out, leaves, dout.double())
    out, lse = block_attention_forward(q, k, v, is_causal=is_causal, softmax_scale=SCALE)
    gradients = block_attention_backward(dout, q, k, v, out, lse, is_causal=is_causal, softmax_scale=SCALE)
    tolerance = {"rtol": TOLERANCE[data_type], "atol": TOLERANCE[data_type]}
    assert lse.dtype == (torch.float64 if data_type == torch.float64 else torch.float32)
    assert lse.is_contiguous()
    torch.testing.assert_close(lse.double(), expected_lse.detach(), **tolerance)
    torch.testing.assert_close(out.double(), expected_out.detach(), **tolerance)
    for actual, wanted, like in zip(gradients, expected, (q, k, v), strict=True):
        assert (actual.shape, actual.dtype) == (like.shape, data_type)
        torch.testing.assert_close(actual.double(), wanted, **tolerance)


@pytest.mark.parametrize("kernel", KERNELS[1:3], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("n_queries", [40, 64])
def test_torchs_own_ops_take_our_calls_and_give_our_shapes(
    kernel: AttentionKernel, kv_heads: int, n_queries: int
) -> None:
    """On tensors without data: what an op computes needs a GPU, but not how it is called."""

    def tensor(n_tokens: int, heads: int) -> Tensor:
        return torch.empty(1, n_tokens, heads, 16, dtype=torch.bfloat16, device="meta")

    q, k, v = tensor(n_queries, 4), tensor(n_queries, kv_heads), tensor(n_queries, kv_heads)
    out, lse = kernel.forward(q, k, v, True, SCALE)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (1, 4, n_queries), torch.float32)
    gradients = kernel.backward((torch.empty_like(q), q, k, v, out, lse.contiguous()), True, SCALE)
    assert [gradient.shape for gradient in gradients] == [q.shape, k.shape, v.shape]


def choice(data_type: torch.dtype, head_dim: int) -> str:
    """Return the kernel that takes such queries."""
    q = torch.empty(1, 4, 2, head_dim, dtype=data_type)
    return next(kernel.name for kernel in KERNELS if kernel.takes(q))


def test_each_type_has_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_cuda, "flash_attn_interface", None)
    assert choice(torch.bfloat16, 128) == "aten-flash"
    assert choice(torch.float16, 512) == "aten-efficient"
    assert choice(torch.float32, 64) == "aten-efficient"
    assert choice(torch.float64, 64) == choice(torch.bfloat16, 5) == "dense"
    monkeypatch.setattr(block_cuda, "flash_attn_interface", SimpleNamespace())
    assert choice(torch.bfloat16, 128) == "flash-attn"
    assert choice(torch.float32, 64) == "aten-efficient"


def test_the_host_needs_none_of_them() -> None:
    assert find_kernel(torch.zeros(1, 4, 2, 8)) is None
