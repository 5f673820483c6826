"""What a run of the model must give: the whole model on one device, written as a formula and left to autograd.

In float64 with dense attention it is the reference; in the run's own type with one attention kernel it does the
same maths as a run, and shows how much rounding there is. It shares no backward pass with the model.

Shapes: B batch, S sequence, E hidden, H, G query and key/value heads, D head dim, Z = 2F of the ffn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.nn.functional import silu

from instrumented.messages import fp8_round_trip
from instrumented.model import ModelPlan
from instrumented.model_maths import NORM_EPSILON, rope_table
from instrumented.model_weights import BlockWeights
from instrumented.oracle import Results, dense_attention, one_kernel_attention
from instrumented.problem import Inputs
from instrumented.softmax import accumulator_dtype

HOST: Final = torch.device("cpu")


class Attend(Protocol):
    """Computes attention of whole tensors, and its gradients."""

    def __call__(self, inputs: Inputs, *, with_backward: bool) -> Results:
        """Return the output, and the gradients where they are asked for."""


@dataclass(frozen=True, slots=True)
class ModelResults:
    """What the whole model gives.

    Attributes:
        out_BSE: What each block puts out.
        loss_BS: Each token's share of the loss.
        gradients: Of each block's weights; none for a forward pass alone.
    """

    out_BSE: list[Tensor]
    loss_BS: Tensor
    gradients: list[BlockWeights]


def reference(plan: ModelPlan) -> ModelResults:
    """Return the results in float64, with dense attention."""
    return _run(plan, torch.float64, lambda layer: _attend(plan, dense_attention))


def one_process(
    plan: ModelPlan, fp8_layers: Collection[int] = (), place: torch.device = HOST
) -> ModelResults:
    """Return the results in the run's type, with one attention kernel.

    Args:
        plan: What to run.
        fp8_layers: Blocks whose keys and values are rounded to fp8, as the run's are on their way.
        place: Device to compute on: the run's own, since kernels round differently.
    """

    def attend(layer: int) -> Attend:
        return _attend(plan, _with_fp8_keys if layer in fp8_layers else one_kernel_attention)

    return _run(plan, plan.problem.data_type, attend, place)


def _attend(plan: ModelPlan, attention: Callable[..., Results]) -> Attend:
    problem = plan.problem
    return partial(attention, is_causal=problem.is_causal, softmax_scale=problem.softmax_scale)


def _with_fp8_keys(inputs: Inputs, **options: Any) -> Results:
    k_BSGD, v_BSGD = fp8_round_trip(inputs.k_BSGD), fp8_round_trip(inputs.v_BSGD)
    return one_kernel_attention(replace(inputs, k_BSGD=k_BSGD, v_BSGD=v_BSGD), **options)


def _run(
    plan: ModelPlan,
    data_type: torch.dtype,
    attend: Callable[[int], Attend],
    place: torch.device = HOST,
) -> ModelResults:
    x_BSE, target_BSE = (tensor.to(place, data_type) for tensor in plan.tokens())
    sum_type = accumulator_dtype(data_type)
    table_2SC = rope_table(torch.arange(x_BSE.shape[1]), plan.sizes.head_dim, sum_type).to(place)
    weights, outs = [], []
    with torch.set_grad_enabled(plan.with_backward):
        for layer in range(plan.n_layers):
            drawn = (weight.to(place, data_type) for weight in plan.weights(layer))
            weights.append(BlockWeights(*(w.requires_grad_(plan.with_backward) for w in drawn)))
            x_BSE = _block(plan, x_BSE, weights[-1], table_2SC, attend(layer))
            outs.append(x_BSE.detach().to(HOST))
        error_BSE = x_BSE.to(sum_type) - target_BSE
        loss_BS = error_BSE.square().sum(dim=-1) / error_BSE.numel()
        if plan.with_backward:
            loss_BS.sum().backward()
    gradients = []
    if plan.with_backward:
        gradients = [BlockWeights(*(w.grad.to(HOST) for w in block)) for block in weights]
    return ModelResults(outs, loss_BS.detach().to(HOST), gradients)


def _block(
    plan: ModelPlan, x_BSE: Tensor, weights: BlockWeights, table_2SC: Tensor, attend: Attend
) -> Tensor:
    sizes = plan.sizes
    qkv_BSY = _norm(x_BSE, weights.norms_2E[0]) @ weights.qkv_EY
    q, k, v = (
        part.unflatten(-1, (-1, sizes.head_dim)) for part in qkv_BSY.split(list(sizes.qkv_columns), dim=-1)
    )
    out_BSHD = _Attention.apply(_turned(q, table_2SC), _turned(k, table_2SC), v, attend)
    x_BSE = x_BSE + out_BSHD.flatten(2) @ weights.out_XE
    gate_BSF, up_BSF = (_norm(x_BSE, weights.norms_2E[1]) @ weights.gate_up_EZ).chunk(2, dim=-1)
    sum_type = accumulator_dtype(x_BSE.dtype)
    act_BSF = (silu(gate_BSF.to(sum_type)) * up_BSF.to(sum_type)).to(x_BSE.dtype)
    return x_BSE + act_BSF @ weights.down_FE


def _norm(x_BSE: Tensor, weight_E: Tensor) -> Tensor:
    wide = x_BSE.to(accumulator_dtype(x_BSE.dtype))
    mean_BS1 = wide.square().mean(dim=-1, keepdim=True)
    return (wide / (mean_BS1 + NORM_EPSILON).sqrt() * weight_E).to(x_BSE.dtype)


def _turned(x_BSHD: Tensor, table_2SC: Tensor) -> Tensor:
    """Return x turned by its tokens' angles, as a product of complex numbers."""
    cos_SC, sin_SC = table_2SC
    wide = x_BSHD.to(table_2SC.dtype)
    pairs = torch.complex(*(half.contiguous() for half in wide.chunk(2, dim=-1)))
    turned = pairs * torch.complex(cos_SC, sin_SC).unsqueeze(1)
    return torch.cat([turned.real, turned.imag], dim=-1).to(x_BSHD.dtype)


class _Attention(torch.autograd.Function):
    """Attention with the gradients that `attend` gives, in place of a graph of all scores."""

    @staticmethod
    def forward(ctx: Any, q_BSHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, attend: Attend) -> Tensor:
        ctx.save_for_backward(q_BSHD, k_BSGD, v_BSGD)
        ctx.attend = attend
        return attend(Inputs(q_BSHD, k_BSGD, v_BSGD, q_BSHD), with_backward=False).out_BSHD

    @staticmethod
    def backward(ctx: Any, dout_BSHD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        results = ctx.attend(Inputs(*ctx.saved_tensors, dout_BSHD), with_backward=True)
        return results.dq_BSHD, results.dk_BSGD, results.dv_BSGD, None
